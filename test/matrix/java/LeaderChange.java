import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;

/**
 * Writes and reads a topic's only partition while its leader changes: BOOTSTRAP TOPIC COUNT. It prints "half" when half of the records were written and
 * read, and then waits for a line on its input. Each record must be written once, and read once and in order.
 */
public final class LeaderChange {
    public static void main(String[] args) throws Exception {
        Transcript t = new Transcript(new String[] {args[0], args[1]});
        String topic = args[1];
        int count = Integer.parseInt(args[2]);
        Scanner go = new Scanner(System.in);
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(t.config());
            KafkaConsumer<String, String> consumer = new KafkaConsumer<>(t.config("auto.offset.reset", "earliest", "group.id", topic))) {
            consumer.subscribe(List.of(topic));
            int next = 0;
            for (int i = 0; i < count; i++) {
                if (i == count / 2) {
                    next = read(consumer, next, i);
                    System.out.println("half");
                    go.nextLine();
                }
                producer.send(new ProducerRecord<>(topic, 0, null, "v" + i)).get();
            }
            read(consumer, next, count);
            System.out.println("all " + count);
        }
    }

    private static int read(KafkaConsumer<String, String> consumer, int from, int to) throws Exception {
        int[] next = {from};
        Transcript.until("records", () -> {
            for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(100))) {
                if (!r.value().equals("v" + next[0]) || r.offset() != next[0]) throw new Error("offset " + r.offset() + " has " + r.value() + ", want v" + next[0]);
                next[0]++;
            }
            return next[0];
        }, n -> n >= to);
        return next[0];
    }
}
