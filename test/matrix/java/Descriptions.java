import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.common.Node;

/** What groups look like to an administrator, without generated IDs. */
final class Descriptions {
    private final Admin admin;

    Descriptions(Admin admin) {
        this.admin = admin;
    }

    String group(String group) throws Exception {
        return group(admin.describeConsumerGroups(List.of(group), new DescribeConsumerGroupsOptions().includeAuthorizedOperations(true)).all().get().get(group));
    }

    private static String group(ConsumerGroupDescription d) {
        return d.groupId() + " " + d.type() + " " + d.groupState() + " assignor " + d.partitionAssignor() + " simple " + d.isSimpleConsumerGroup()
            + " members " + members(d) + " operations " + Transcript.sorted(d.authorizedOperations());
    }

    String members(String group) throws Exception {
        return members(admin.describeConsumerGroups(List.of(group)).all().get().get(group)).toString();
    }

    private static List<String> members(ConsumerGroupDescription d) {
        List<String> members = new ArrayList<>();
        for (MemberDescription m : d.members()) {
            members.add(m.host() + " " + m.groupInstanceId() + " " + m.assignment().topicPartitions().size() + " partitions");
        }
        Collections.sort(members);
        return members;
    }

    /** Whether a node is one of the cluster's, at the address that the cluster's description gives. */
    boolean known(Node node) throws Exception {
        for (Node n : admin.describeCluster().nodes().get()) {
            if (n.id() == node.id()) return n.host().equals(node.host()) && n.port() == node.port();
        }
        return false;
    }
}
