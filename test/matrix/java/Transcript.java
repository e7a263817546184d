import java.time.Duration;
import java.util.*;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.function.Predicate;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

/**
 * Runs Kafka's Java clients against a cluster and prints what they see, a fact a line, for a second run to be compared with:
 *
 *   java Transcript BOOTSTRAP PREFIX [PROPERTY=VALUE...]
 *
 * Topics, groups and other names begin with PREFIX. A fact is what the cluster decides: results, offsets, error classes and their messages. What
 * differs from run to run (IDs, times) isn't printed, and what becomes true in time is waited for. The program fails when it couldn't ask.
 */
public final class Transcript {
    static final int PARTITIONS = 3;
    static final Duration PATIENCE = Duration.ofSeconds(40);

    final String bootstrap;
    final String prefix;
    private final Map<String, Object> shared = new HashMap<>();

    Transcript(String[] args) {
        bootstrap = args[0];
        prefix = args[1];
        for (String property : Arrays.asList(args).subList(2, args.length)) {
            int at = property.indexOf('=');
            shared.put(property.substring(0, at), property.substring(at + 1));
        }
    }

    public static void main(String[] args) throws Exception {
        Transcript t = new Transcript(args);
        Properties admin = new Properties();
        admin.putAll(t.config());
        try (Asked asked = new Asked(Admin.create(admin))) {
            new Producers(t, asked.admin).run();
            new Consumers(t, asked.admin, "classic").run();
            new Consumers(t, asked.admin, "consumer").run();
            new ShareConsumers(t, asked.admin).run();
            new Topics(t, asked.admin).run();
            new Groups(t, asked.admin).run();
            new Cluster(t, asked.admin).run();
            asked.check();
        }
    }

    /** The configuration of a client: bootstrap servers, log-in, strings as keys and values, and pairs of a name and a value. */
    Map<String, Object> config(Object... pairs) {
        Map<String, Object> config = new HashMap<>(shared);
        config.put("bootstrap.servers", bootstrap);
        config.put("fetch.max.wait.ms", "50");
        config.put("key.serializer", StringSerializer.class);
        config.put("value.serializer", StringSerializer.class);
        config.put("key.deserializer", StringDeserializer.class);
        config.put("value.deserializer", StringDeserializer.class);
        for (int i = 0; i < pairs.length; i += 2) config.put((String) pairs[i], pairs[i + 1]);
        return config;
    }

    /** A new topic whose partition p is led by broker p % 3 + 1, so that two runs agree about leaders, and which keeps records of 2023. */
    String topic(Admin admin, String name, Map<String, String> more) throws Exception {
        String topic = prefix + name;
        Map<String, String> configs = new HashMap<>(more);
        configs.putIfAbsent("retention.ms", "-1");
        admin.createTopics(List.of(new NewTopic(topic, assignment(PARTITIONS)).configs(configs))).all().get();
        Set<Integer> leaders = new HashSet<>();
        until("leaders", () -> {
            leaders.clear();
            admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().forEach(p -> leaders.add(p.leader().id()));
            return leaders.size();
        }, n -> n == PARTITIONS);
        return topic;
    }

    static Map<Integer, List<Integer>> assignment(int partitions) {
        Map<Integer, List<Integer>> replicas = new TreeMap<>();
        for (int p = 0; p < partitions; p++) replicas.put(p, List.of(p % 3 + 1, (p + 1) % 3 + 1, (p + 2) % 3 + 1));
        return replicas;
    }

    static List<TopicPartition> partitions(String topic) {
        List<TopicPartition> all = new ArrayList<>();
        for (int p = 0; p < PARTITIONS; p++) all.add(new TopicPartition(topic, p));
        return all;
    }

    static void section(String name) {
        System.out.println("== " + name);
    }

    /** Prints what ask returns, or how it is refused. */
    static void fact(String name, Callable<?> ask) {
        System.out.println(name + ": " + answer(ask));
    }

    static String answer(Callable<?> ask) {
        try {
            return String.valueOf(ask.call());
        } catch (Exception e) {
            Throwable cause = e instanceof ExecutionException ? e.getCause() : e;
            return cause.getClass().getSimpleName() + ": " + String.valueOf(cause.getMessage()).replaceAll("\\d{13,}", "TIME");
        }
    }

    /** Asks until the answer is the expected one, or time is over, prints the last answer and returns it. */
    static <T> T eventually(String name, Callable<T> ask, Predicate<T> expected) throws Exception {
        T last = until(name, ask, expected);
        System.out.println(name + ": " + last);
        return last;
    }

    /** As eventually, in silence. Refusals are asked again: a broker may not know yet what the controller decided. */
    static <T> T until(String name, Callable<T> ask, Predicate<T> expected) throws Exception {
        long deadline = System.nanoTime() + PATIENCE.toNanos();
        for (;;) {
            Exception failed = null;
            T last = null;
            try {
                last = ask.call();
                if (expected.test(last)) return last;
            } catch (Exception e) {
                failed = e;
            }
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(name + ": the last answer was " + (failed == null ? last : failed), failed);
            }
            Thread.sleep(50);
        }
    }

    static List<String> sorted(Collection<?> facts) {
        List<String> lines = new ArrayList<>();
        for (Object fact : facts) lines.add(String.valueOf(fact));
        Collections.sort(lines);
        return lines;
    }
}
