"""A producer, a consumer and a transcript of aiokafka. See clients.go for the arguments."""

import asyncio
import sys
import time

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError


async def produce(bootstrap, topic, prefix, count, acks, codec, idempotent):
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        acks=acks if acks == "all" else int(acks),
        compression_type=None if codec == "none" else codec,
        enable_idempotence=idempotent == "true",
        linger_ms=5,
    )
    await producer.start()
    try:
        sent = [
            await producer.send(
                topic, key=b"key-%d" % i, value=b"%s-%d" % (prefix.encode(), i), headers=[("n", b"%d" % i)]
            )
            for i in range(int(count))
        ]
        await asyncio.wait_for(asyncio.gather(*sent), 60)
    finally:
        await producer.stop()


async def consume(bootstrap, topic, group, count):
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest")
    await consumer.start()
    try:
        async with asyncio.timeout(60):
            for _ in range(int(count)):
                print((await consumer.getone()).value.decode())
    finally:
        await consumer.stop()


async def fact(name, asked):
    """Prints what asked brings, or how it is refused."""
    try:
        print(f"{name}: {await asked}")
    except KafkaError as e:
        print(f"{name}: {type(e).__name__} {e}")


async def send_all(bootstrap, topic, more):
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **more)
    await producer.start()
    for i in range(30):
        m = await producer.send_and_wait(topic, b"v%d" % i, b"k%d" % i, i % 3, headers=[("n", b"%d" % i)])
        print("sent", more, (m.partition, m.offset) if m else None)
    await producer.stop()


async def transactions(bootstrap, topic, prefix):
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=prefix + "tx")
    await producer.start()
    for end in (producer.commit_transaction, producer.abort_transaction):
        await producer.begin_transaction()
        for i in range(6):
            await producer.send_and_wait(topic, b"tx%d" % i, partition=i % 3)
        await fact("end", end())
    other = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=prefix + "tx")
    await other.start()
    await producer.begin_transaction()
    await fact("fenced", producer.send_and_wait(topic, b"late", partition=0))
    await other.stop()
    try:
        await producer.stop()
    except KafkaError:
        pass


async def read(bootstrap, topic, group, count, **more):
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False, **more)
    await consumer.start()
    lines = []
    async with asyncio.timeout(60):
        while len(lines) < count:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                lines += [f"{r.partition} {r.offset:03} {r.key} {r.value} {r.headers}" for r in records]
    print("read", more, sorted(lines))
    partitions = [TopicPartition(topic, p) for p in range(3)]
    await fact("commit", consumer.commit())
    for p in partitions:
        await fact("committed", consumer.committed(p))
        await fact("position", consumer.position(p))
    await fact("beginning", consumer.beginning_offsets(partitions))
    await fact("end", consumer.end_offsets(partitions))
    await consumer.stop()


async def transcript(bootstrap, prefix):
    topic = prefix + "topic"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    new = NewTopic(topic, -1, -1, replica_assignments={0: [1, 2, 3], 1: [2, 3, 1], 2: [3, 1, 2]}, topic_configs={"max.message.bytes": "20000"})
    print("create", [error for _, error, _ in (await admin.create_topics([new])).topic_errors])
    print("create again", [error for _, error, _ in (await admin.create_topics([new])).topic_errors])
    print("brokers", sorted(f"{b['node_id']} {b['host']}:{b['port']}" for b in (await admin.describe_cluster())["brokers"]))
    while True:
        partitions = (await admin.describe_topics([topic]))[0]["partitions"]
        if len(partitions) == 3 and all(p["leader"] > 0 for p in partitions):
            break
        await asyncio.sleep(0.05)
    for p in sorted(partitions, key=lambda p: p["partition"]):
        print("partition", p["partition"], p["leader"], p["replicas"], sorted(p["isr"]))
    for more in ({"enable_idempotence": True}, {"acks": 1, "compression_type": "gzip"}, {"acks": 0}):
        await send_all(bootstrap, topic, more)
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    await fact("too large", producer.send_and_wait(topic, b"x" * 30000, partition=0))
    await fact("from tomorrow", producer.send_and_wait(topic, b"x", partition=0, timestamp_ms=int(time.time() * 1000) + 48 * 3600 * 1000))
    await producer.stop()
    await read(bootstrap, topic, prefix + "readers", 90)
    await transactions(bootstrap, topic, prefix)
    await read(bootstrap, topic, prefix + "committed", 96, isolation_level="read_committed")
    print("groups", sorted(g for g in await admin.list_consumer_groups() if g[0].startswith(prefix)))
    print("offsets", sorted((await admin.list_consumer_group_offsets(prefix + "readers")).items()))
    print("delete", (await admin.delete_topics([topic])).topic_error_codes)
    print("delete again", (await admin.delete_topics([topic + "-absent"])).topic_error_codes)
    await admin.close()


asyncio.run({"produce": produce, "consume": consume, "transcript": transcript}[sys.argv[1]](*sys.argv[2:]))
