// A producer, a consumer and a transcript of kafkajs. See clients.go for the arguments.
"use strict";

const { CompressionTypes, Kafka, logLevel } = require("kafkajs");

const [role, bootstrap, topic, ...rest] = process.argv.slice(2);
const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN });

async function produce(prefix, count, acks, codec, idempotent) {
  const producer = kafka.producer({ idempotent: idempotent === "true" });
  await producer.connect();
  for (let at = 0; at < count; at += 100) {
    const messages = [];
    for (let i = at; i < Math.min(at + 100, count); i++) {
      messages.push({ key: `key-${i}`, value: `${prefix}-${i}`, headers: { n: `${i}` } });
    }
    const compression = codec === "gzip" ? CompressionTypes.GZIP : CompressionTypes.None;
    await producer.send({ topic, acks: acks === "all" ? -1 : Number(acks), compression, messages });
  }
  await producer.disconnect();
}

async function consume(group, count) {
  const consumer = kafka.consumer({ groupId: group, maxWaitTimeInMs: 500 });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  let left = Number(count);
  await new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`${left} records missing`)), 60000).unref();
    consumer.run({
      eachMessage: async ({ message }) => {
        if (left-- > 0) console.log(message.value.toString());
        if (left === 0) resolve();
      },
    }).catch(reject);
  });
  await consumer.disconnect();
}

// Prints what ask returns, or how it is refused.
async function fact(name, ask) {
  try {
    console.log(`${name}: ${JSON.stringify(await ask())}`);
  } catch (error) {
    console.log(`${name}: ${error.name} ${error.type || ""} ${error.errors ? error.errors.map((e) => e.type) : ""}`);
  }
}

const byPartition = (list) => [...list].sort((a, b) => (a.partition ?? a.partitionId) - (b.partition ?? b.partitionId));

async function read(admin, topicName, group, count, more) {
  const consumer = kafka.consumer({ groupId: group, maxWaitTimeInMs: 200, ...more });
  await consumer.connect();
  await consumer.subscribe({ topic: topicName, fromBeginning: true });
  const lines = [];
  const behind = {}; // partition -> the offset behind its last record
  await new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error(`${lines.length} records of ${count}`)), 60000).unref();
    consumer.run({
      eachMessage: async ({ partition, message: m }) => {
        const headers = Object.entries(m.headers).map(([k, v]) => `${k}=${v}`);
        behind[partition] = Number(m.offset) + 1;
        if (lines.push(`${partition} ${m.offset.padStart(3, "0")} ${m.key} ${m.value} ${headers}`) === count) resolve();
      },
    }).catch(reject);
  });
  console.log("read", JSON.stringify(more), lines.sort().join("\n"));
  await fact("group", async () => (await admin.describeGroups([group])).groups.map((g) => [g.state, g.protocol, g.protocolType, g.members.length]));
  await consumer.disconnect();
  // Whether it had passed the aborted records behind its last one when it left is a matter of time.
  const reached = (p) => ({ ...p, offset: Math.min(p.offset, behind[p.partition]) });
  await fact("offsets", async () => (await admin.fetchOffsets({ groupId: group, topics: [topicName] })).map((t) => byPartition(t.partitions).map(reached)));
}

async function transactions(topicName, prefix) {
  const producer = kafka.producer({ transactionalId: `${prefix}tx`, maxInFlightRequests: 1, idempotent: true });
  await producer.connect();
  for (const end of ["commit", "abort"]) {
    const transaction = await producer.transaction();
    for (let i = 0; i < 6; i++) await transaction.send({ topic: topicName, messages: [{ value: `tx${i}`, partition: i % 3 }] });
    await fact(end, () => transaction[end]());
  }
  await producer.disconnect();
}

async function transcript() {
  const prefix = topic; // the second argument
  const name = `${prefix}topic`;
  const admin = kafka.admin({ retry: { retries: 1 } });
  await admin.connect();
  const replicaAssignment = [[1, 2, 3], [2, 3, 1], [3, 1, 2]].map((replicas, partition) => ({ partition, replicas }));
  const topics = [{ topic: name, replicaAssignment, configEntries: [{ name: "max.message.bytes", value: "20000" }] }];
  await fact("create", () => admin.createTopics({ topics, waitForLeaders: true }));
  await fact("create again", () => admin.createTopics({ topics }));
  await fact("cluster", async () => (await admin.describeCluster()).brokers.map((b) => `${b.nodeId} ${b.host}:${b.port}`).sort());
  await fact("partitions", async () => byPartition((await admin.fetchTopicMetadata({ topics: [name] })).topics[0].partitions).map((p) => [p.partitionId, p.leader, p.replicas, p.isr.sort()]));
  for (const more of [{ idempotent: true, acks: -1 }, { acks: 1, compression: CompressionTypes.GZIP }, { acks: 0 }]) {
    const producer = kafka.producer({ idempotent: more.idempotent });
    await producer.connect();
    for (let i = 0; i < 30; i++) {
      const messages = [{ key: `k${i}`, value: `v${i}`, partition: i % 3, headers: { n: `${i}` } }];
      await fact("sent", async () => (await producer.send({ topic: name, messages, acks: more.acks, compression: more.compression }) || []).map((r) => [r.partition, r.errorCode, r.baseOffset]));
    }
    await producer.disconnect();
  }
  const producer = kafka.producer({ retry: { retries: 0 } });
  await producer.connect();
  await fact("too large", () => producer.send({ topic: name, messages: [{ value: "x".repeat(30000), partition: 0 }] }));
  await fact("from tomorrow", () => producer.send({ topic: name, messages: [{ value: "x", partition: 0, timestamp: `${Date.now() + 48 * 3600 * 1000}` }] }));
  await producer.disconnect();
  await read(admin, name, `${prefix}readers`, 90, {});
  await transactions(name, prefix);
  await read(admin, name, `${prefix}committed`, 96, { readUncommitted: false });
  await fact("topic offsets", async () => byPartition(await admin.fetchTopicOffsets(name)));
  await fact("groups", async () => (await admin.listGroups()).groups.map((g) => g.groupId).filter((g) => g.startsWith(prefix)).sort());
  await fact("delete records", () => admin.deleteTopicRecords({ topic: name, partitions: [{ partition: 0, offset: "5" }] }));
  await fact("grow", () => admin.createPartitions({ topicPartitions: [{ topic: name, count: 5 }] }));
  await fact("grow less", () => admin.createPartitions({ topicPartitions: [{ topic: name, count: 2 }] }));
  await fact("configs", async () => (await admin.describeConfigs({ resources: [{ type: 2, name }] })).resources[0].configEntries.map((e) => [e.configName, e.configValue]).sort());
  await fact("delete group", () => admin.deleteGroups([`${prefix}readers`]));
  await fact("delete", () => admin.deleteTopics({ topics: [name] }));
  await fact("delete again", () => admin.deleteTopics({ topics: [`${name}-absent`] }));
  await admin.disconnect();
}

({ produce, consume, transcript })[role](...rest).catch((error) => {
  console.error(error);
  process.exit(1);
});
