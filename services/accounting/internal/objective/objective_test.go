package objective

import (
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func fast() Objective {
	return Objective{Kind: Pool, Owner: "ns/chat", Name: "fast", Indicator: TTFT, Threshold: 2 * time.Second, Target: .99, Window: 30 * 24 * time.Hour}
}

func event(change func(*Event)) *Event {
	e := &Event{Ended: noon, Pool: "ns/chat", Model: "m", Tenants: []string{"ns/a", "ns/org"}, QoS: "Interactive", TTFT: 1, ITL: .02, TPOT: .02, E2E: 5}
	if change != nil {
		change(e)
	}
	return e
}

func TestJudge(t *testing.T) {
	pool, tenant, available := fast(), fast(), fast()
	tenant.Kind, tenant.Owner = Tenant, "ns/org"
	available.Indicator, available.Threshold = Availability, 0
	e2e := fast()
	e2e.Indicator = EndToEnd
	itl := fast()
	itl.Indicator = ITL
	narrow := fast()
	narrow.Models, narrow.Tenants, narrow.QoS = []string{"m"}, []string{"ns/org"}, []string{"Batch"}
	for _, c := range []struct {
		name         string
		o            Objective
		change       func(*Event)
		counts, good bool
	}{
		{"kept", pool, nil, true, true},
		{"at the threshold", pool, func(e *Event) { e.TTFT = 2 }, true, true},
		{"missed", pool, func(e *Event) { e.TTFT = 2.001 }, true, false},
		{"another pool", pool, func(e *Event) { e.Pool = "ns/other" }, false, false},
		{"own quota", pool, func(e *Event) { e.Outcome = Quota }, false, false},
		{"client's fault", available, func(e *Event) { e.Outcome = Refused }, false, false},
		{"overload", pool, func(e *Event) { e.Outcome, e.TTFT = Overload, -1 }, true, false},
		{"overload is not available", available, func(e *Event) { e.Outcome = Overload }, true, false},
		{"failed", available, func(e *Event) { e.Outcome = Failed }, true, false},
		{"answered", available, nil, true, true},
		{"left", available, func(e *Event) { e.Outcome = Canceled }, false, false},
		{"left after the first token", pool, func(e *Event) { e.Outcome = Canceled }, true, true},
		{"left before the end", e2e, func(e *Event) { e.Outcome = Canceled }, false, false},
		{"whole answer has no TTFT", pool, func(e *Event) { e.TTFT = -1 }, false, false},
		{"one token has no ITL", itl, func(e *Event) { e.ITL = -1 }, false, false},
		{"tenant below", tenant, nil, true, true},
		{"another tenant", tenant, func(e *Event) { e.Tenants = []string{"ns/b"} }, false, false},
		{"another class", narrow, nil, false, false},
		{"all of the match", narrow, func(e *Event) { e.QoS = "Batch" }, true, true},
		{"another model", narrow, func(e *Event) { e.QoS, e.Model = "Batch", "n" }, false, false},
	} {
		if counts, good := c.o.Judge(event(c.change)); counts != c.counts || good != c.good {
			t.Errorf("%s: counts %v, good %v", c.name, counts, good)
		}
	}
}

func TestAlerts(t *testing.T) {
	for _, c := range []struct {
		name  string
		load  func(add func(ago time.Duration, n int, bad int))
		alert Alert
		left  float64 // NaN: not checked
	}{
		{"nothing", func(func(time.Duration, int, int)) {}, TooFew, math.NaN()},
		{"all good", func(add func(time.Duration, int, int)) { add(time.Minute, 5000, 0) }, None, 1},
		{"one failure of a small tenant", func(add func(time.Duration, int, int)) { add(time.Minute, 5, 1) }, TooFew, -19},
		{"on fire", func(add func(time.Duration, int, int)) { add(time.Minute, 1000, 300) }, Page, -29},
		{"was on fire, is not", func(add func(time.Duration, int, int)) { add(50*time.Minute, 1000, 300); add(time.Minute, 10, 0) }, Ticket, math.NaN()},
		{"was on fire yesterday", func(add func(time.Duration, int, int)) { add(20*time.Hour, 1000, 300); add(time.Minute, 1000, 0) }, None, math.NaN()},
		{"smoulders", func(add func(time.Duration, int, int)) {
			for h := range 72 {
				add(time.Duration(h)*time.Hour+time.Minute, 1000, 15)
			}
		}, Ticket, -.5},
		{"within the budget", func(add func(time.Duration, int, int)) {
			for h := range 72 {
				add(time.Duration(h)*time.Hour+time.Minute, 1000, 5)
			}
		}, None, .5},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := NewBoard()
			if fresh := b.Set([]Objective{fast()}); len(fresh) != 1 {
				t.Fatalf("%d are new", len(fresh))
			}
			c.load(func(ago time.Duration, n, bad int) {
				for i := range n {
					b.Count(event(func(e *Event) {
						e.Ended = noon.Add(-ago)
						if i < bad {
							e.TTFT = 9
						}
					}), nil)
				}
			})
			s := b.States(noon)[0]
			if s.Alert != c.alert || !math.IsNaN(c.left) && math.Abs(s.BudgetLeft-c.left) > 1e-9 {
				t.Errorf("alert %d, budget left %v, want %d, %v: %+v", s.Alert, s.BudgetLeft, c.alert, c.left, s.Burns)
			}
			if len(s.Burns) != 4 {
				t.Errorf("%d burns", len(s.Burns))
			}
		})
	}
}

