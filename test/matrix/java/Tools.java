import java.io.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's command line tools one after the other, as its shell scripts do, but in one process, since each would need a second of CPU to start:
 *
 *   java Tools BOOTSTRAP PREFIX
 */
public final class Tools {
    /** What a tool's exit becomes. Some catch it and exit again: the first exit's code counts. */
    private static final class Exited extends RuntimeException {
        Exited() {
            super(null, null, false, false);
        }
    }

    private static final PrintStream OUT = System.out;
    private static final PrintStream ERR = System.err;
    private static Integer firstExit;

    private final String bootstrap;
    private final String prefix;
    private final Path scratch;
    private String last = ""; // text that a tool prints last

    private Tools(String bootstrap, String prefix) throws IOException {
        this.bootstrap = bootstrap;
        this.prefix = prefix;
        scratch = Files.createTempDirectory("kmirror-tools-");
    }

    public static void main(String[] args) throws Exception {
        Exit.Procedure exit = (code, message) -> { firstExit = firstExit == null ? code : firstExit; throw new Exited(); };
        Exit.setExitProcedure(exit);
        Exit.setHaltProcedure(exit);
        System.setProperty("org.slf4j.simpleLogger.cacheOutputStream", "true");
        org.slf4j.LoggerFactory.getLogger(Tools.class); // logs go where they go now, not into what a tool prints
        Exit.setShutdownHookAdder((name, hook) -> { });
        Tools t = new Tools(args[0], args[1]);
        t.topics();
        t.records();
        t.groups();
        t.partitions();
        t.cluster();
        t.system();
        t.tool("topics", "--delete", "--topic", t.prefix + "tools");
        Runtime.getRuntime().halt(0); // some tools leave threads behind
    }

    private void topics() throws Exception {
        String topic = prefix + "tools";
        tool("topics", "--create", "--topic", topic, "--replica-assignment", "1:2:3,2:3:1,3:1:2", "--config", "max.message.bytes=20000");
        tool("topics", "--create", "--topic", topic);
        eventually("Leader: 3", "topics", "--describe", "--topic", topic);
        tool("topics", "--describe", "--topic", topic);
        tool("topics", "--list", "--topic", prefix + ".*");
        tool("topics", "--describe", "--topic", prefix + "absent");
        tool("configs", "--alter", "--entity-type", "topics", "--entity-name", topic, "--add-config", "max.message.bytes=30000,cleanup.policy=[compact,delete]");
        eventually("30000", "configs", "--describe", "--entity-type", "topics", "--entity-name", topic);
        tool("configs", "--alter", "--entity-type", "groups", "--entity-name", prefix + "sharers", "--add-config", "share.auto.offset.reset=earliest");
        tool("configs", "--describe", "--entity-type", "topics", "--entity-name", topic);
    }

    private void records() throws Exception {
        String topic = prefix + "tools";
        StringBuilder lines = new StringBuilder();
        for (int i = 0; i < 30; i++) lines.append("n:").append(i).append("\tkey").append(i).append("\tvalue").append(i).append('\n');
        InputStream in = System.in;
        System.setIn(new ByteArrayInputStream(lines.toString().getBytes(StandardCharsets.UTF_8)));
        tool("console-producer", "--topic", topic, "--reader-property", "parse.key=true", "--reader-property", "parse.headers=true", "--sync");
        System.setIn(in);
        String[] shown = {"--formatter-property", "print.key=true", "--formatter-property", "print.partition=true", "--formatter-property", "print.offset=true",
            "--formatter-property", "print.headers=true"};
        sorted("console-consumer", with(shown, "--topic", topic, "--group", prefix + "readers", "--from-beginning", "--max-messages", "30", "--timeout-ms", "60000"));
        sorted("console-consumer", with(shown, "--topic", topic, "--partition", "1", "--offset", "2", "--max-messages", "3", "--timeout-ms", "60000"));
        sorted("console-share-consumer", with(shown, "--topic", topic, "--group", prefix + "sharers", "--max-messages", "30", "--timeout-ms", "60000"));
        sorted("get-offsets", "--topic", topic);
        sorted("get-offsets", "--topic", topic, "--time", "earliest");
    }

