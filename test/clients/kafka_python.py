"""A producer, a consumer and a transcript of kafka-python. See clients.go for the arguments."""

import sys
import time

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, NewPartitions, NewTopic
from kafka.errors import KafkaError


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


def fact(name, ask):
    """Prints what ask returns, or how it is refused."""
    try:
        print(f"{name}: {ask()}")
    except (KafkaError, ValueError) as e:
        print(f"{name}: {type(e).__name__} {e}")


def transactions(bootstrap, topic, prefix):
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=prefix + "tx")
    producer.init_transactions()
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        for i in range(6):
            producer.send(topic, value=b"tx%d" % i, partition=i % 3).get(60)
        fact("end", end)
    producer.close()


def read(bootstrap, topic, group, count, **more):
    # A leader that joins before it knows the topic assigns nothing, and now and then misses that it learned of it: it asks again soon.
    consumer = KafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False, metadata_max_age_ms=2000, **more
    )
    lines = []
    deadline = time.monotonic() + 60
    while len(lines) < count and time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=1000).values():
            lines += [f"{r.partition} {r.offset:03} {r.key} {r.value} {r.headers}" for r in records]
    if len(lines) < count:
        sys.exit(f"group {group} read {len(lines)} records of {count}")
    print("read", more, sorted(lines))
    partitions = [TopicPartition(topic, p) for p in range(3)]
    fact("assigned", lambda: sorted(consumer.assignment()))
    fact("commit", consumer.commit)
    fact("committed", lambda: [consumer.committed(p) for p in partitions])
    fact("positions", lambda: [consumer.position(p) for p in partitions])
    fact("beginning", lambda: sorted(consumer.beginning_offsets(partitions).items()))
    fact("end", lambda: sorted(consumer.end_offsets(partitions).items()))
    fact("times", lambda: sorted(consumer.offsets_for_times({partitions[0]: 1}).items()) != [])
    consumer.close()


def transcript(bootstrap, prefix):
    topic = prefix + "topic"
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    new = NewTopic(topic, replica_assignments={0: [1, 2, 3], 1: [2, 3, 1], 2: [3, 1, 2]}, topic_configs={"max.message.bytes": "20000"})
    fact("create", lambda: admin.create_topics([new]) is not None)
    fact("create again", lambda: admin.create_topics([new]) is not None)
    cluster = admin.describe_cluster()
    print("brokers", sorted(f"{b['broker_id']} {b['host']}:{b['port']}" for b in cluster["brokers"]))
    topics = []
    while not topics or topics[0]["error_code"] or any(p["leader_id"] < 0 for p in topics[0]["partitions"]):
        topics = admin.describe_topics([topic])
        time.sleep(0.05)
    for p in sorted(topics[0]["partitions"], key=lambda p: p["partition_index"]):
        print("partition", p["partition_index"], p["leader_id"], p["replica_nodes"], sorted(p["isr_nodes"]))
    for more in ({"enable_idempotence": True, "acks": "all"}, {"acks": 1, "compression_type": "gzip", "enable_idempotence": False}, {"acks": 0, "enable_idempotence": False}):
        producer = KafkaProducer(bootstrap_servers=bootstrap, **more)
        sent = [producer.send(topic, b"v%d" % i, b"k%d" % i, [("n", b"%d" % i)], partition=i % 3) for i in range(30)]
        for f in sent:
            fact("sent", lambda: (f.get(60).partition, f.get(60).offset if more["acks"] else "somewhere"))
        producer.close()
    producer = KafkaProducer(bootstrap_servers=bootstrap)
    fact("too large", lambda: producer.send(topic, b"x" * 30000, partition=0).get(60))
    fact("from tomorrow", lambda: producer.send(topic, b"x", partition=0, timestamp_ms=int(time.time() * 1000) + 48 * 3600 * 1000).get(60))
    producer.close()
    read(bootstrap, topic, prefix + "readers", 90)
    transactions(bootstrap, topic, prefix)
    read(bootstrap, topic, prefix + "committed", 96, isolation_level="read_committed")
    fact("groups", lambda: sorted(g["group_id"] for g in admin.list_groups() if g["group_id"].startswith(prefix)))
    fact("offsets", lambda: sorted(admin.list_group_offsets([prefix + "readers"])[prefix + "readers"].items()))
    fact("grow", lambda: admin.create_partitions({topic: NewPartitions(5)}) is not None)
    fact("grow less", lambda: admin.create_partitions({topic: NewPartitions(2)}) is not None)
    fact("configs", lambda: "max.message.bytes" in str(admin.describe_configs([ConfigResource("TOPIC", topic)])))
    fact("delete", lambda: admin.delete_topics([topic]) is not None)
    fact("delete again", lambda: admin.delete_topics([topic + "-absent"]))
    admin.close()


{"produce": produce, "consume": consume, "transcript": transcript}[sys.argv[1]](*sys.argv[2:])
