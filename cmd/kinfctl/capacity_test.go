package main

import (
	"bytes"
	"context"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func (l *ledger) Objectives(_ context.Context, r *accountingv1.ObjectivesRequest) (*accountingv1.ObjectivesResponse, error) {
	out := &accountingv1.ObjectivesResponse{Objectives: []*accountingv1.ObjectiveState{
		{
			Objective: &routerv1.Objective{Kind: "InferencePool", Owner: "team-a/chat", Name: "fast", Indicator: "TTFT", Threshold: durationpb.New(2 * time.Second), Target: "99.9", Window: durationpb.New(30 * 24 * time.Hour)},
			Total:     200_000, Good: 199_899, Attainment: proto.Float64(.999495), BudgetLeft: proto.Float64(.495), Alert: accountingv1.Alert_ALERT_PAGE,
			Burns: []*accountingv1.Burn{{Long: durationpb.New(time.Hour), Short: durationpb.New(5 * time.Minute), LongRate: 15.25, ShortRate: 20, Firing: true}},
		},
		{
			Objective: &routerv1.Objective{Kind: "InferenceTenant", Owner: "team-a/small", Name: "up", Indicator: "Availability", Target: "99", Window: durationpb.New(24 * time.Hour)},
			Alert:     accountingv1.Alert_ALERT_TOO_FEW,
		},
	}}
	if r.GetRules() {
		out.Rules = "groups: []\n"
	}
	return out, nil
}

func (l *ledger) Capacity(_ context.Context, r *accountingv1.CapacityRequest) (*accountingv1.CapacityResponse, error) {
	s := &accountingv1.SetCapacity{
		WorkerSet: "team-a/l40s", Workers: uint32(2 + r.GetMoreWorkers()), Rate: 1, Knee: 2.61, WorkersNeeded: 1, Bound: "memory", WallSeconds: 7200, IdleSeconds: 1800, OtherSeconds: 7.2,
		TtftObserved: durationpb.New(800 * time.Millisecond), TtftPredicted: durationpb.New(900 * time.Millisecond),
		Speed: &accountingv1.LearnedSpeed{Step: .0385, Launch: .0017, Token: 3e-4, Attention: 1.62e-9, Sequence: 4.5e-4, Context: 1e-7, Batch: 2048, KvRequest: .02, KvToken: 7.5e-6, Prefixes: 2},
		Tenants: []*accountingv1.TenantShare{
			{Tenant: "team-a/agents", Requests: 2700, PrefillSeconds: 1500, DecodeSeconds: 2500, UncachedTokens: 900, CachedTokens: 5000, OutputTokens: 150, Shares: []float64{.7, .8, .75}},
			{Tenant: "-", Requests: 900, PrefillSeconds: 392.8, DecodeSeconds: 1000, UncachedTokens: 2500, OutputTokens: 100, Shares: []float64{.3, .2, .25}},
		},
	}
	for i := 1; i <= 40; i++ {
		p := &accountingv1.CapacityPoint{Rate: 3.2 * float64(i) / 40}
		if p.GetRate() < 2.9 {
			p.TtftP90 = durationpb.New(time.Duration(float64(time.Second) / (2.95 - p.GetRate())))
		}
		s.Curve = append(s.Curve, p)
	}
	return &accountingv1.CapacityResponse{Sets: []*accountingv1.SetCapacity{s}}, nil
}

func TestObjectives(t *testing.T) {
	url := serveLedger(t, &ledger{})
	out, errs, code := kinfctl(t, "objectives", "--accounting", url)
	const want = `OWNER                OBJECTIVE  WHAT          TARGET         ATTAINED  REQUESTS  BUDGET LEFT  BURN           STATE
Pool team-a/chat     fast       TTFT ≤ 2s     99.9 % of 30d  99.949 %  200000    49 %         1h 15.2/20     page
Tenant team-a/small  up         Availability  99 % of 24h    -         0         -            too few
`
	if strings.Join(strings.Fields(out), " ") != strings.Join(strings.Fields(want), " ") || code != 0 {
		t.Errorf("got %d, %s\n%s", code, errs, out)
	}
	if out, _, code := kinfctl(t, "objectives", "rules", "--accounting", url); out != "groups: []\n" || code != 0 {
		t.Errorf("rules: %d\n%s", code, out)
	}
	if _, errs, code := kinfctl(t, "objectives", "--accounting", "http://127.0.0.1:1"); code != 1 || !strings.Contains(errs, "ask accounting") {
		t.Errorf("away: %d, %s", code, errs)
	}
}

func TestCapacity(t *testing.T) {
	url := serveLedger(t, &ledger{})
	svg, picture := filepath.Join(t.TempDir(), "curve.svg"), filepath.Join(t.TempDir(), "curve.png")
	out, errs, code := kinfctl(t, "capacity", "--accounting", url, "--chart", "--svg", svg, "--png", picture)
	for _, want := range []string{"team-a/l40s: 2 workers, bound by memory", "2.61 requests/s", "+161 %", "idle 25.0 %, unexplained 0.1 %", "0.80 s observed, 0.90 s predicted",
		"team-a/agents", "55.6 %", "TTFT p90 by load", "fits", "Part of the busy time", "3 of 3"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if code != 0 {
		t.Errorf("got %d, %s", code, errs)
	}
	if raw, err := os.ReadFile(svg); err != nil || !bytes.HasPrefix(bytes.TrimSpace(raw), []byte("<svg")) {
		t.Errorf("picture: %v, %.40s", err, raw)
	}
	if raw, err := os.ReadFile(picture); err != nil {
		t.Error(err)
	} else if c, err := png.DecodeConfig(bytes.NewReader(raw)); err != nil || c.Width < 500 || c.Height < 300 {
		t.Errorf("picture: %v, %v", err, c)
	}
	// What if: one worker less still bears it, and a tighter wish is not kept.
	out, errs, code = kinfctl(t, "capacity", "--accounting", url, "--workers=-1", "--simulate", "--ttft", "4s")
	if code != 0 || !strings.Contains(out, "on 1 workers") || strings.Contains(out, "too slow") {
		t.Errorf("one worker: %d, %s\n%s", code, errs, out)
	}
	out, _, _ = kinfctl(t, "capacity", "--accounting", url, "--simulate", "--ttft", "100ms")
	if !strings.Contains(out, "too slow") {
		t.Errorf("a tenth of a second is kept:\n%s", out)
	}
	for _, wrong := range [][]string{{"--scale", "a=b"}, {"--scale", "a=-1"}, {"--from", "never"}} {
		if _, _, code := kinfctl(t, append([]string{"capacity", "--accounting", url}, wrong...)...); code != 2 {
			t.Errorf("%v: exit code %d", wrong, code)
		}
	}
}
