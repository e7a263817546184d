"""A producer and a consumer of confluent-kafka (librdkafka). See clients.go for the arguments."""

import sys
import time

from confluent_kafka import Consumer, Producer

failures = []


def delivered(error, _message):
    if error is not None:
        failures.append(error)


def produce(bootstrap, topic, prefix, count, acks, codec, idempotent):
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": acks,
            "compression.type": codec,
            "enable.idempotence": idempotent == "true",
        }
    )
    for i in range(int(count)):
        producer.produce(topic, key=f"key-{i}", value=f"{prefix}-{i}", headers=[("n", str(i))], on_delivery=delivered)
        producer.poll(0)
    left = producer.flush(60)
    if left or failures:
        sys.exit(f"{left} records not sent, {len(failures)} failed: {failures[:3]}")


def consume(bootstrap, topic, group, count):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    left = int(count)
    deadline = time.monotonic() + 60
    while left > 0 and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is None:
            continue
        if message.error():
            sys.exit(str(message.error()))
        print(message.value().decode())
        left -= 1
    consumer.close()
    sys.exit(left)


{"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