    private void groups() throws Exception {
        String topic = prefix + "tools";
        String group = prefix + "readers";
        eventually("no active members", "consumer-groups", "--describe", "--group", group);
        sorted("consumer-groups", "--describe", "--group", group);
        sorted("consumer-groups", "--describe", "--group", prefix + "absent");
        sorted("consumer-groups", "--reset-offsets", "--to-earliest", "--group", group, "--topic", topic, "--execute");
        sorted("consumer-groups", "--delete-offsets", "--group", group, "--topic", topic);
        tool("consumer-groups", "--delete", "--group", group);
        eventually("Empty", "share-groups", "--describe", "--state", "--group", prefix + "sharers");
        tool("share-groups", "--delete", "--group", prefix + "sharers");
        tool("streams-groups", "--describe", "--group", prefix + "absent");
    }

    private void partitions() throws Exception {
        String topic = prefix + "tools";
        String partition = "{\"topic\":\"" + topic + "\",\"partition\":0";
        Path records = Files.writeString(scratch.resolve("records.json"), "{\"version\":1,\"partitions\":[" + partition + ",\"offset\":2}]}");
        tool("delete-records", "--offset-json-file", records.toString());
        Path moves = Files.writeString(scratch.resolve("moves.json"), "{\"version\":1,\"partitions\":[" + partition + ",\"replicas\":[2,3,1]}]}");
        tool("reassign-partitions", "--reassignment-json-file", moves.toString(), "--execute");
        eventually("is completed", "reassign-partitions", "--reassignment-json-file", moves.toString(), "--verify");
        tool("leader-election", "--election-type", "preferred", "--topic", topic, "--partition", "0");
        tool("leader-election", "--election-type", "preferred", "--topic", topic, "--partition", "0");
        tool("topics", "--alter", "--topic", topic, "--partitions", "5");
    }

    private void cluster() throws Exception {
        sorted("cluster", "list-endpoints");
        tool("cluster", "cluster-id");
        sorted("features", "describe");
        sorted("acls", "--add", "--allow-principal", "User:" + prefix + "dave", "--operation", "Read", "--topic", prefix + "tools");
        eventually("dave", "acls", "--list", "--topic", prefix + "tools");
        sorted("acls", "--remove", "--force", "--allow-principal", "User:" + prefix + "dave", "--operation", "Read", "--topic", prefix + "tools");
        tool("configs", "--alter", "--entity-type", "clients", "--entity-name", prefix + "client", "--add-config", "producer_byte_rate=1000000");
        eventually("producer_byte_rate", "configs", "--describe", "--entity-type", "clients", "--entity-name", prefix + "client");
        tool("client-metrics", "--alter", "--name", prefix + "metrics", "--metrics", "org.apache.kafka.producer.", "--interval", "10000");
        eventually("10000", "client-metrics", "--describe", "--name", prefix + "metrics");
        tool("client-metrics", "--delete", "--name", prefix + "metrics");
        tool("transactions", "describe", "--transactional-id", prefix + "absent");
    }

