package scripted

import (
	"maps"
	"slices"
	"strconv"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func (x *exchange) createTopics(req *kmsg.CreateTopicsRequest) kmsg.Response {
	resp := kmsg.NewPtrCreateTopicsResponse()
	for _, rt := range req.Topics {
		out := kmsg.NewCreateTopicsResponseTopic()
		out.Topic = rt.Topic
		count := int(rt.NumPartitions)
		if count == -1 {
			count = max(1, len(rt.ReplicaAssignment))
		}
		err := x.refused()
		switch {
		case err != nil:
		case x.cluster.topics[rt.Topic] != nil:
			err = kerr.TopicAlreadyExists
		case count < 1:
			err = kerr.InvalidPartitions
		case int(rt.ReplicationFactor) > len(x.cluster.brokers):
			err = kerr.InvalidReplicationFactor
		default:
			configs := map[string]string{}
			for _, c := range rt.Configs {
				if c.Value != nil {
					configs[c.Name] = *c.Value
				}
			}
			out.NumPartitions, out.ReplicationFactor = int32(count), int16(len(x.cluster.brokers))
			if !req.ValidateOnly {
				out.TopicID = x.cluster.createTopic(rt.Topic, count, configs).id
			}
		}
		out.ErrorCode = code(err)
		resp.Topics = append(resp.Topics, out)
	}
	return resp
}

func (x *exchange) createPartitions(req *kmsg.CreatePartitionsRequest) kmsg.Response {
	resp := kmsg.NewPtrCreatePartitionsResponse()
	for _, rt := range req.Topics {
		out := kmsg.NewCreatePartitionsResponseTopic()
		out.Topic = rt.Topic
		t, err := x.topic(rt.Topic, [16]byte{})
		switch {
		case x.refused() != nil:
			err = x.refused()
		case err != nil:
		case int(rt.Count) <= len(t.partitions):
			err = kerr.InvalidPartitions
		case !req.ValidateOnly:
			x.cluster.addPartitions(t, int(rt.Count))
		}
		out.ErrorCode = code(err)
		resp.Topics = append(resp.Topics, out)
	}
	return resp
}

func (x *exchange) deleteTopics(req *kmsg.DeleteTopicsRequest) kmsg.Response {
	resp := kmsg.NewPtrDeleteTopicsResponse()
	topics := req.Topics
	for _, name := range req.TopicNames {
		topics = append(topics, kmsg.DeleteTopicsRequestTopic{Topic: &name})
	}
	for _, rt := range topics {
		out := kmsg.NewDeleteTopicsResponseTopic()
		out.Topic, out.TopicID = rt.Topic, rt.TopicID
		name := ""
		if rt.Topic != nil {
			name = *rt.Topic
		}
		t, err := x.topic(name, rt.TopicID)
		if refused := x.refused(); refused != nil {
			err = refused
		}
		if err == nil {
			out.Topic, out.TopicID = &t.name, t.id
			x.cluster.deleteTopic(t.name)
		}
		out.ErrorCode = code(err)
		resp.Topics = append(resp.Topics, out)
	}
	return resp
}

// topicDefaults are the topic configs that DescribeConfigs shows, with Kafka's defaults.
var topicDefaults = map[string]string{
	"cleanup.policy": "delete", "compression.type": "producer", "max.message.bytes": "1048588", "message.timestamp.type": "CreateTime",
	"message.timestamp.before.max.ms": "9223372036854775807", "message.timestamp.after.max.ms": "3600000",
	"retention.ms": "604800000", "retention.bytes": "-1", "segment.ms": "604800000", "min.insync.replicas": "1",
	"unclean.leader.election.enable": "false",
}

func (c *Cluster) brokerConfigs() map[string]string {
	idle := "600000"
	if c.opts.ConnectionsMaxIdle > 0 {
		idle = strconv.FormatInt(c.opts.ConnectionsMaxIdle.Milliseconds(), 10)
	}
	return map[string]string{
		"connections.max.idle.ms": idle, "message.max.bytes": "1048588", "auto.create.topics.enable": strconv.FormatBool(c.opts.AutoCreate),
		"producer.id.expiration.ms": strconv.FormatInt(c.opts.ProducerIDExpiration.Milliseconds(), 10),
	}
}

func (x *exchange) describeConfigs(req *kmsg.DescribeConfigsRequest) kmsg.Response {
	resp := kmsg.NewPtrDescribeConfigsResponse()
	for _, r := range req.Resources {
		out := kmsg.NewDescribeConfigsResponseResource()
		out.ResourceType, out.ResourceName = r.ResourceType, r.ResourceName
		var defaults, set map[string]string
		err := x.refused()
		switch t := x.cluster.topics[r.ResourceName]; {
		case err != nil:
		case r.ResourceType == kmsg.ConfigResourceTypeBroker:
			defaults = x.cluster.brokerConfigs()
		case r.ResourceType != kmsg.ConfigResourceTypeTopic:
			err = kerr.InvalidRequest
		case t == nil:
			err = kerr.UnknownTopicOrPartition
		default:
			defaults, set = topicDefaults, t.configs
		}
		out.ErrorCode = code(err)
		values := maps.Clone(defaults)
		maps.Copy(values, set)
		for _, name := range slices.Sorted(maps.Keys(values)) {
			if r.ConfigNames != nil && !slices.Contains(r.ConfigNames, name) {
				continue
			}
			c := kmsg.NewDescribeConfigsResponseResourceConfig()
			value := values[name]
			c.Name, c.Value, c.Source = name, &value, kmsg.ConfigSourceDefaultConfig
			if _, c.IsDefault = set[name]; c.IsDefault {
				c.Source = kmsg.ConfigSourceDynamicTopicConfig
			}
			c.IsDefault = !c.IsDefault
			out.Configs = append(out.Configs, c)
		}
		resp.Resources = append(resp.Resources, out)
	}
	return resp
}

func (x *exchange) alterConfigs(req *kmsg.IncrementalAlterConfigsRequest) kmsg.Response {
	resp := kmsg.NewPtrIncrementalAlterConfigsResponse()
	for _, r := range req.Resources {
		out := kmsg.NewIncrementalAlterConfigsResponseResource()
		out.ResourceType, out.ResourceName = r.ResourceType, r.ResourceName
		t, err := x.topic(r.ResourceName, [16]byte{})
		if refused := x.refused(); refused != nil {
			err = refused
		}
		for _, c := range r.Configs {
			switch {
			case err != nil || req.ValidateOnly:
			case c.Op == kmsg.IncrementalAlterConfigOpDelete:
				delete(t.configs, c.Name)
			case c.Value != nil:
				t.configs[c.Name] = *c.Value
			}
		}
		out.ErrorCode = code(err)
		resp.Resources = append(resp.Resources, out)
	}
	return resp
}
