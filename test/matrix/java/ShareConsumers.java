import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;

/** Share consumers (KIP-932), with explicit and implicit acknowledgement, and what an administrator does with their group. */
final class ShareConsumers {
    private static final int RECORDS = 30;

    private final Transcript t;
    private final Admin admin;
    private final String group;

    ShareConsumers(Transcript t, Admin admin) {
        this.t = t;
        this.admin = admin;
        group = t.prefix + "share";
    }

    void run() throws Exception {
        Transcript.section("share consumer");
        String topic = t.topic(admin, "shared", Map.of());
        fromTheBeginning();
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config())) {
            for (int i = 0; i < RECORDS; i++) producer.send(new ProducerRecord<>(topic, i % Transcript.PARTITIONS, "k", "v" + i)).get();
        }
        try (KafkaShareConsumer<String, String> c = consumer("explicit")) {
            c.subscribe(List.of(topic));
            explicit(c);
            Transcript.fact("lock", c::acquisitionLockTimeoutMs);
            Transcript.fact("described", () -> describe());
        }
        try (KafkaShareConsumer<String, String> c = consumer("implicit")) {
            c.subscribe(List.of(topic));
            try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config())) {
                for (int i = 0; i < Transcript.PARTITIONS; i++) producer.send(new ProducerRecord<>(topic, i, "k", "late" + i)).get();
            }
            TreeMap<String, Integer> read = new TreeMap<>();
            Transcript.until("late", () -> { for (ConsumerRecord<String, String> r : c.poll(Duration.ofMillis(100))) read.merge(r.value(), 1, Integer::sum); return read.size(); },
                n -> n == Transcript.PARTITIONS);
            System.out.println("implicitly " + read);
        }
        administer(topic);
    }

    private KafkaShareConsumer<String, String> consumer(String acknowledgement) {
        return new KafkaShareConsumer<>(t.config("group.id", group, "client.id", acknowledgement, "share.acknowledgement.mode", acknowledgement));
    }

    private void fromTheBeginning() throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, group);
        admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(new ConfigEntry("share.auto.offset.reset", "earliest"), AlterConfigOp.OpType.SET)))).all().get();
        Transcript.until("group config", () -> admin.describeConfigs(List.of(resource)).all().get().get(resource).get("share.auto.offset.reset").value(), "earliest"::equals);
    }

    /** Each record is accepted, released once and then accepted, or rejected. */
    private void explicit(KafkaShareConsumer<String, String> c) throws Exception {
        Map<String, List<String>> deliveries = new TreeMap<>();
        Set<String> done = new HashSet<>();
        Set<String> errors = new TreeSet<>();
        c.setAcknowledgementCommitCallback((offsets, error) -> errors.add(String.valueOf(error)));
        Transcript.until("all acknowledged", () -> {
            for (ConsumerRecord<String, String> r : c.poll(Duration.ofMillis(200))) {
                int n = Integer.parseInt(r.value().substring(1));
                AcknowledgeType type = n % 5 == 0 ? AcknowledgeType.REJECT : AcknowledgeType.ACCEPT;
                if (n % 3 == 0 && r.deliveryCount().orElse((short) 0) == 1) type = AcknowledgeType.RELEASE;
                c.acknowledge(r, type);
                deliveries.computeIfAbsent(r.partition() + "@" + r.offset(), k -> new ArrayList<>()).add(type + " delivery " + r.deliveryCount().orElse((short) 0));
                if (type != AcknowledgeType.RELEASE) done.add(r.value());
            }
            c.commitSync().values().forEach(error -> errors.add(error.toString()));
            return done.size();
        }, n -> n == RECORDS);
        System.out.println("explicitly " + deliveries);
        System.out.println("errors " + errors);
        Transcript.fact("acknowledge twice", () -> { c.acknowledge(t.prefix + "shared", 0, 0, AcknowledgeType.ACCEPT); return "done"; });
    }

    private String describe() throws Exception {
        ShareGroupDescription d = admin.describeShareGroups(List.of(group)).all().get().get(group);
        List<String> members = new ArrayList<>();
        for (ShareMemberDescription m : d.members()) members.add(m.clientId() + " " + m.host() + " " + m.assignment().topicPartitions().size());
        return d.groupState() + " " + members + " coordinator known " + new Descriptions(admin).known(d.coordinator());
    }

    private void administer(String topic) throws Exception {
        TopicPartition p = new TopicPartition(topic, 0);
        Transcript.eventually("empty", () -> admin.describeShareGroups(List.of(group)).all().get().get(group).groupState().toString(), "Empty"::equals);
        Map<String, ListShareGroupOffsetsSpec> all = Map.of(group, new ListShareGroupOffsetsSpec());
        Transcript.fact("offsets", () -> {
            Map<String, Long> starts = new TreeMap<>();
            admin.listShareGroupOffsets(all).partitionsToOffsetInfo(group).get().forEach((tp, info) -> starts.put(tp.toString(), info.startOffset()));
            return starts;
        });
        Transcript.fact("alter offsets", () -> admin.alterShareGroupOffsets(group, Map.of(p, 3L)).all().get());
        Transcript.fact("altered", () -> admin.listShareGroupOffsets(all).partitionsToOffsetInfo(group).get().get(p).startOffset());
        Transcript.fact("delete offsets", () -> admin.deleteShareGroupOffsets(group, Set.of(topic)).all().get());
        Transcript.fact("delete", () -> admin.deleteShareGroups(List.of(group)).all().get());
        Transcript.fact("described", this::describe);
    }
}
