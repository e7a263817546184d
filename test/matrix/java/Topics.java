import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;

/** What an administrator does with topics, their partitions, replicas and logs. */
final class Topics {
    private final Transcript t;
    private final Admin admin;

    Topics(Transcript t, Admin admin) {
        this.t = t;
        this.admin = admin;
    }

    void run() throws Exception {
        Transcript.section("admin: topics");
        String topic = t.topic(admin, "topic", Map.of("segment.bytes", "1048576"));
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config())) {
            for (int i = 0; i < 30; i++) producer.send(new ProducerRecord<>(topic, i % Transcript.PARTITIONS, 1_700_000_000_000L + i, "k", "v" + i)).get();
        }
        created(topic);
        described(topic);
        offsets(topic);
        moved(topic);
        grown(topic);
        logDirs(topic);
        configs(topic);
        deleted(topic);
    }

    private void created(String topic) throws Exception {
        NewTopic plain = new NewTopic(t.prefix + "plain", Optional.of(2), Optional.empty());
        Transcript.fact("validate", () -> admin.createTopics(List.of(plain), new CreateTopicsOptions().validateOnly(true)).all().get());
        CreateTopicsResult result = admin.createTopics(List.of(plain));
        Transcript.fact("create", () -> result.numPartitions(plain.name()).get() + " partitions, replicas " + result.replicationFactor(plain.name()).get()
            + ", compression " + result.config(plain.name()).get().get("compression.type").value());
        Transcript.fact("again", () -> admin.createTopics(List.of(plain)).all().get());
        Transcript.fact("too many replicas", () -> admin.createTopics(List.of(new NewTopic(t.prefix + "many", 1, (short) 9))).all().get());
        Transcript.fact("bad config", () -> admin.createTopics(List.of(new NewTopic(t.prefix + "bad", 1, (short) 1).configs(Map.of("retention.ms", "soon")))).all().get());
        Transcript.fact("bad name", () -> admin.createTopics(List.of(new NewTopic("a b", 1, (short) 1))).all().get());
        Transcript.eventually("list", () -> names(), names -> names.contains(plain.name()) && names.contains(topic));
    }

    private List<String> names() throws Exception {
        List<String> names = Transcript.sorted(admin.listTopics(new ListTopicsOptions().listInternal(true)).names().get());
        names.removeIf(name -> !name.startsWith(t.prefix) && !name.startsWith("__"));
        return names;
    }

    private void described(String topic) throws Exception {
        TopicDescription named = admin.describeTopics(List.of(topic), new DescribeTopicsOptions().includeAuthorizedOperations(true)).allTopicNames().get().get(topic);
        Transcript.fact("describe", () -> named.name() + " internal " + named.isInternal() + " " + Transcript.sorted(named.authorizedOperations()));
        named.partitions().forEach(p -> System.out.println("partition " + p));
        Transcript.fact("by ID", () -> admin.describeTopics(TopicCollection.ofTopicIds(List.of(named.topicId()))).allTopicIds().get().get(named.topicId()).name());
        Transcript.fact("absent", () -> admin.describeTopics(List.of(t.prefix + "absent")).allTopicNames().get());
        Transcript.fact("absent ID", () -> admin.describeTopics(TopicCollection.ofTopicIds(List.of(new Uuid(1, 1)))).allTopicIds().get());
    }

    private void offsets(String topic) throws Exception {
        TopicPartition p = new TopicPartition(topic, 1);
        Map<String, OffsetSpec> specs = new TreeMap<>(Map.of("earliest", OffsetSpec.earliest(), "latest", OffsetSpec.latest(), "max timestamp", OffsetSpec.maxTimestamp(),
            "timestamp", OffsetSpec.forTimestamp(1_700_000_000_010L), "earliest local", OffsetSpec.earliestLocal(), "latest tiered", OffsetSpec.latestTiered()));
        for (Map.Entry<String, OffsetSpec> spec : specs.entrySet()) {
            Transcript.fact(spec.getKey(), () -> admin.listOffsets(Map.of(p, spec.getValue())).partitionResult(p).get());
        }
        Transcript.fact("records deleted", () -> admin.deleteRecords(Map.of(p, RecordsToDelete.beforeOffset(4))).lowWatermarks().get(p).get().lowWatermark());
        Transcript.fact("more than there are", () -> admin.deleteRecords(Map.of(p, RecordsToDelete.beforeOffset(400))).lowWatermarks().get(p).get().lowWatermark());
        Transcript.fact("earliest", () -> admin.listOffsets(Map.of(p, OffsetSpec.earliest())).partitionResult(p).get().offset());
        Transcript.fact("producers", () -> {
            List<String> states = new ArrayList<>();
            for (ProducerState s : admin.describeProducers(List.of(p)).partitionResult(p).get().activeProducers()) {
                states.add("epoch " + s.producerEpoch() + " sequence " + s.lastSequence() + " at " + s.lastTimestamp() + " transaction " + s.currentTransactionStartOffset());
            }
            return states;
        });
    }

    /** Replicas change their order, and the new first becomes the leader. */
    private void moved(String topic) throws Exception {
        TopicPartition p = new TopicPartition(topic, 0);
        NewPartitionReassignment order = new NewPartitionReassignment(List.of(2, 3, 1));
        Transcript.fact("reassign", () -> admin.alterPartitionReassignments(Map.of(p, Optional.of(order))).all().get());
        Transcript.eventually("reassigning", () -> admin.listPartitionReassignments(Set.of(p)).reassignments().get(), Map::isEmpty);
        Transcript.fact("nothing to cancel", () -> admin.alterPartitionReassignments(Map.of(p, Optional.empty())).all().get());
        Transcript.fact("no such broker", () -> admin.alterPartitionReassignments(Map.of(p, Optional.of(new NewPartitionReassignment(List.of(9))))).all().get());
        Transcript.fact("elect", () -> admin.electLeaders(ElectionType.PREFERRED, Set.of(p)).all().get());
        Transcript.fact("elect again", () -> admin.electLeaders(ElectionType.PREFERRED, Set.of(p)).partitions().get().get(p));
        Transcript.eventually("moved", () -> admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().get(0), d -> d.leader().id() == 2);
    }

    private void grown(String topic) throws Exception {
        Transcript.fact("grow", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5, List.of(List.of(1, 2), List.of(2, 3))))).all().get());
        Transcript.fact("one list short", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(7, List.of(List.of(1, 2, 3))))).all().get());
        Transcript.fact("grow further", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5, List.of(List.of(1, 2, 3), List.of(2, 3, 1))))).all().get());
        Transcript.fact("shrink", () -> admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(2))).all().get());
        Transcript.eventually("grown", () -> admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size(), n -> n == 5);
    }

    private void logDirs(String topic) throws Exception {
        TopicPartitionReplica replica = new TopicPartitionReplica(topic, 0, 1);
        List<Integer> brokers = List.of(1, 2, 3);
        Transcript.eventually("replicas of its 5 partitions", () -> {
            List<String> dirs = new ArrayList<>();
            admin.describeLogDirs(brokers).allDescriptions().get().forEach((broker, all) -> all.values().forEach(dir -> {
                long replicas = dir.replicaInfos().keySet().stream().filter(p -> p.topic().equals(topic)).count();
                dirs.add("broker " + broker + " has " + replicas + ", error " + dir.error() + ", size known " + dir.totalBytes().isPresent() + ", cordoned " + dir.isCordoned());
            }));
            return Transcript.sorted(dirs);
        }, dirs -> dirs.stream().allMatch(dir -> dir.contains(" has 5,")));
        Transcript.fact("replica", () -> admin.describeReplicaLogDirs(List.of(replica)).all().get().get(replica).getCurrentReplicaOffsetLag());
        Transcript.fact("no such folder", () -> admin.alterReplicaLogDirs(Map.of(replica, "/nowhere")).all().get());
        String own = admin.describeReplicaLogDirs(List.of(replica)).all().get().get(replica).getCurrentReplicaLogDir();
        Transcript.fact("where it is", () -> admin.alterReplicaLogDirs(Map.of(replica, own)).all().get());
    }

    private void configs(String topic) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        Transcript.fact("alter", () -> admin.incrementalAlterConfigs(Map.of(resource, List.of(
            new AlterConfigOp(new ConfigEntry("retention.ms", ""), AlterConfigOp.OpType.DELETE),
            new AlterConfigOp(new ConfigEntry("cleanup.policy", "compact"), AlterConfigOp.OpType.APPEND),
            new AlterConfigOp(new ConfigEntry("max.message.bytes", "30000"), AlterConfigOp.OpType.SET)))).all().get());
        Transcript.fact("bad value", () -> admin.incrementalAlterConfigs(Map.of(resource, List.of(
            new AlterConfigOp(new ConfigEntry("max.message.bytes", "-30000"), AlterConfigOp.OpType.SET))), new AlterConfigsOptions().validateOnly(true)).all().get());
        Transcript.until("altered", () -> admin.describeConfigs(List.of(resource)).all().get().get(resource).get("max.message.bytes").value(), "30000"::equals);
        for (ConfigEntry e : new TreeMap<>(byName(admin.describeConfigs(List.of(resource), new DescribeConfigsOptions().includeSynonyms(true)).all().get().get(resource))).values()) {
            System.out.println("config " + e.name() + "=" + e.value() + " " + e.source() + " " + e.type() + " " + e.isReadOnly() + " " + e.synonyms().size());
        }
    }

    static Map<String, ConfigEntry> byName(Config config) {
        Map<String, ConfigEntry> named = new TreeMap<>();
        config.entries().forEach(e -> named.put(e.name(), e));
        return named;
    }

    private void deleted(String topic) throws Exception {
        String plain = t.prefix + "plain";
        Uuid id = admin.describeTopics(List.of(plain)).allTopicNames().get().get(plain).topicId();
        Transcript.fact("delete", () -> admin.deleteTopics(List.of(topic)).all().get());
        Transcript.fact("delete by ID", () -> admin.deleteTopics(TopicCollection.ofTopicIds(List.of(id))).all().get());
        Transcript.fact("delete again", () -> admin.deleteTopics(List.of(topic)).all().get());
        Transcript.eventually("list", () -> names(), names -> !names.contains(topic) && !names.contains(plain));
    }
}
