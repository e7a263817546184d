// What copies tend to change, from kafkajs: node headers.js BOOTSTRAP TOPIC
"use strict";

const { Kafka, logLevel } = require("kafkajs");

const [bootstrap, topic] = process.argv.slice(2);
const everyByte = Buffer.from(Array.from({ length: 256 }, (_, i) => i));

async function main() {
  const producer = new Kafka({ brokers: [bootstrap], logLevel: logLevel.WARN }).producer();
  await producer.connect();
  await producer.send({
    topic,
    acks: -1,
    messages: [
      { key: null, value: "no headers" },
      { key: "k", value: null },
      { key: "k", value: "" },
      { key: "", value: "v", timestamp: "1000" },
      { key: everyByte, value: everyByte, headers: { twice: ["1", "2"], bytes: everyByte } },
      { key: "schlüssel-キー", value: "v", headers: { "ü": "ö", empty: "" }, timestamp: "0" },
    ],
  });
  await producer.disconnect();
}

main().catch((error) => {
  console.error("ERROR", error);
  process.exit(1);
});
