package objective

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Metric is the counter that the rules are made of: requests by objective (its ID)
// and result, good or bad. It is counted request by request at the exact threshold,
// so that no bucket of a histogram needs to have it.
const Metric = "kinference_objective_requests_total"

// Rules makes recording and alert rules for Prometheus, as YAML.
func Rules(list []Objective) string {
	var b strings.Builder
	b.WriteString("# Made from the objectives of pools and tenants by kinfctl objectives rules.\ngroups:\n")
	if len(list) == 0 {
		return strings.Replace(b.String(), "groups:\n", "groups: []\n", 1)
	}
	var windows []time.Duration
	for i := range list {
		windows = append(windows, list[i].Window)
		for _, p := range Policies(list[i].Window) {
			windows = append(windows, p.Long, p.Short)
		}
	}
	slices.Sort(windows)
	windows = slices.Compact(windows)
	b.WriteString("  - name: kinference-objectives\n    rules:\n")
	for _, w := range windows {
		d := duration(w)
		for _, r := range []struct{ record, selector string }{{"total", ""}, {"bad", `{result="bad"}`}} {
			fmt.Fprintf(&b, "      - record: kinference:objective_%s:increase%s\n        expr: sum by (objective) (increase(%s%s[%s]))\n", r.record, d, Metric, r.selector, d)
		}
		// Without any bad request there is no series of them, and the share is 0.
		fmt.Fprintf(&b, "      - record: kinference:objective_error:ratio%s\n        expr: (kinference:objective_bad:increase%s or 0 * kinference:objective_total:increase%s) / (kinference:objective_total:increase%s > 0)\n", d, d, d, d)
	}
	for i := range list {
		o := &list[i]
		fmt.Fprintf(&b, "  - name: %s\n    rules:\n", quote("kinference-objective "+o.ID()))
		sel := `{objective=` + strconv.Quote(o.ID()) + `}`
		fmt.Fprintf(&b, "      - record: kinference:objective:budget\n        labels: {objective: %s}\n        expr: vector(%s)\n", quote(o.ID()), number(1-o.Target))
		for _, p := range Policies(o.Window) {
			name, severity := "KinferenceObjectiveAtRisk", "ticket"
			if p.Alert == Page {
				name, severity = "KinferenceObjectiveBurnsFast", "page"
			}
			long, short := duration(p.Long), duration(p.Short)
			limit := number(max((1-o.Target)*p.Factor, 0))
			fmt.Fprintf(&b, "      - alert: %s\n        expr: >-\n", name)
			fmt.Fprintf(&b, "          kinference:objective_error:ratio%s%s > %s\n", long, sel, limit)
			fmt.Fprintf(&b, "          and kinference:objective_error:ratio%s%s > %s\n", short, sel, limit)
			fmt.Fprintf(&b, "          and kinference:objective_total:increase%s%s >= %d\n", long, sel, MinEvents(o.Target, p.Factor))
			fmt.Fprintf(&b, "        labels: {severity: %s, window: %s}\n", severity, quote(long))
			fmt.Fprintf(&b, "        annotations:\n          summary: %s\n", quote(o.summary(p)))
		}
	}
	return b.String()
}

// summary says what is wrong in one sentence.
func (o *Objective) summary(p Policy) string {
	what := o.Indicator
	if o.Threshold > 0 {
		what += " within " + o.Threshold.String()
	}
	return fmt.Sprintf("%s %s misses its objective %s (%s for %s %% of requests over %s): the error budget burns more than %s times too fast over %s.",
		o.Kind, o.Owner, o.Name, what, number(100*o.Target), duration(o.Window), number(p.Factor), duration(p.Long))
}

// duration is d as Prometheus writes it.
func duration(d time.Duration) string {
	for _, u := range []struct {
		name string
		of   time.Duration
	}{{"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}} {
		if d%u.of == 0 {
			return strconv.FormatInt(int64(d/u.of), 10) + u.name
		}
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 6, 64) }

// quote makes a YAML string; what Go escapes YAML does too.
func quote(s string) string { return strconv.Quote(s) }
