// A producer and a consumer of kafkajs. See clients.go for the arguments.
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

({ produce, consume })[role](...rest).catch((error) => {
  console.error(error);
  process.exit(1);
});
