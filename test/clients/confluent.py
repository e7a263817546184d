"""A producer, a consumer and a transcript of confluent-kafka (librdkafka). See clients.go for the arguments."""

import sys
import time

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, NewTopic

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


def fact(name, ask):
    """Prints what ask returns, or how it is refused."""
    try:
        print(f"{name}: {ask()}")
    except KafkaException as e:
        print(f"{name}: {e.args[0].name()} {e.args[0].str()}")


def described(metadata):
    """Brokers' addresses and partitions, in the order of their IDs. The topics are new: which leads what is the assignment's."""
    print("brokers", sorted(f"{b.id} {b.host}:{b.port}" for b in metadata.brokers.values()))
    for topic in metadata.topics.values():
        print("topic", topic.topic, topic.error)
        for p in sorted(topic.partitions.values(), key=lambda p: p.id):
            print("partition", p.id, "leader", p.leader, "replicas", p.replicas, "in sync", sorted(p.isrs), p.error)


def reports(bootstrap, more, topic, count):
    """Sends records and prints where each went, or how it was refused."""
    lines = []
    producer = Producer({"bootstrap.servers": bootstrap, **more})
    for i in range(count):
        producer.produce(
            topic, partition=i % 3, key=f"k{i}", value=f"v{i}", timestamp=int(time.time() * 1000), headers=[("n", str(i))],
            on_delivery=lambda e, m: lines.append(f"{m.partition():2} {m.offset() if e is None else e.name()}"),
        )
    left = producer.flush(60)
    print("sent", more, left, sorted(lines))


def transactions(bootstrap, topic, prefix):
    config = {"bootstrap.servers": bootstrap, "transactional.id": prefix + "tx"}
    first = Producer(config)
    first.init_transactions(60)
    for end in (first.commit_transaction, first.abort_transaction, first.commit_transaction):
        first.begin_transaction()
        for i in range(6):
            first.produce(topic, partition=i % 3, value=f"tx{i}")
        fact("end", lambda: end(60))
    first.begin_transaction()
    second = Producer(config)
    second.init_transactions(60)

    def fenced():
        first.produce(topic, partition=0, value="late")
        first.commit_transaction(60)

    fact("fenced", fenced)
    for level in ("read_committed", "read_uncommitted"):
        reader = Consumer({
            "bootstrap.servers": bootstrap, "group.id": prefix + level, "isolation.level": level, "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        })
        reader.assign([TopicPartition(topic, p, 0) for p in range(3)])
        lines, ends = [], 0
        while ends < 3:
            m = reader.poll(60)
            if m.error():
                ends += 1
                lines.append(f"{m.partition()} ends at {m.offset()}")
            else:
                lines.append(f"{m.partition()} {m.offset():03} {m.value().decode()}")
        print(level, sorted(lines))
        reader.close()


def group(bootstrap, topic, group_id, count, protocol):
    """Reads all in a group and commits; then the group goes on from there."""
    config = {
        "bootstrap.servers": bootstrap, "group.id": group_id, "auto.offset.reset": "earliest", "enable.auto.commit": False, **protocol,
    }
    reader = Consumer(config)
    reader.subscribe([topic])
    lines = []
    while len(lines) < count:
        m = reader.poll(60)
        lines.append(str(m.error()) if m.error() else f"{m.partition()} {m.offset():03} {m.key()} {m.value()} {m.headers()}")
    print("read", protocol, sorted(lines))
    print("assigned", sorted(str(p) for p in reader.assignment()))
    fact("committed", lambda: sorted(str(p) for p in reader.commit(asynchronous=False)))
    fact("offsets", lambda: sorted(str(p) for p in reader.committed([TopicPartition(topic, p) for p in range(3)], 60)))
    fact("watermarks", lambda: reader.get_watermark_offsets(TopicPartition(topic, 0), 60))
    fact("times", lambda: sorted(str(p) for p in reader.offsets_for_times([TopicPartition(topic, 0, 1)], 60)))
    reader.close()


def administer(bootstrap, prefix, topic):
    admin = AdminClient({"bootstrap.servers": bootstrap})
    fact("grow", lambda: admin.create_partitions([NewPartitions(topic, 5)])[topic].result(60))
    fact("grow less", lambda: admin.create_partitions([NewPartitions(topic, 2)])[topic].result(60))
    resource = ConfigResource("topic", topic)

    def configs():
        return sorted(f"{e.name}={e.value} {e.is_read_only}" for e in admin.describe_configs([resource])[resource].result(60).values())

    fact("configs", configs)
    fact("groups", lambda: sorted(f"{g.id} {g.state} {g.protocol_type}" for g in admin.list_groups(timeout=60) if g.id.startswith(prefix)))
    fact("delete", lambda: admin.delete_topics([topic])[topic].result(60))
    fact("delete again", lambda: admin.delete_topics([topic + "-absent"])[topic + "-absent"].result(60))


def leader_change(bootstrap, topic, count):
    """Writes and reads one partition. After half of it, it says so and waits for a line; each record must be there once, and in order."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    reader.subscribe([topic])
    count, following = int(count), 0

    def read(end):
        nonlocal following
        deadline = time.monotonic() + 60
        while following < end:
            m = reader.poll(1)
            if m is None and time.monotonic() > deadline:
                sys.exit(f"{following} records of {end}")
            if m is None or m.error():
                continue
            if (m.offset(), m.value().decode()) != (following, f"v{following}"):
                sys.exit(f"offset {m.offset()} has {m.value()}, want v{following}")
            following += 1

    for i in range(count):
        if i == count // 2:
            read(i)
            print("half", flush=True)
            sys.stdin.readline()
        producer.produce(topic, partition=0, value=f"v{i}", on_delivery=delivered)
        if producer.flush(60) or failures:
            sys.exit(f"record {i}: {failures}")
    read(count)
    print("all", count)
    reader.close()


def transcript(bootstrap, prefix):
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topic = prefix + "topic"
    new = NewTopic(topic, 3, replica_assignment=[[1, 2, 3], [2, 3, 1], [3, 1, 2]], config={"max.message.bytes": "20000"})
    fact("create", lambda: admin.create_topics([new])[topic].result(60))
    fact("create again", lambda: admin.create_topics([new])[topic].result(60))
    while len(admin.list_topics(topic, timeout=60).topics[topic].partitions) < 3:
        time.sleep(0.05)
    described(admin.list_topics(topic, timeout=60))
    for more in ({"enable.idempotence": True}, {"acks": "1", "compression.type": "lz4"}, {"acks": "0"}):
        reports(bootstrap, more, topic, 30)
    producer = Producer({
        "bootstrap.servers": bootstrap, "topic.metadata.propagation.max.ms": 1000,
        "on_delivery": lambda e, m: print("refused", e.name(), e.str()),
    })
    producer.produce(topic, partition=0, value="x" * 30000)
    producer.flush(60)
    producer.produce(topic, partition=0, value="x", timestamp=int(time.time() * 1000) + 48 * 3600 * 1000)
    producer.produce(prefix + "absent", value="x")
    producer.flush(60)
    group(bootstrap, topic, prefix + "readers", 90, {})
    if not sys.executable.startswith("/usr/bin"):  # Debian's librdkafka is older than KIP-848
        group(bootstrap, topic, prefix + "new", 90, {"group.protocol": "consumer"})
    transactions(bootstrap, topic, prefix)
    administer(bootstrap, prefix, topic)


{"produce": produce, "consume": consume, "leader-change": leader_change, "transcript": transcript}[sys.argv[1]](*sys.argv[2:])
