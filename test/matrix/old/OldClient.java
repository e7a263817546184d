import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;

/** What producers and consumers of Kafka 0.10 and later can do: BOOTSTRAP TOPIC [SETTING=VALUE...]. The topic has three partitions. Failures are printed, as their classes. */
public final class OldClient {
    private final String bootstrap, topic;
    private final Properties settings = new Properties();

    private OldClient(String... args) {
        bootstrap = args[0];
        topic = args[1];
        for (int i = 2; i < args.length; i++) settings.put(args[i].substring(0, args[i].indexOf('=')), args[i].substring(args[i].indexOf('=') + 1));
    }

    public static void main(String[] args) {
        OldClient c = new OldClient(args);
        for (String codec : new String[] {"none", "gzip", "lz4"}) c.step("produce " + codec, () -> c.produce("all", codec));
        c.step("produce acks=1", () -> c.produce("1", "none"));
        c.step("offsets", c::offsets);
        c.step("group", c::group);
        c.step("committed", c::committed);
        c.step("produce acks=0", () -> c.produce("0", "none"));
    }

    private interface Step { void run() throws Exception; }

    private void step(String name, Step step) {
        System.out.println("== " + name);
        try {
            step.run();
        } catch (Throwable e) {
            System.out.println(e.getClass().getName() + (e.getCause() == null ? "" : " of " + e.getCause().getClass().getName()));
        }
    }

    private Properties config() {
        Properties p = new Properties();
        p.putAll(settings);
        p.put("bootstrap.servers", bootstrap);
        p.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        p.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        p.put("key.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        p.put("value.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        return p;
    }

    private void produce(String acks, String codec) throws Exception {
        Properties p = config();
        p.put("acks", acks);
        p.put("compression.type", codec);
        p.put("retries", "0");
        p.put("request.timeout.ms", "5000");
        p.put("max.block.ms", "20000");
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(p)) {
            for (int i = 0; i < 12; i++) {
                RecordMetadata m = producer.send(new ProducerRecord<>(topic, i % 3, 1000L + i, "k" + i, codec + i)).get();
                System.out.println(m.partition() + "@" + m.offset() + " " + m.timestamp());
            }
        }
    }

    private KafkaConsumer<String, String> consumer() {
        Properties p = config();
        p.put("group.id", topic + "-group");
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        return new KafkaConsumer<>(p);
    }

    private List<TopicPartition> partitions() {
        return Arrays.asList(new TopicPartition(topic, 0), new TopicPartition(topic, 1), new TopicPartition(topic, 2));
    }

    private void offsets() {
        try (KafkaConsumer<String, String> consumer = consumer()) {
            for (PartitionInfo i : new TreeMap<Integer, PartitionInfo>(byPartition(consumer)).values()) System.out.println(i.partition() + " has " + i.replicas().length + " replicas");
            System.out.println(new TreeMap<>(byName(consumer.beginningOffsets(partitions()))));
            System.out.println(new TreeMap<>(byName(consumer.endOffsets(partitions()))));
            Map<TopicPartition, Long> times = new HashMap<>();
            for (TopicPartition tp : partitions()) times.put(tp, 1005L);
            System.out.println(new TreeMap<>(byName(consumer.offsetsForTimes(times))));
        }
    }

    private Map<Integer, PartitionInfo> byPartition(KafkaConsumer<String, String> consumer) {
        Map<Integer, PartitionInfo> m = new HashMap<>();
        for (PartitionInfo i : consumer.partitionsFor(topic)) m.put(i.partition(), i);
        return m;
    }

    private static Map<String, Object> byName(Map<TopicPartition, ?> m) {
        Map<String, Object> names = new HashMap<>();
        for (Map.Entry<TopicPartition, ?> e : m.entrySet()) names.put(e.getKey().toString(), String.valueOf(e.getValue()));
        return names;
    }

    private void group() {
        try (KafkaConsumer<String, String> consumer = consumer()) {
            long end = 0;
            for (long offset : consumer.endOffsets(partitions()).values()) end += offset;
            consumer.subscribe(Collections.singletonList(topic));
            List<String> lines = new ArrayList<>();
            long limit = System.currentTimeMillis() + 10000;
            while (lines.size() < end && System.currentTimeMillis() < limit)
                for (ConsumerRecord<String, String> r : consumer.poll(100)) {
                    lines.add(String.format("%d@%03d %d %s=%s", r.partition(), r.offset(), r.timestamp(), r.key(), r.value()));
                    limit = System.currentTimeMillis() + 10000;
                }
            Collections.sort(lines);
            for (String line : lines) System.out.println(line);
            consumer.commitSync();
        }
    }

    private void committed() {
        try (KafkaConsumer<String, String> consumer = consumer()) {
            for (TopicPartition tp : partitions()) System.out.println(tp + " " + consumer.committed(tp));
        }
    }
}
