import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.acl.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.quota.*;
import org.apache.kafka.common.resource.*;
import org.apache.kafka.common.security.token.delegation.DelegationToken;

/** What an administrator does with the cluster itself: brokers, quorum, features, settings, access, quotas, users, tokens. */
final class Cluster {
    private final Transcript t;
    private final Admin admin;

    Cluster(Transcript t, Admin admin) {
        this.t = t;
        this.admin = admin;
    }

    void run() throws Exception {
        Transcript.section("admin: cluster");
        brokers();
        quorum();
        features();
        configs();
        access();
        quotas();
        users();
        tokens();
        Transcript.fact("client instance", () -> admin.clientInstanceId(Duration.ofSeconds(10)) != null);
    }

    private void brokers() throws Exception {
        DescribeClusterResult d = admin.describeCluster(new DescribeClusterOptions().includeAuthorizedOperations(true).includeFencedBrokers(true));
        Transcript.fact("cluster", () -> d.clusterId().get() + " " + Transcript.sorted(d.nodes().get()) + " " + Transcript.sorted(d.authorizedOperations().get()));
        Transcript.fact("controller known", () -> new Descriptions(admin).known(d.controller().get()));
        Transcript.fact("unregister", () -> admin.unregisterBroker(99).all().get());
    }

    private void quorum() {
        Transcript.fact("quorum", () -> {
            QuorumInfo q = admin.describeMetadataQuorum().quorumInfo().get();
            List<Integer> voters = new ArrayList<>();
            q.voters().forEach(v -> voters.add(v.replicaId()));
            return "voters " + Transcript.sorted(voters) + " leader among them " + voters.contains(q.leaderId()) + " nodes " + q.nodes().keySet() + " observers " + q.observers().size();
        });
        Transcript.fact("add voter", () -> admin.addRaftVoter(99, new Uuid(9, 9), Set.of(new RaftVoterEndpoint("CONTROLLER", "localhost", 1))).all().get());
        Transcript.fact("remove voter", () -> admin.removeRaftVoter(99, new Uuid(9, 9)).all().get());
    }

    private void features() {
        Transcript.fact("features", () -> {
            FeatureMetadata f = admin.describeFeatures().featureMetadata().get();
            return new TreeMap<>(f.finalizedFeatures()) + " supported " + new TreeMap<>(f.supportedFeatures()) + " epoch " + f.finalizedFeaturesEpoch().isPresent();
        });
        UpdateFeaturesOptions validate = new UpdateFeaturesOptions().validateOnly(true);
        Transcript.fact("feature of tomorrow", () -> admin.updateFeatures(Map.of("group.version", new FeatureUpdate((short) 99, FeatureUpdate.UpgradeType.UPGRADE)), validate).all().get());
        Transcript.fact("feature as it is", () -> admin.updateFeatures(Map.of("transaction.version", new FeatureUpdate((short) 2, FeatureUpdate.UpgradeType.UPGRADE)), validate).all().get());
    }