    /** The programs that Kafka's own system tests drive its clients by. */
    private void system() throws Exception {
        String topic = prefix + "verified";
        tool("topics", "--create", "--topic", topic, "--replica-assignment", "1:2:3");
        eventually("Leader: 1", "topics", "--describe", "--topic", topic);
        last = "\"offset\":19"; // it sends while its main returns
        tool("verifiable-producer", "--topic", topic, "--max-messages", "20", "--acks", "-1");
        last = "";
        for (String protocol : List.of("classic", "consumer")) {
            tool("verifiable-consumer", "--topic", topic, "--group-id", prefix + protocol, "--group-protocol", protocol, "--max-messages", "20", "--verbose");
        }
        tool("verifiable-share-consumer", "--topic", topic, "--group-id", prefix + "verifiedsharers", "--offset-reset-strategy", "earliest", "--max-messages", "20", "--verbose");
        tool("topics", "--create", "--topic", prefix + "copied", "--replica-assignment", "2:3:1");
        eventually("Leader: 2", "topics", "--describe", "--topic", prefix + "copied");
        for (String[] mode : new String[][] {{}, {"--use-group-metadata", "--group-mode"}}) {
            tool("transactional-message-copier", with(mode, "--input-topic", topic, "--input-partition", "0", "--output-topic", prefix + "copied", "--transaction-size", "6",
                "--transactional-id", prefix + "copier" + mode.length, "--consumer-group", prefix + "copiers" + mode.length));
        }
        tool("console-consumer", "--topic", prefix + "copied", "--from-beginning", "--isolation-level", "read_committed", "--max-messages", "40", "--timeout-ms", "60000",
            "--formatter-property", "print.offset=true");
        tool("streams-reset", "--application-id", prefix + "classic", "--input-topics", topic, "--by-duration", "PT0S");
        says("50 records sent", "producer-performance", "--topic", topic, "--num-records", "50", "--record-size", "100", "--throughput", "-1", "--transactional-id", prefix + "performer");
        says(", 70, ", "consumer-performance", "--topic", topic, "--group", prefix + "performers", "--num-records", "70", "--timeout", "60000");
        says(", 50, ", "share-consumer-performance", "--topic", topic, "--group", prefix + "verifiedsharers", "--num-records", "50", "--timeout", "60000");
        says("Avg latency", "end-to-end-latency", prefix + "copied", "20", "all", "100");
        eventually(prefix + "performers", "groups", "--list");
        eventually("\"partition\":\"" + topic + "-0\"", "log-dirs", "--describe", "--topic-list", topic);
        tool("topics", "--create", "--topic", prefix + "compatible", "--replica-assignment", "1:2:3");
        eventually("Leader: 1", "topics", "--describe", "--topic", prefix + "compatible");
        tool("client-compatibility", "--topic", prefix + "compatible", "--num-cluster-nodes", "3", "--offsets-for-times-supported", "true", "--cluster-id-supported", "true",
            "--expect-record-too-large-exception", "false", "--create-topics-supported", "true", "--describe-acls-supported", "true", "--describe-configs-supported", "true",
            "--idempotent-producer-supported", "true");
        tool("topics", "--delete", "--topic", "newtopic"); // which it made
    }

    /** The first arguments, and then some more. */
    private static String[] with(String[] some, String... first) {
        String[] all = Arrays.copyOf(first, first.length + some.length);
        System.arraycopy(some, 0, all, first.length, some.length);
        return all;
    }

    /** Runs a tool and prints what it printed, with the numbers taken out that are times. */
    private void tool(String name, String... args) throws Exception {
        show(name, args, run(name, args));
    }

    /** As tool, for output whose lines come in any order. */
    private void sorted(String name, String... args) throws Exception {
        String[] lines = run(name, args).split("\n");
        Arrays.sort(lines);
        show(name, args, String.join("\n", lines));
    }

    /** Prints an output without the widths of its columns, stack traces, times and rates. */
    private static void show(String name, String[] args, String output) {
        StringJoiner lines = new StringJoiner("\n", title(name, args) + "\n", "");
        for (String line : output.split("\n")) {
            boolean noise = line.isBlank() || line.startsWith("\tat ") || line.startsWith("\t... ") || line.contains("Tools$Exited") || line.contains("error Exited: null") || line.equals("null")
                || line.contains("\"totalProcessed\":0,") // a copier may wait for its group's rebalance or not
                || line.contains("\"partitions\":[]"); // a member of a new group may be told of none first
            if (!noise) lines.add(line.replaceAll(" +", " ").stripTrailing().replaceAll("\\d{13}|(?<=Epoch: )\\d+|(?<=\"time\":\")[^\"]*", "TIME").replaceAll("(_throughput\":)[0-9.E]+", "$1RATE")
                .replaceAll("(acknowledged.*offsets\":)\\[[^\\]]*", "$1[UNORDERED"));
        }
        OUT.println(lines);
    }

    private static String title(String name, String[] args) {
        return "== " + name + " " + String.join(" ", args).replaceAll("/\\S*/", "");
    }

    /** Waits in silence until a tool prints a text, for what becomes true in time. */
    private void eventually(String text, String name, String... args) throws Exception {
        String seen = Transcript.until(name, () -> run(name, args), output -> output.contains(text));
        OUT.println(title(name, args) + " says at last: " + seen.contains(text));
    }

    /** Runs a tool, of whose output full of times and rates one text counts. */
    private void says(String text, String name, String... args) throws Exception {
        String output = run(name, args);
        if (!output.contains(text)) throw new IllegalStateException(title(name, args) + " doesn't say " + text + ":\n" + output);
        OUT.println(title(name, args) + " says: " + text);
    }

