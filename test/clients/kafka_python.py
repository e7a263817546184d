"""A producer and a consumer of kafka-python. See clients.go for the arguments."""

import sys

from kafka import KafkaConsumer, KafkaProducer


def produce(bootstrap, topic, prefix, count, acks, codec, idempotent):
    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        acks=acks if acks == "all" else int(acks),
        compression_type=None if codec == "none" else codec,
        enable_idempotence=idempotent == "true",
        linger_ms=5,
    )
    sent = [
        producer.send(topic, key=b"key-%d" % i, value=b"%s-%d" % (prefix.encode(), i), headers=[("n", b"%d" % i)])
        for i in range(int(count))
    ]
    producer.flush(60)
    for future in sent:
        future.get(60)
    producer.close()


def consume(bootstrap, topic, group, count):
    consumer = KafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", consumer_timeout_ms=60000
    )
    left = int(count)
    for record in consumer:
        print(record.value.decode())
        left -= 1
        if left == 0:
            break
    consumer.close()
    sys.exit(left)


{"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
