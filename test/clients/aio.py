"""A producer and a consumer of aiokafka. See clients.go for the arguments."""

import asyncio
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer


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


asyncio.run({"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:]))
