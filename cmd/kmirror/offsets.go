package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"kmirror/config"
	"kmirror/forwarder"
)

// offsetsTimeout bounds the opening of the map, and then each question.
const offsetsTimeout = 30 * time.Second

func newOffsetsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "offsets", Short: "Tell which mirror offset a source offset is, or the reverse", Args: cobra.NoArgs,
		Long: "Tell at which offset of the mirror the record at an offset of the source is, or the reverse with --from mirror. It reads the mirror's own\n" +
			"records and asks no kmirror instance. Where no such record is on the other side, it tells the first one behind.",
		RunE: runOffsets,
	}
	addConfigFlags(cmd)
	flags := cmd.Flags()
	flags.String("topic", "", "topic, as the source names it")
	flags.Int32("partition", 0, "partition")
	flags.Int32("mirror-partition", -1, "the mirror's partition, where topics are repartitioned; default: the same")
	flags.Int64Slice("offset", nil, "offset, or several with commas")
	flags.String("from", "source", "whose offset it is: source or mirror")
	flags.Bool("json", false, "print JSON, an object for each offset")
	cmd.MarkFlagRequired("topic")
	cmd.MarkFlagRequired("offset")
	return cmd
}

// offsetAnswer is one line of kmirror offsets --json.
type offsetAnswer struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Source    int64  `json:"source_offset"`
	Mirror    int64  `json:"mirror_offset"`
	Same      bool   `json:"same_record"`
	Beyond    bool   `json:"beyond_the_end"`
}

func runOffsets(cmd *cobra.Command, _ []string) error {
	flags := cmd.Flags()
	topic, _ := flags.GetString("topic")
	partition, _ := flags.GetInt32("partition")
	mirrorPartition, _ := flags.GetInt32("mirror-partition")
	offsets, _ := flags.GetInt64Slice("offset")
	from, _ := flags.GetString("from")
	asJSON, _ := flags.GetBool("json")
	if from != "source" && from != "mirror" {
		return fmt.Errorf("--from is source or mirror, not %q", from)
	}
	if err := flags.Set("roles", config.RoleMirror); err != nil {
		return err
	}
	settings, err := loadConfig(cmd)
	if err != nil {
		return err
	}
	repartitioned := settings.Topics.Partitions == "repartition"
	switch {
	case repartitioned && mirrorPartition < 0:
		return errors.New("topics.partitions is repartition: --mirror-partition says which of the mirror's is meant")
	case !repartitioned && mirrorPartition >= 0 && mirrorPartition != partition:
		return errors.New("--mirror-partition is for repartitioned topics; partition p is partition p here")
	case mirrorPartition < 0:
		mirrorPartition = partition
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), offsetsTimeout)
	defer cancel()
	mapped, err := openOffsets(ctx, settings, topic, partition, mirrorPartition)
	if err != nil {
		return err
	}
	defer mapped.Close()
	for _, offset := range offsets {
		line := offsetAnswer{Topic: topic, Partition: partition}
		if err := line.ask(cmd.Context(), mapped, from, offset); err != nil {
			return err
		}
		if !asJSON {
			fmt.Fprintln(cmd.OutOrStdout(), line.text(from))
		} else if err := json.NewEncoder(cmd.OutOrStdout()).Encode(line); err != nil {
			return err
		}
	}
	return nil
}

// ask fills in both offsets.
func (a *offsetAnswer) ask(ctx context.Context, mapped *forwarder.OffsetMap, from string, offset int64) error {
	ctx, cancel := context.WithTimeout(ctx, offsetsTimeout)
	defer cancel()
	var to forwarder.MappedOffset
	var err error
	a.Source, a.Mirror = offset, offset
	if from == "source" {
		to, err = mapped.ToMirror(ctx, offset)
		a.Mirror = to.Offset
	} else {
		to, err = mapped.ToSource(ctx, offset)
		a.Source = to.Offset
	}
	a.Same, a.Beyond = to.Same, to.Beyond
	return err
}

func openOffsets(ctx context.Context, settings config.Config, topic string, partition, mirrorPartition int32) (*forwarder.OffsetMap, error) {
	source, err := newSource(quietReports(), settings)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	mirror, err := newCluster(quietReports(), settings.Mirror)
	if err != nil {
		return nil, fmt.Errorf("mirror: %w", err)
	}
	return forwarder.OpenOffsetMap(ctx, forwarder.Options{
		Name: settings.Name, Source: source.options(), Mirror: mirror.options(), Rename: settings.Topics.Rename,
		Repartition: settings.Topics.Partitions == "repartition",
	}, topic, partition, mirrorPartition)
}

func (a offsetAnswer) text(from string) string {
	other, offset := "source", a.Source
	asked := a.Mirror
	if from == "source" {
		other, offset, asked = "mirror", a.Mirror, a.Source
	}
	switch where := fmt.Sprintf("%s-%d: %s offset %d", a.Topic, a.Partition, from, asked); {
	case a.Same:
		return fmt.Sprintf("%s is %s offset %d", where, other, offset)
	case a.Beyond:
		return fmt.Sprintf("%s is behind all that is mirrored; the %s's next offset is %d", where, other, offset)
	default:
		return fmt.Sprintf("%s is no mirrored record; the first behind it is %s offset %d", where, other, offset)
	}
}