    /** Returns what a tool printed, and its exit code where that isn't 0. */
    private String run(String name, String... args) throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream stream = new PrintStream(printed, true, StandardCharsets.UTF_8);
        System.setOut(stream);
        System.setErr(stream);
        firstExit = null;
        try {
            call(name, switch (name) {
                case "cluster" -> with(new String[] {"--bootstrap-server", bootstrap}, args); // whose subcommand must come first
                case "end-to-end-latency" -> with(args, bootstrap);
                case "transactional-message-copier" -> with(args, "--broker-list", bootstrap);
                default -> with(args, "--bootstrap-server", bootstrap);
            });
        } catch (Exited e) {
            // firstExit has it
        }
        try {
            Transcript.until(name, () -> printed.toString(StandardCharsets.UTF_8), output -> output.contains(last));
        } finally {
            System.setOut(OUT);
            System.setErr(ERR);
        }
        return printed.toString(StandardCharsets.UTF_8) + (firstExit == null || firstExit == 0 ? "" : "exit code " + firstExit + "\n");
    }

    private static void call(String name, String[] args) throws Exception {
        try {
            Class.forName(CLASSES.get(name)).getMethod("main", String[].class).invoke(null, (Object) args);
        } catch (java.lang.reflect.InvocationTargetException e) {
            if (e.getCause() instanceof Exited exited) throw exited;
            throw e;
        }
    }

    private static final Map<String, String> CLASSES = Map.ofEntries(
        Map.entry("topics", "org.apache.kafka.tools.TopicCommand"),
        Map.entry("configs", "kafka.admin.ConfigCommand"),
        Map.entry("console-producer", "org.apache.kafka.tools.ConsoleProducer"),
        Map.entry("console-consumer", "org.apache.kafka.tools.consumer.ConsoleConsumer"),
        Map.entry("console-share-consumer", "org.apache.kafka.tools.consumer.ConsoleShareConsumer"),
        Map.entry("get-offsets", "org.apache.kafka.tools.GetOffsetShell"),
        Map.entry("consumer-groups", "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"),
        Map.entry("share-groups", "org.apache.kafka.tools.consumer.group.ShareGroupCommand"),
        Map.entry("streams-groups", "org.apache.kafka.tools.streams.StreamsGroupCommand"),
        Map.entry("delete-records", "org.apache.kafka.tools.DeleteRecordsCommand"),
        Map.entry("reassign-partitions", "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"),
        Map.entry("leader-election", "org.apache.kafka.tools.LeaderElectionCommand"),
        Map.entry("cluster", "org.apache.kafka.tools.ClusterTool"),
        Map.entry("features", "org.apache.kafka.tools.FeatureCommand"),
        Map.entry("acls", "org.apache.kafka.tools.AclCommand"),
        Map.entry("client-metrics", "org.apache.kafka.tools.ClientMetricsCommand"),
        Map.entry("transactions", "org.apache.kafka.tools.TransactionsCommand"),
        Map.entry("verifiable-producer", "org.apache.kafka.tools.VerifiableProducer"),
        Map.entry("verifiable-consumer", "org.apache.kafka.tools.VerifiableConsumer"),
        Map.entry("verifiable-share-consumer", "org.apache.kafka.tools.VerifiableShareConsumer"),
        Map.entry("transactional-message-copier", "org.apache.kafka.tools.TransactionalMessageCopier"),
        Map.entry("streams-reset", "org.apache.kafka.tools.StreamsResetter"),
        Map.entry("producer-performance", "org.apache.kafka.tools.ProducerPerformance"),
        Map.entry("consumer-performance", "org.apache.kafka.tools.ConsumerPerformance"),
        Map.entry("share-consumer-performance", "org.apache.kafka.tools.ShareConsumerPerformance"),
        Map.entry("end-to-end-latency", "org.apache.kafka.tools.EndToEndLatency"),
        Map.entry("groups", "org.apache.kafka.tools.GroupsCommand"),
        Map.entry("log-dirs", "org.apache.kafka.tools.LogDirsCommand"),
        Map.entry("client-compatibility", "org.apache.kafka.tools.ClientCompatibilityTest"));
}
