import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;

/** What an administrator does with groups and transactions. The other parts left some of both. */
final class Groups {
    private final Transcript t;
    private final Admin admin;

    Groups(Transcript t, Admin admin) {
        this.t = t;
        this.admin = admin;
    }

    void run() throws Exception {
        Transcript.section("admin: groups");
        String topic = t.prefix + "consumed-classic";
        String group = t.prefix + "classic-alone";
        Transcript.until("empty", () -> admin.describeConsumerGroups(List.of(group)).all().get().get(group).groupState(), GroupState.EMPTY::equals);
        listed();
        described(group);
        offsets(group, topic);
        removed(topic);
        streams(topic);
        Transcript.fact("delete", () -> admin.deleteConsumerGroups(List.of(group)).all().get());
        Transcript.fact("delete again", () -> admin.deleteConsumerGroups(List.of(group)).all().get());
        transactions(topic);
    }

    private void listed() {
        Transcript.fact("list", () -> own(admin.listGroups(new ListGroupsOptions().withTypes(Set.of(GroupType.CLASSIC, GroupType.CONSUMER))).all().get()));
        Transcript.fact("list consumer groups", () -> admin.listConsumerGroups().all().get().stream().filter(g -> g.groupId().startsWith(t.prefix)).count());
    }

    private List<String> own(Collection<GroupListing> groups) {
        List<String> own = new ArrayList<>();
        for (GroupListing g : groups) if (g.groupId().startsWith(t.prefix)) own.add(g.groupId() + " " + g.type() + " " + g.protocol() + " " + g.groupState());
        Collections.sort(own);
        return own;
    }

    private void described(String group) {
        Descriptions descriptions = new Descriptions(admin);
        Transcript.fact("describe", () -> descriptions.group(group));
        Transcript.fact("coordinator known", () -> descriptions.known(admin.describeConsumerGroups(List.of(group)).all().get().get(group).coordinator()));
        Transcript.fact("describe of an absent one", () -> descriptions.group(t.prefix + "absent"));
        Transcript.fact("describe as classic", () -> {
            ClassicGroupDescription d = admin.describeClassicGroups(List.of(group)).all().get().get(group);
            return d.protocol() + " " + d.state() + " coordinator known " + descriptions.known(d.coordinator());
        });
        Transcript.fact("describe a consumer group as classic", () -> admin.describeClassicGroups(List.of(t.prefix + "consumer-alone")).all().get());
    }

    private void offsets(String group, String topic) {
        TopicPartition p = new TopicPartition(topic, 0);
        TopicPartition q = new TopicPartition(topic, 1);
        Transcript.fact("offsets", () -> Consumers.byName(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get()));
        Transcript.fact("alter offsets", () -> admin.alterConsumerGroupOffsets(group, Map.of(p, new OffsetAndMetadata(7, Optional.of(0), "altered"))).all().get());
        Transcript.fact("delete offsets", () -> admin.deleteConsumerGroupOffsets(group, Set.of(q)).all().get());
        Transcript.fact("offsets", () -> Consumers.byName(admin.listConsumerGroupOffsets(Map.of(group, new ListConsumerGroupOffsetsSpec())).partitionsToOffsetAndMetadata(group).get()));
    }

    /** A static member keeps its place until it is removed. */
    private void removed(String topic) throws Exception {
        String group = t.prefix + "static";
        Map<String, Object> config = t.config("group.id", group, "group.instance.id", "one", "client.id", "static", "auto.offset.reset", "earliest");
        try (KafkaConsumer<String, String> c = new KafkaConsumer<>(config)) {
            c.subscribe(List.of(topic));
            Transcript.until("joined", () -> { c.poll(Duration.ofMillis(50)); return c.assignment().size(); }, n -> n == Transcript.PARTITIONS);
        }
        Transcript.fact("static", () -> new Descriptions(admin).members(group));
        Transcript.fact("remove", () -> admin.removeMembersFromConsumerGroup(group, new RemoveMembersFromConsumerGroupOptions(List.of(new MemberToRemove("one")))).all().get());
        Transcript.fact("remove again", () -> admin.removeMembersFromConsumerGroup(group, new RemoveMembersFromConsumerGroupOptions(List.of(new MemberToRemove("one")))).all().get());
        Transcript.fact("static", () -> new Descriptions(admin).members(group));
    }

    /** Kafka Streams has groups of its own kind (KIP-1071). Here are none, and a group of another kind. */
    private void streams(String topic) {
        for (String group : List.of(t.prefix + "absent", t.prefix + "consumer-alone")) {
            TopicPartition p = new TopicPartition(topic, 0);
            Transcript.fact("streams", () -> admin.describeStreamsGroups(List.of(group)).all().get());
            Transcript.fact("streams offsets", () -> admin.listStreamsGroupOffsets(Map.of(group, new ListStreamsGroupOffsetsSpec().topicPartitions(List.of(p)))).all().get());
            Transcript.fact("streams delete offsets", () -> admin.deleteStreamsGroupOffsets(group, Set.of(p)).all().get());
        }
        Transcript.fact("streams alter offsets", () -> admin.alterStreamsGroupOffsets(t.prefix + "streams", Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(1))).all().get());
        Transcript.fact("streams delete", () -> admin.deleteStreamsGroups(List.of(t.prefix + "absent")).all().get());
    }

    private void transactions(String topic) throws Exception {
        Transcript.section("admin: transactions");
        TopicPartition p = new TopicPartition(topic, 2);
        String id = t.prefix + "tx";
        Transcript.fact("describe", () -> describe(id));
        Transcript.fact("absent", () -> describe(t.prefix + "absent"));
        Transcript.fact("list", () -> list());
        Transcript.fact("fence", () -> admin.fenceProducers(List.of(id)).all().get());
        for (String end : List.of("abort", "force")) {
            String open = t.prefix + end;
            try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config("transactional.id", open))) {
                producer.initTransactions();
                producer.beginTransaction();
                producer.send(new ProducerRecord<>(topic, 2, "k", "open")).get();
                Transcript.fact("open", () -> describe(open));
                if (end.equals("abort")) abort(p); else Transcript.fact("force", () -> admin.forceTerminateTransaction(open).result().get());
                Transcript.fact("commit after " + end, () -> { producer.commitTransaction(); return "done"; });
            }
        }
        Transcript.eventually("list", () -> list(), all -> all.stream().noneMatch(s -> s.contains("Ongoing") || s.contains("Prepare")));
    }

    private void abort(TopicPartition p) throws Exception {
        for (ProducerState s : admin.describeProducers(List.of(p)).partitionResult(p).get().activeProducers()) {
            if (s.currentTransactionStartOffset().isEmpty()) continue;
            Transcript.fact("abort", () -> admin.abortTransaction(new AbortTransactionSpec(p, s.producerId(), (short) s.producerEpoch(), s.coordinatorEpoch().orElse(0))).all().get());
        }
    }

    private String describe(String id) throws Exception {
        TransactionDescription d = admin.describeTransactions(List.of(id)).description(id).get();
        return d.state() + " epoch " + d.producerEpoch() + " timeout " + d.transactionTimeoutMs() + " partitions " + Transcript.sorted(d.topicPartitions()) + " coordinator " + (d.coordinatorId() > 0);
    }

    private List<String> list() throws Exception {
        List<String> own = new ArrayList<>();
        for (TransactionListing l : admin.listTransactions(new ListTransactionsOptions().filterOnTransactionalIdPattern(t.prefix + ".*")).all().get()) {
            own.add(l.transactionalId() + " " + l.state());
        }
        Collections.sort(own);
        return own;
    }
}
