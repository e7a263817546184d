package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"kmirror/forwarder"
)

// instanceStatus is what kmirror status reads of /api/status; see admin.Status.
type instanceStatus struct {
	Name        string            `json:"name"`
	Version     string            `json:"version"`
	Roles       []string          `json:"roles"`
	Ready       bool              `json:"ready"`
	NotReady    string            `json:"not_ready"`
	Mirror      *forwarder.Status `json:"mirror"`
	MirrorError string            `json:"mirror_error"`
}

// caughtUp is nil once everything that this instance mirrors is on the mirror; an error says what isn't.
func (s instanceStatus) caughtUp() error {
	switch {
	case s.MirrorError != "":
		return fmt.Errorf("the mirror ended: %s", s.MirrorError)
	case s.Mirror == nil:
		return errors.New("the instance has no mirror role")
	case !s.Mirror.CaughtUp:
		return errors.New("not caught up")
	}
	return nil
}

func newStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Ask a running instance how far its mirror is", Args: cobra.NoArgs,
		Long: "Ask a running instance how far its mirror is. Several instances of one name share the partitions: ask each.\n" +
			"With --until-caught-up it exits 0 once all that the source held after the question is on the mirror, and 1 after the timeout.",
		RunE: runStatus,
	}
	addConfigFlags(cmd)
	cmd.Flags().Bool("json", false, "print the instance's answer as it is")
	cmd.Flags().Bool("until-caught-up", false, "wait until every stream is caught up")
	cmd.Flags().Duration("timeout", time.Minute, "how long --until-caught-up waits")
	return cmd
}

func runStatus(cmd *cobra.Command, _ []string) error {
	base, err := adminURL(cmd)
	if err != nil {
		return err
	}
	asJSON, _ := cmd.Flags().GetBool("json")
	wait, _ := cmd.Flags().GetBool("until-caught-up")
	timeout, _ := cmd.Flags().GetDuration("timeout")
	if wait {
		return waitCaughtUp(cmd, base, timeout, asJSON)
	}
	body, status, err := askStatus(cmd.Context(), base+"/api/status")
	if err != nil {
		return err
	}
	return printStatus(cmd.OutOrStdout(), body, status, asJSON)
}

// adminURL returns where the instance's admin listener is: --admin, else the settings'.
func adminURL(cmd *cobra.Command) (string, error) {
	address, _ := cmd.Flags().GetString("admin")
	if address == "" {
		settings, err := loadConfig(cmd)
		if err != nil && configFile(cmd) != "" {
			return "", err
		}
		// Without a file the settings needn't be complete enough to run an instance: the default address will do.
		if address = settings.Admin.Listen; address == "" {
			return "", errors.New("admin.listen is empty: the instance can't be asked")
		}
	}
	if strings.Contains(address, "://") {
		return strings.TrimRight(address, "/"), nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", fmt.Errorf("--admin: want host:port or a URL, got %q", address)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port), nil
}

// waitCaughtUp asks until the answer is "caught up", judged by a look at the source that began after the question.
func waitCaughtUp(cmd *cobra.Command, base string, timeout time.Duration, asJSON bool) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
	defer cancel()
	var (
		body   []byte
		status instanceStatus
		why    error
	)
	for {
		answer, s, err := askStatus(ctx, base+"/api/status?fresh=1")
		switch {
		case err == nil:
			body, status, why = answer, s, s.caughtUp()
		case ctx.Err() == nil || why == nil:
			why = err
		}
		if why == nil {
			return printStatus(cmd.OutOrStdout(), body, status, asJSON)
		}
		select {
		case <-ctx.Done():
			printLagging(cmd.OutOrStdout(), body, status, asJSON)
			return fmt.Errorf("not caught up within %v: %w", timeout, why)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func askStatus(ctx context.Context, url string) ([]byte, instanceStatus, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, instanceStatus{}, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, instanceStatus{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, instanceStatus{}, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, instanceStatus{}, fmt.Errorf("%s: %s: %s", url, resp.Status, strings.TrimSpace(string(body)))
	}
	var status instanceStatus
	if err := json.Unmarshal(body, &status); err != nil {
		return nil, instanceStatus{}, fmt.Errorf("%s: %w", url, err)
	}
	return body, status, nil
}

func printStatus(w io.Writer, body []byte, status instanceStatus, asJSON bool) error {
	if asJSON {
		_, err := w.Write(body)
		return err
	}
	ready := "ready"
	if !status.Ready {
		ready = "not ready: " + status.NotReady
	}
	fmt.Fprintf(w, "%s (%s), %s, %s\n", status.Name, strings.Join(status.Roles, ", "), status.Version, ready)
	if status.MirrorError != "" {
		fmt.Fprintf(w, "the mirror ended: %s\n", status.MirrorError)
	}
	if status.Mirror == nil {
		return nil
	}
	behind := "caught up"
	if !status.Mirror.CaughtUp {
		behind = "not caught up"
	}
	fmt.Fprintf(w, "group %s, source cluster %s, mirror cluster %s, %s\n\n", status.Mirror.Group, status.Mirror.SourceID, status.Mirror.MirrorID, behind)
	for _, topic := range status.Mirror.Topics {
		for _, hazard := range topic.Hazards {
			fmt.Fprintf(w, "mirror topic of %s: %s\n", topic.Topic, hazard)
		}
	}
	return printStreams(w, status.Mirror.Streams)
}

// printLagging prints what keeps the mirror from being caught up.
func printLagging(w io.Writer, body []byte, status instanceStatus, asJSON bool) {
	if asJSON {
		_, _ = w.Write(body) // the exit code tells too
		return
	}
	if status.Mirror == nil {
		return
	}
	lagging := slices.DeleteFunc(slices.Clone(status.Mirror.Streams), func(s forwarder.StreamStatus) bool { return s.LagRecords == 0 && s.Reason == "" })
	_ = printStreams(w, lagging)
}

func printStreams(w io.Writer, streams []forwarder.StreamStatus) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "TOPIC\tPARTITION\tSTATE\tLAG\tSOURCE END\tMIRRORED TO\tMIRROR OFFSET\tLOST\tREASON")
	for _, s := range streams {
		partition := fmt.Sprint(s.Partition)
		if s.MirrorPartition != nil {
			partition += fmt.Sprint(" > ", *s.MirrorPartition)
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", s.Topic, partition, s.State, known(s.LagRecords), known(s.SourceEnd),
			known(s.Next), known(s.MirrorOffset), s.LostRecords, s.Reason)
	}
	return table.Flush()
}

// known shows -1 as a question mark.
func known(n int64) string {
	if n < 0 {
		return "?"
	}
	return fmt.Sprint(n)
}