    private void configs() throws Exception {
        ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
        ConfigResource metrics = new ConfigResource(ConfigResource.Type.CLIENT_METRICS, t.prefix + "metrics");
        ConfigResource group = new ConfigResource(ConfigResource.Type.GROUP, t.prefix + "settings");
        for (ConfigEntry e : Topics.byName(admin.describeConfigs(List.of(broker)).all().get().get(broker)).values()) {
            if (!e.name().contains("listeners")) System.out.println("broker " + e.name() + "=" + e.value() + " " + e.source() + " " + e.isSensitive()); // its own addresses
        }
        alter(broker, "log.cleaner.threads", "2");
        alter(metrics, "interval.ms", "5000");
        alter(group, "consumer.session.timeout.ms", "46000");
        Transcript.fact("loggers", () -> admin.describeConfigs(List.of(new ConfigResource(ConfigResource.Type.BROKER_LOGGER, "1"))).all().get().size());
        Transcript.fact("resources", () -> {
            List<String> own = new ArrayList<>();
            for (ConfigResource r : admin.listConfigResources(Set.of(ConfigResource.Type.CLIENT_METRICS, ConfigResource.Type.GROUP), new ListConfigResourcesOptions()).all().get()) {
                if (r.name().startsWith(t.prefix)) own.add(r.toString());
            }
            return Transcript.sorted(own);
        });
        Transcript.fact("metrics resources", () -> admin.listClientMetricsResources().all().get().stream().filter(r -> r.name().startsWith(t.prefix)).count());
        for (ConfigResource resource : List.of(broker, metrics)) {
            String name = resource == broker ? "log.cleaner.threads" : "interval.ms";
            Transcript.fact("back", () -> admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(new ConfigEntry(name, ""), AlterConfigOp.OpType.DELETE)))).all().get());
        }
    }

    private void alter(ConfigResource resource, String name, String value) throws Exception {
        Transcript.fact("alter " + name, () -> admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET)))).all().get());
        Transcript.eventually(name, () -> admin.describeConfigs(List.of(resource)).all().get().get(resource).get(name).value(), value::equals);
    }

    private void access() throws Exception {
        ResourcePattern pattern = new ResourcePattern(ResourceType.TOPIC, t.prefix, PatternType.PREFIXED);
        AclBinding binding = new AclBinding(pattern, new AccessControlEntry("User:bob", "*", AclOperation.WRITE, AclPermissionType.DENY));
        Transcript.fact("create", () -> admin.createAcls(List.of(binding)).all().get());
        Transcript.eventually("rules", () -> Transcript.sorted(admin.describeAcls(binding.toFilter()).values().get()), all -> all.size() == 1);
        Transcript.fact("delete", () -> admin.deleteAcls(List.of(binding.toFilter())).all().get());
        Transcript.eventually("rules", () -> Transcript.sorted(admin.describeAcls(binding.toFilter()).values().get()), List::isEmpty);
    }

    private void quotas() throws Exception {
        ClientQuotaEntity entity = new ClientQuotaEntity(Map.of(ClientQuotaEntity.CLIENT_ID, t.prefix + "slow"));
        ClientQuotaFilter filter = ClientQuotaFilter.containsOnly(List.of(ClientQuotaFilterComponent.ofEntity(ClientQuotaEntity.CLIENT_ID, t.prefix + "slow")));
        for (Double rate : Arrays.asList(1e6, null)) {
            Transcript.fact("quota", () -> admin.alterClientQuotas(List.of(new ClientQuotaAlteration(entity, List.of(new ClientQuotaAlteration.Op("producer_byte_rate", rate))))).all().get());
            Transcript.eventually("quotas", () -> admin.describeClientQuotas(filter).entities().get(), all -> all.isEmpty() == (rate == null));
        }
    }

    private void users() throws Exception {
        String user = t.prefix + "carol";
        ScramCredentialInfo info = new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096);
        Transcript.fact("upsert", () -> admin.alterUserScramCredentials(List.of(new UserScramCredentialUpsertion(user, info, "secret"))).all().get());
        Transcript.eventually("user", () -> admin.describeUserScramCredentials(List.of(user)).all().get().get(user), d -> d.credentialInfos().size() == 1);
        Transcript.fact("delete", () -> admin.alterUserScramCredentials(List.of(new UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256))).all().get());
        Transcript.fact("delete again", () -> admin.alterUserScramCredentials(List.of(new UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256))).all().get());
        Transcript.fact("too few iterations", () -> admin.alterUserScramCredentials(List.of(
            new UserScramCredentialUpsertion(user, new ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 1), "secret"))).all().get());
    }

    private void tokens() throws Exception {
        DelegationToken token = admin.createDelegationToken(new CreateDelegationTokenOptions().maxLifetimeMs(3_600_000)).delegationToken().get();
        System.out.println("token of " + token.tokenInfo().ownerAsString() + " requested by " + token.tokenInfo().tokenRequester());
        String id = token.tokenInfo().tokenId();
        Transcript.eventually("tokens", () -> admin.describeDelegationToken().delegationTokens().get().stream().filter(d -> d.tokenInfo().tokenId().equals(id)).count(), n -> n == 1);
        Transcript.fact("renew", () -> admin.renewDelegationToken(token.hmac(), new RenewDelegationTokenOptions().renewTimePeriodMs(60_000)).expiryTimestamp().get() > System.currentTimeMillis());
        Transcript.fact("renew another", () -> admin.renewDelegationToken(new byte[] {1, 2, 3}).expiryTimestamp().get());
        Transcript.fact("expire", () -> admin.expireDelegationToken(token.hmac(), new ExpireDelegationTokenOptions().expiryTimePeriodMs(-1)).expiryTimestamp().get() > 0);
        Transcript.eventually("tokens", () -> admin.describeDelegationToken().delegationTokens().get().stream().filter(d -> d.tokenInfo().tokenId().equals(id)).count(), n -> n == 0);
    }
}
