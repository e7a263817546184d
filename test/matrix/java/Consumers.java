import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;

/** Consumers with one of the group protocols. */
final class Consumers {
    private static final int RECORDS = 60;

    private final Transcript t;
    private final Admin admin;
    private final String protocol;

    Consumers(Transcript t, Admin admin, String protocol) {
        this.t = t;
        this.admin = admin;
        this.protocol = protocol;
    }

    void run() throws Exception {
        Transcript.section("consumer, group protocol " + protocol);
        String topic = t.topic(admin, "consumed-" + protocol, Map.of());
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config())) {
            for (int i = 0; i < RECORDS; i++) producer.send(new ProducerRecord<>(topic, i % Transcript.PARTITIONS, 1_700_000_000_000L + i, "k" + i, "v" + i)).get();
        }
        alone(topic);
        together(topic);
        assigned(topic);
        fenced(topic);
    }

    private KafkaConsumer<String, String> consumer(String group, Object... more) {
        Map<String, Object> config = t.config("group.protocol", protocol, "group.id", t.prefix + protocol + "-" + group, "auto.offset.reset", "earliest", "enable.auto.commit", "false");
        if (protocol.equals("classic")) config.put("heartbeat.interval.ms", "200"); // the other's are the broker's to set
        config.putAll(t.config(more));
        return new KafkaConsumer<>(config);
    }

    private void alone(String topic) throws Exception {
        List<TopicPartition> all = Transcript.partitions(topic);
        try (KafkaConsumer<String, String> c = consumer("alone", "client.id", "alone")) {
            List<String> rebalances = new ArrayList<>();
            c.subscribe(List.of(topic), new ConsumerRebalanceListener() {
                public void onPartitionsRevoked(Collection<TopicPartition> lost) { rebalances.add("revoked " + Transcript.sorted(lost)); }
                public void onPartitionsAssigned(Collection<TopicPartition> won) { if (!won.isEmpty()) rebalances.add("assigned " + Transcript.sorted(won)); }
            });
            System.out.println("records " + read(c, RECORDS));
            System.out.println("rebalances " + rebalances);
            System.out.println("group " + c.groupMetadata().groupId() + " generation " + (c.groupMetadata().generationId() > 0) + " member " + !c.groupMetadata().memberId().isEmpty());
            c.commitSync();
            Transcript.fact("committed", () -> new TreeMap<>(byName(c.committed(new HashSet<>(all)))));
            for (TopicPartition p : all) Transcript.fact("position " + p, () -> c.position(p) + " lag " + c.currentLag(p));
            Transcript.fact("beginning", () -> byName(c.beginningOffsets(all)));
            Transcript.fact("end", () -> byName(c.endOffsets(all)));
            Transcript.fact("times", () -> byName(c.offsetsForTimes(Map.of(all.get(0), 1_700_000_000_010L, all.get(1), 1_800_000_000_000L))));
            Transcript.fact("partitions", () -> Transcript.sorted(c.partitionsFor(topic)));
            Transcript.fact("topics", () -> c.listTopics().keySet().contains(topic));
            System.out.println("described " + new Descriptions(admin).group(t.prefix + protocol + "-alone"));
        }
        try (KafkaConsumer<String, String> c = consumer("alone")) { // goes on where the group committed
            c.subscribe(List.of(topic));
            while (c.assignment().isEmpty()) c.poll(Duration.ofMillis(100));
            Transcript.fact("goes on at", () -> { Map<TopicPartition, Long> at = new HashMap<>(); for (TopicPartition p : all) at.put(p, c.position(p)); return byName(at); });
        }
    }

    /** Two members share the partitions; when one leaves, the other has all. */
    private void together(String topic) throws Exception {
        ExecutorService second = Executors.newSingleThreadExecutor();
        try (KafkaConsumer<String, String> a = consumer("together", "client.id", "a"); KafkaConsumer<String, String> b = consumer("together", "client.id", "b")) {
            a.subscribe(List.of(topic));
            b.subscribe(List.of(topic));
            BlockingQueue<Boolean> stop = new ArrayBlockingQueue<>(1);
            BlockingQueue<Integer> sizes = new LinkedBlockingQueue<>();
            Future<?> polling = second.submit(() -> { while (stop.isEmpty()) { b.poll(Duration.ofMillis(50)); sizes.add(b.assignment().size()); } });
            Transcript.until("shared", () -> { a.poll(Duration.ofMillis(50)); List<Integer> seen = new ArrayList<>(); sizes.drainTo(seen);
                return seen.isEmpty() ? 0 : a.assignment().size() * 10 + seen.get(seen.size() - 1); }, n -> n == 12 || n == 21);
            System.out.println("two members share " + new Descriptions(admin).members(t.prefix + protocol + "-together"));
            stop.add(true);
            polling.get();
            b.unsubscribe();
            Transcript.until("alone again", () -> { a.poll(Duration.ofMillis(50)); return a.assignment().size(); }, n -> n == Transcript.PARTITIONS);
            System.out.println("one member has " + Transcript.sorted(a.assignment()));
        } finally {
            second.shutdown();
        }
    }

    /** No group is needed to read, and what isn't there is said. */
    private void assigned(String topic) {
        TopicPartition p = new TopicPartition(topic, 1);
        try (KafkaConsumer<String, String> c = consumer("assigned", "auto.offset.reset", "none")) {
            c.assign(List.of(p));
            Transcript.fact("no offset", () -> c.poll(Duration.ofSeconds(10)).count());
            c.seek(p, 5);
            Transcript.fact("from 5 on", () -> read(c, 15));
            c.seek(p, 9999);
            Transcript.fact("out of range", () -> { for (int i = 0; i < 100; i++) c.poll(Duration.ofMillis(100)); return "nothing"; });
        }
        try (KafkaConsumer<String, String> c = consumer("assigned")) {
            Transcript.fact("no such topic", () -> c.partitionsFor(t.prefix + "absent", Duration.ofSeconds(5)));
            c.subscribe(List.of("a b"));
            Transcript.fact("no name for a topic", () -> { for (int i = 0; i < 50; i++) c.poll(Duration.ofMillis(100)); return "nothing"; });
        }
    }

    /** A commit of offsets that the group didn't assign is refused. */
    private void fenced(String topic) throws Exception {
        TopicPartition p = new TopicPartition(topic, 0);
        try (KafkaConsumer<String, String> member = consumer("fenced"); KafkaConsumer<String, String> stranger = consumer("fenced")) {
            member.subscribe(List.of(topic));
            read(member, RECORDS);
            stranger.assign(List.of(p));
            Transcript.fact("commit of a stranger", () -> { stranger.commitSync(Map.of(p, new OffsetAndMetadata(1)), Duration.ofSeconds(10)); return "done"; });
        }
    }

    /** Reads n records and returns them by partition, in order. */
    static Map<String, List<String>> read(Consumer<String, String> consumer, int n) throws Exception {
        Map<String, List<String>> read = new TreeMap<>();
        int[] count = {0};
        Transcript.until("records", () -> {
            for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(100))) {
                read.computeIfAbsent(r.topic() + "-" + r.partition(), p -> new ArrayList<>()).add(r.offset() + "=" + r.value() + (r.headers().toArray().length > 0 ? "+" : ""));
                count[0]++;
            }
            return count[0];
        }, have -> have >= n);
        return read;
    }

    /** Reads a topic up to its end, as this consumer's isolation level has it. */
    static Map<String, List<String>> readAll(Consumer<String, String> consumer, String topic) throws Exception {
        List<TopicPartition> all = Transcript.partitions(topic);
        consumer.assign(all);
        Map<TopicPartition, Long> ends = consumer.endOffsets(all);
        Map<String, List<String>> read = new TreeMap<>();
        Transcript.until("the end", () -> {
            for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(100))) {
                read.computeIfAbsent("partition " + r.partition(), p -> new ArrayList<>()).add(r.offset() + "=" + r.key());
            }
            boolean done = true;
            for (TopicPartition p : all) done &= consumer.position(p) >= ends.get(p);
            return done;
        }, done -> done);
        read.put("ends", Transcript.sorted(ends.entrySet()));
        return read;
    }

    static <V> Map<String, V> byName(Map<TopicPartition, V> map) {
        Map<String, V> named = new TreeMap<>();
        map.forEach((p, v) -> named.put(p.toString(), v));
        return named;
    }
}
