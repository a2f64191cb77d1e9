package chaos

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// row is what one fault did.
type row struct {
	Target  string  `json:"target"`
	Fault   string  `json:"fault"`
	Hold    float64 `json:"hold_s"` // how long the process was away, as asked for
	Away    float64 `json:"away_s"` // until it was ready again
	Rate    int     `json:"rate"`   // requests a second
	Network string  `json:"network"`

	Requests int            `json:"requests"`
	Failed   int            `json:"failed"`
	Kinds    map[string]int `json:"kinds"`  // of failures
	Denied   int            `json:"denied"` // by limits that could not be checked
	Limited  int            `json:"limited"`
	// From and To are when the first request that failed or was denied began and
	// the last one ended, in seconds since the fault; 0 and 0: none.
	From float64 `json:"from_s"`
	To   float64 `json:"to_s"`
	// Slowest answer, in seconds.
	Slowest float64 `json:"slowest_s"`
	Calm    bool    `json:"calm"` // no failure any more within a minute

	Ledger book   `json:"ledger"`
	Index  index  `json:"index"`
	Limits limits `json:"limits"`
	Out    int64  `json:"out"` // requests at the provider
	Leaked int64  `json:"leaked"`
}

// count sums up how requests ended, relative to the time of the fault.
func (r *row) count(results []result, at time.Time) {
	first, last := time.Time{}, time.Time{}
	for _, res := range results {
		r.Slowest = max(r.Slowest, res.end.Sub(res.began).Seconds())
		switch {
		case res.kind == "limited":
			r.Limited++
			continue
		case res.kind == "denied":
			r.Denied++
		case res.failed():
			r.Failed++
			r.Kinds[res.kind]++
		default:
			continue
		}
		if first.IsZero() || res.began.Before(first) {
			first = res.began
		}
		if res.end.After(last) {
			last = res.end
		}
	}
	if !first.IsZero() {
		r.From, r.To = first.Sub(at).Seconds(), last.Sub(at).Seconds()
	}
}

// check fails the test for what no fault may do.
func (r *row) check(t *testing.T, f fault) {
	t.Helper()
	if !r.Calm {
		t.Errorf("%s: requests still fail a minute later: %v", f, r.Kinds)
	}
	if r.Ledger.Lost+r.Ledger.Doubled+r.Ledger.Different > 0 {
		t.Errorf("%s: the ledger is wrong: %+v", f, r.Ledger)
	}
	if r.Leaked > 0 || r.Out == 0 {
		t.Errorf("%s: %d prompts with personal data of %d requests left", f, r.Leaked, r.Out)
	}
	if r.Limits.Granted > r.Limits.Bound || r.Limits.Granted == 0 {
		t.Errorf("%s: granted %d tokens, the bound is %d", f, r.Limits.Granted, r.Limits.Bound)
	}
	// What a worker had not sent and an ingress had in flight is not counted, Redis copies
	// its writes later, and shares expire soon here, so a machine that stands still for a
	// second makes a difference, too.
	if *full && r.Limits.Counted != r.Limits.Used && f.target != "Redis primary" && f.target != "worker" && !(f.target == "ingress" && f.how == killed) {
		t.Errorf("%s: %d tokens were used, %d are counted", f, r.Limits.Used, r.Limits.Counted)
	}
	if r.Index.Missing+r.Index.False > 0 {
		t.Errorf("%s: the index is wrong: %+v", f, r.Index)
	}
	if f.how == restarted && f.target != "NATS leader" && f.target != "NATS follower" && f.target != "Redis primary" && r.Failed > 0 {
		t.Errorf("%s: %d requests failed: %v", f, r.Failed, r.Kinds)
	}
}

func (r row) String() string {
	return fmt.Sprintf("%s %s: %d requests, failed %s, denied %d, outage %s; slowest %.2f s; ledger %+v; index %+v; limits %+v; out %d, leaked %d",
		r.Target, r.Fault, r.Requests, r.kinds(), r.Denied, r.outage(), r.Slowest, r.Ledger, r.Index, r.Limits, r.Out, r.Leaked)
}

func (r row) kinds() string {
	if r.Failed == 0 {
		return "0"
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(r.Kinds)) {
		parts = append(parts, fmt.Sprintf("%d %s", r.Kinds[k], k))
	}
	return strings.Join(parts, ", ")
}

func (r row) outage() string {
	if r.Failed+r.Denied == 0 {
		return "none"
	}
	return fmt.Sprintf("%.1f–%.1f s", max(0, r.From), r.To)
}

// report writes the rows and the table, where asked for.
func (c *cluster) report(rows []row) {
	c.t.Helper()
	if *outDir != "" {
		raw, err := json.MarshalIndent(rows, "", "  ")
		if err == nil {
			err = os.MkdirAll(*outDir, 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(*outDir, "chaos.json"), append(raw, '\n'), 0o644)
		}
		if err != nil {
			c.t.Error(err)
		}
	}
	if *docs == "" {
		return
	}
	const begin, end = "<!-- begin of the table -->\n", "<!-- end of the table -->\n"
	path := filepath.Join(*docs, "chaos.md")
	raw, err := os.ReadFile(path)
	if err != nil {
		c.t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(raw), begin)
	_, foot, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		c.t.Fatal(path + " has no place for the table")
	}
	if err := os.WriteFile(path, []byte(head+begin+table(rows)+end+foot), 0o644); err != nil {
		c.t.Error(err)
	}
}

func table(rows []row) string {
	var b strings.Builder
	if len(rows) > 0 {
		fmt.Fprintf(&b, "\n%d requests a second; partitions by %s.\n\n", rows[0].Rate, rows[0].Network)
	}
	b.WriteString("| what | fault | requests | failed | denied | from–to | slowest | ledger: lost, doubled, of | index: missing, false, of; right after | daily budget: counted, used | tight limit: granted, bound | with personal data, of requests out |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range rows {
		fault := r.Fault
		if r.Hold > 0 {
			fault += fmt.Sprintf(" %.0f s", r.Hold)
		}
		fmt.Fprintf(&b, "| %s | %s | %d | %s | %d | %s | %.1f s | %d, %d, %d | %d, %d, %d; %.1f s | %d, %d | %d, %d | %d, %d |\n", r.Target, fault, r.Requests, r.kinds(), r.Denied, r.outage(), r.Slowest,
			r.Ledger.Lost, r.Ledger.Doubled, r.Ledger.Requests, r.Index.Missing, r.Index.False, r.Index.Blocks, r.Index.After,
			r.Limits.Counted, r.Limits.Used, r.Limits.Granted, r.Limits.Bound, r.Leaked, r.Out)
	}
	b.WriteString("\n")
	return b.String()
}
