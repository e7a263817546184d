// A kafkajs producer that goes on at a rate until its input ends, and then prints how many records were acknowledged. Arguments: BOOTSTRAP TOPIC PER_SECOND.
// Record i has the value "js-i". A record that isn't acknowledged ends it with an error.
"use strict";

const { Kafka, logLevel } = require("kafkajs");

const [bootstrap, topic, perSecond] = process.argv.slice(2);
const kafka = new Kafka({ brokers: [bootstrap], logLevel: logLevel.NOTHING, retry: { retries: 12 } });

async function main() {
  let ended = false;
  process.stdin.on("end", () => (ended = true)).resume();
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  const begun = Date.now();
  let acked = 0;
  while (!ended) {
    const due = Math.floor(((Date.now() - begun) / 1000) * Number(perSecond)) - acked;
    if (due > 0) {
      const messages = Array.from({ length: Math.min(due, 500) }, (_, i) => ({ value: `js-${acked + i}` }));
      await producer.send({ topic, acks: -1, messages });
      acked += messages.length;
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await producer.disconnect();
  console.log(acked);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