// What is older than the window goes, and what was counted stays when other
// objectives change.
func TestBoardMoves(t *testing.T) {
	b := NewBoard()
	day := fast()
	day.Name, day.Window = "day", 24*time.Hour
	b.Set([]Objective{day})
	b.Count(event(nil), nil)
	if fresh := b.Set([]Objective{fast(), day}); len(fresh) != 1 || fresh[0].Name != "fast" {
		t.Errorf("new: %v", fresh)
	}
	if got := b.States(noon); got[0].Total != 0 || got[1].Total != 1 {
		t.Errorf("counted %d and %d", got[0].Total, got[1].Total)
	}
	past := fast()
	b.Count(event(nil), map[string]bool{past.ID(): true})
	if got := b.States(noon); got[0].Total != 1 || got[1].Total != 1 {
		t.Errorf("with its past: %d and %d", got[0].Total, got[1].Total)
	}
	if got := b.States(noon.Add(25 * time.Hour)); got[0].Total != 1 || got[1].Total != 0 {
		t.Errorf("a day later: %d and %d", got[0].Total, got[1].Total)
	}
	day.Threshold++
	if fresh := b.Set([]Objective{day}); len(fresh) != 1 {
		t.Error("a changed objective keeps what was counted by the old one")
	}
}

func TestPoliciesShrink(t *testing.T) {
	for _, c := range []struct {
		window time.Duration
		long   time.Duration
		n      int
	}{{30 * 24 * time.Hour, time.Hour, 4}, {90 * 24 * time.Hour, time.Hour, 4}, {7 * 24 * time.Hour, 14 * time.Minute, 4}, {time.Minute, minWindow, 1}} {
		got := Policies(c.window)
		if got[0].Long != c.long || len(got) != c.n {
			t.Errorf("%v: %+v", c.window, got)
		}
	}
	if got := MinEvents(.999, 14.4); got != 209 {
		t.Errorf("events for three bad ones: %d", got)
	}
}

// Prometheus' own checker takes the rules, and its evaluator alerts by them when it
// should.
func TestRulesInPrometheus(t *testing.T) {
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Fatal("promtool is missing: run scripts/deps.sh")
	}
	odd := fast()
	odd.Owner, odd.Window, odd.Target = "ns/with \"quotes\" and \\", 7*24*time.Hour, 1
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	rules := write("rules.yaml", Rules([]Objective{fast(), odd}))
	for _, text := range []string{"", Rules(nil)} {
		path := rules
		if text != "" {
			path = write("none.yaml", text)
		}
		if out, err := exec.Command(tool, "check", "rules", path).CombinedOutput(); err != nil { //nolint:gosec // its own files
			t.Fatalf("%v: %s", err, out)
		}
	}
	test := write("test.yaml", strings.ReplaceAll(`rule_files: [RULES]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'kinference_objective_requests_total{objective="InferencePool/ns/chat/fast",result="good"}'
        values: '0+100x120 12000+60x60'
      - series: 'kinference_objective_requests_total{objective="InferencePool/ns/chat/fast",result="bad"}'
        values: '0x120 0+40x60'
    alert_rule_test:
      - eval_time: 2h
        alertname: KinferenceObjectiveBurnsFast
      - eval_time: 3h
        alertname: KinferenceObjectiveBurnsFast
        exp_alerts:
          - exp_labels: {severity: page, window: 1h, objective: InferencePool/ns/chat/fast}
            exp_annotations: {summary: "SUMMARY 14.4 times too fast over 1h."}
          - exp_labels: {severity: page, window: 6h, objective: InferencePool/ns/chat/fast}
            exp_annotations: {summary: "SUMMARY 6 times too fast over 6h."}
`, "RULES", rules))
	raw, _ := os.ReadFile(test)
	summary := "InferencePool ns/chat misses its objective fast (TTFT within 2s for 99 % of requests over 30d): the error budget burns more than"
	write("test.yaml", strings.ReplaceAll(string(raw), "SUMMARY", summary))
	if out, err := exec.Command(tool, "test", "rules", test).CombinedOutput(); err != nil { //nolint:gosec // its own files
		t.Errorf("%v: %s", err, out)
	}
}
