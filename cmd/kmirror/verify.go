package main

import (
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kgo"

	"kmirror/config"
	"kmirror/internal/verify"
)

// The exit codes of kmirror verify; 0 says equal.
const (
	exitDifferent exitCode = 1
	exitUnknown   exitCode = 2
)

// verifyRetries is how long a cluster may not answer until verify can't tell.
const verifyRetries = 15 * time.Second

func newVerifyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "verify", Short: "Compare source and mirror record by record", Args: cobra.NoArgs,
		Long: "Compare every mirrored topic on both clusters, partition by partition: counts, keys, values, headers, timestamps, order.\n" +
			"It reads the committed records of both logs and asks no kmirror instance. It exits 0 if they are equal, 1 if they are\n" +
			"different, and 2 if it could not tell.",
		RunE: runVerify,
	}
	addConfigFlags(cmd)
	cmd.Flags().Bool("json", false, "print the report as JSON")
	cmd.Flags().Duration("patience", 10*time.Second, "how long a mirror that is behind may stand still before it counts as different")
	cmd.Flags().Int("parallel", 4, "partitions compared at a time")
	return cmd
}

func runVerify(cmd *cobra.Command, _ []string) error {
	report, err := verifyClusters(cmd)
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "kmirror:", err)
		return exitUnknown
	}
	if asJSON, _ := cmd.Flags().GetBool("json"); asJSON {
		encoder := json.NewEncoder(cmd.OutOrStdout())
		encoder.SetIndent("", "  ")
		err = encoder.Encode(report)
	} else {
		err = printReport(cmd.OutOrStdout(), report)
	}
	switch {
	case err != nil:
		return err
	case report.Result == verify.Different:
		return exitDifferent
	case report.Result == verify.Unknown:
		return exitUnknown
	}
	return nil
}

// verifyClusters reads the settings and compares. The listener's settings don't matter to it.
func verifyClusters(cmd *cobra.Command) (verify.Report, error) {
	if cmd.Flags().Changed("proxy.listen") || cmd.Flags().Changed("listen") {
		return verify.Report{}, fmt.Errorf("--listen has no meaning here")
	}
	if err := cmd.Flags().Set("roles", config.RoleMirror); err != nil {
		return verify.Report{}, err
	}
	settings, err := loadConfig(cmd)
	if err != nil {
		return verify.Report{}, err
	}
	include, exclude, err := settings.Topics.Patterns()
	if err != nil {
		return verify.Report{}, err
	}
	source, err := verifyClient(newSource(quietReports(), settings))
	if err != nil {
		return verify.Report{}, fmt.Errorf("source: %w", err)
	}
	defer source.Close()
	mirror, err := verifyClient(newCluster(quietReports(), settings.Mirror))
	if err != nil {
		return verify.Report{}, fmt.Errorf("mirror: %w", err)
	}
	defer mirror.Close()
	patience, _ := cmd.Flags().GetDuration("patience")
	parallel, _ := cmd.Flags().GetInt("parallel")
	return verify.Run(cmd.Context(), verify.Options{
		Source: source, Mirror: mirror,
		Topics:       func(name string) bool { return matchesAny(include, name) && !matchesAny(exclude, name) },
		Rename:       settings.Topics.Rename,
		Segments:     "__kmirror." + settings.Name + ".segments",
		Repartition:  settings.Topics.Partitions == "repartition",
		FromEarliest: settings.Topics.Start == "earliest",
		Patience:     patience, Parallel: parallel,
	})
}

func verifyClient(x cluster, err error) (*kgo.Client, error) {
	if err != nil {
		return nil, err
	}
	giveUp := kgo.RetryTimeout(verifyRetries)
	return kgo.NewClient(append(clientOptions("kmirror-verify", x.options()), giveUp)...)
}

func matchesAny(patterns []*regexp.Regexp, name string) bool {
	for _, p := range patterns {
		if p.MatchString(name) {
			return true
		}
	}
	return false
}

func printReport(w io.Writer, report verify.Report) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "TOPIC\tPARTITION\tRESULT\tSOURCE\tMIRROR\tOFFSETS\tDETAILS")
	for _, p := range report.Partitions {
		offsets := "shifted"
		switch {
		case p.SameOffsets:
			offsets = "same"
		case p.Compared == 0:
			offsets = ""
		}
		partition := fmt.Sprint(p.Partition)
		if report.Repartitioned {
			partition = fmt.Sprintf("%d to %d", p.Partition, p.MirrorPartition)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t[%d, %d)\t[%d, %d)\t%s\t%s\n", p.Topic, partition, p.Result,
			p.Source.Start, p.Source.End, p.Mirror.Start, p.Mirror.End, offsets, p.Summary())
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w, report.Result)
	return err
}
