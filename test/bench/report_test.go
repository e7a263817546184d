package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// metric is one measured quantity of a run.
type metric struct {
	name  string
	value float64
}

// result collects what one peer did on one workload, round by round.
type result struct {
	Part     string               `json:"part"`
	Workload string               `json:"workload"`
	Peer     string               `json:"peer"`
	Metrics  []string             `json:"metrics"` // names, in the order of the table
	Rounds   map[string][]float64 `json:"rounds"`
}

// report is everything that was measured in one run. The first peer of a part and workload is what the others are compared to.
type report struct {
	Started time.Time `json:"started"`
	Cores   int       `json:"cores"`
	Load    string    `json:"load_average"` // before the run: other work on the machine spoils figures
	Results []*result `json:"results"`
}

func newReport() *report {
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		load = []byte("unknown")
	}
	return &report{Started: time.Now(), Cores: runtime.NumCPU(), Load: strings.TrimSpace(string(load))}
}

// add records one round.
func (r *report) add(part, workload, peer string, metrics ...metric) {
	i := slices.IndexFunc(r.Results, func(x *result) bool { return x.Part == part && x.Workload == workload && x.Peer == peer })
	if i < 0 {
		i = len(r.Results)
		r.Results = append(r.Results, &result{Part: part, Workload: workload, Peer: peer, Rounds: map[string][]float64{}})
	}
	for _, m := range metrics {
		x := r.Results[i]
		if _, ok := x.Rounds[m.name]; !ok {
			x.Metrics = append(x.Metrics, m.name)
		}
		x.Rounds[m.name] = append(x.Rounds[m.name], m.value)
	}
}

// write prints a table for each part and workload: the median of each metric, and its ratio to the first peer's in parentheses.
func (r *report) write(out io.Writer) {
	fmt.Fprintf(out, "%s, %d cores, load average before: %s\n", r.Started.Format(time.RFC3339), r.Cores, r.Load)
	fmt.Fprintln(out, "Medians of all rounds; in parentheses the ratio to the first line.")
	results := r.Results
	for len(results) > 0 {
		first := results[0]
		same := func(x *result) bool { return x.Part == first.Part && x.Workload == first.Workload }
		fmt.Fprintf(out, "\n%s, %s, %d rounds\n", first.Part, first.Workload, len(first.Rounds[first.Metrics[0]]))
		table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
		fmt.Fprintf(table, "peer\t%s\trounds: %s\n", strings.Join(first.Metrics, "\t"), first.Metrics[0])
		var rest []*result
		for _, x := range results {
			if same(x) {
				fmt.Fprintf(table, "%s\n", x.line(first))
			} else {
				rest = append(rest, x)
			}
		}
		table.Flush()
		results = rest
	}
}

// line is one peer's row, cells ended by tabs.
func (x *result) line(base *result) string {
	var b strings.Builder
	b.WriteString(x.Peer)
	for _, name := range base.Metrics {
		mine, theirs := median(x.Rounds[name]), median(base.Rounds[name])
		b.WriteString("\t" + figure(mine))
		if x != base && theirs != 0 {
			fmt.Fprintf(&b, " (%.2f)", mine/theirs)
		}
	}
	b.WriteByte('\t')
	for i, v := range x.Rounds[base.Metrics[0]] {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(figure(v))
	}
	return b.String()
}

// save writes the report as JSON.
func (r *report) save(t testing.TB, path string) {
	t.Helper()
	b, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(path, append(b, '\n'), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// figure prints three significant digits or so.
func figure(v float64) string {
	switch {
	case v >= 10_000:
		return fmt.Sprintf("%.0fk", v/1000)
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}

// median is the middle of three or more values; with an even number of them the mean of the two in the middle.
func median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// quantile is the smallest value that a share q of the values doesn't exceed; 0 without values.
func quantile(values []time.Duration, q float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}
