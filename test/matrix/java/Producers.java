import java.time.Duration;
import java.util.*;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.internals.RecordHeader;

/** Idempotent, plain and transactional producers. */
final class Producers {
    private static final long THEN = 1_700_000_000_000L; // a timestamp that every run gives

    private final Transcript t;
    private final Admin admin;

    Producers(Transcript t, Admin admin) {
        this.t = t;
        this.admin = admin;
    }

    void run() throws Exception {
        String topic = t.topic(admin, "produced", Map.of("max.message.bytes", "20000"));
        Transcript.section("producer");
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            send(topic, codec, t.config("compression.type", codec));
        }
        send(topic, "acks=1", t.config("acks", "1", "enable.idempotence", "false"));
        send(topic, "acks=0", t.config("acks", "0", "enable.idempotence", "false"));
        refusals(topic);
        transactions(t.topic(admin, "transactions", Map.of()));
    }

    private void send(String topic, String name, Map<String, Object> config) throws Exception {
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(config)) {
            Transcript.fact(name + " partitions", () -> Transcript.sorted(producer.partitionsFor(topic)));
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int i = 0; i < 30; i++) sent.add(producer.send(record(topic, i)));
            for (Future<RecordMetadata> answer : sent) {
                RecordMetadata m = answer.get();
                System.out.println(name + " " + m.partition() + "@" + m.offset() + " at " + m.timestamp() + " sizes " + m.serializedKeySize() + " " + m.serializedValueSize());
            }
        }
    }

    private static ProducerRecord<String, String> record(String topic, int i) {
        return new ProducerRecord<>(topic, i % Transcript.PARTITIONS, THEN + i, "key-" + i, i % 7 == 0 ? null : "value-" + "x".repeat(100) + i,
            List.of(new RecordHeader("n", new byte[] {(byte) i})));
    }

    /** What the source refuses, and how. */
    private void refusals(String topic) {
        Map<String, ProducerRecord<String, String>> refused = new TreeMap<>();
        refused.put("too large", new ProducerRecord<>(topic, 0, "k", "x".repeat(30_000)));
        refused.put("from tomorrow", new ProducerRecord<>(topic, 0, System.currentTimeMillis() + Duration.ofDays(2).toMillis(), "k", "v"));
        refused.put("no such topic", new ProducerRecord<>(t.prefix + "absent", "k", "v"));
        refused.put("no such partition", new ProducerRecord<>(topic, 99, "k", "v"));
        refused.put("no name for a topic", new ProducerRecord<>("a b", "k", "v"));
        refused.put("internal topic", new ProducerRecord<>("__consumer_offsets", 0, "k", "v"));
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config("max.block.ms", "1500"))) {
            refused.forEach((name, r) -> Transcript.fact(name, () -> producer.send(r).get().offset()));
        }
    }

    private void transactions(String topic) throws Exception {
        Transcript.section("transactions");
        Map<String, Object> config = t.config("transactional.id", t.prefix + "tx", "transaction.timeout.ms", "20000");
        TopicPartition consumed = new TopicPartition(topic, 0);
        KafkaProducer<String, String> first = new KafkaProducer<>(config);
        first.initTransactions();
        for (boolean commit : new boolean[] {true, false, true}) {
            first.beginTransaction();
            for (int i = 0; i < 6; i++) System.out.println("sent " + first.send(record(topic, i)).get());
            first.sendOffsetsToTransaction(Map.of(consumed, new OffsetAndMetadata(commit ? 2 : 1, "of a transaction")), new ConsumerGroupMetadata(t.prefix + "tx-group"));
            if (commit) first.commitTransaction(); else first.abortTransaction();
            System.out.println(commit ? "committed" : "aborted");
        }
        Transcript.eventually("offsets of the group", () -> admin.listConsumerGroupOffsets(t.prefix + "tx-group").partitionsToOffsetAndMetadata().get(),
            offsets -> offsets.containsKey(consumed));
        first.beginTransaction();
        first.send(record(topic, 0)).get();
        try (KafkaProducer<String, String> second = new KafkaProducer<>(config)) {
            second.initTransactions();
            Transcript.fact("commit of a fenced producer", () -> { first.commitTransaction(); return "done"; });
            second.beginTransaction();
            System.out.println("second sent " + second.send(record(topic, 1)).get());
            second.commitTransaction();
        }
        first.close(Duration.ZERO);
        for (String isolation : List.of("read_committed", "read_uncommitted")) {
            try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(t.config("isolation.level", isolation, "auto.offset.reset", "earliest"))) {
                Transcript.fact(isolation, () -> Consumers.readAll(consumer, topic));
            }
        }
    }
}
