package evaluate_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/window"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/router/internal/evaluate"
	"github.com/kinference/kinference/services/router/internal/fleet"
)

// burstToCloud is the document's policy with a worker and a provider to burst to.
const burstToCloud = `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: glm, namespace: ns }
spec: { models: [ { name: glm-5.3 } ], endpoints: [ { name: w, address: "10.0.0.1:8000" } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: bedrock, namespace: ns }
spec: { schema: OpenAICompatible, endpoint: "https://bedrock.example.com/v1", models: [ { name: glm-5.3 } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: burst, namespace: ns }
spec:
  rules:
  - name: burst-to-cloud
    route:
      exclude: [ { name: drop-overloaded-workers, drop: { backend: { type: Local }, queuedPrompts: { greaterThan: 2%s } } } ]
      select: [ { type: Local, minimize: PredictedTTFT }, { type: Provider, order: [ bedrock ] } ]
`

// bench is a router's view of one engine in virtual time.
type bench struct {
	model   *plan.Model
	table   *fleet.Table
	window  *window.Window
	now     time.Time
	running []time.Time // when each ends
	waiting []time.Duration
	rand    *rand.Rand
	slots   int           // requests that run at once
	service time.Duration // mean time of one
}

func newBench(t *testing.T, slots int, service time.Duration, until string) *bench {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), fmt.Appendf(nil, burstToCloud, until), 0o644); err != nil {
		t.Fatal(err)
	}
	c, problems := resources.Load(dir)
	if c == nil {
		t.Fatal(problems)
	}
	p := plan.New(c)
	b := &bench{model: p.Models["glm-5.3"], table: fleet.New(nil), window: window.New(30*time.Second, 5*time.Second), now: time.Unix(1_800_000_000, 0), rand: rand.New(rand.NewPCG(1, 2)), slots: slots, service: service}
	b.table.Keep(p.Longest, p.Thresholds)
	b.table.Watch([]fleet.Endpoint{{UID: "ns.glm.w"}})
	return b
}

// step runs the engine to a time, first come first served.
func (b *bench) step(to time.Time) {
	b.now = to
	kept := b.running[:0]
	for _, end := range b.running {
		if end.After(to) {
			kept = append(kept, end)
		}
	}
	b.running = kept
	for len(b.running) < b.slots && len(b.waiting) > 0 {
		b.running = append(b.running, to.Add(b.waiting[0]))
		b.waiting = b.waiting[1:]
	}
}

func (b *bench) take() {
	b.waiting = append(b.waiting, time.Duration(b.rand.ExpFloat64()*float64(b.service)))
	b.step(b.now)
}

func (b *bench) sample() {
	l := window.Load{Running: float64(len(b.running)), Waiting: float64(len(b.waiting))}
	b.window.Add(b.now, l)
	mean := b.window.Mean(30 * time.Second)
	b.table.Update(b.now, &kvtrackerv1.WatchWorkersResponse{Synced: true, Workers: []*kvtrackerv1.WorkerState{{
		Worker: "ns.glm.w/0", WorkerSet: "ns/glm", Ready: true, SampleAge: durationpb.New(0),
		Load: &kvtrackerv1.Load{Running: l.Running, Waiting: l.Waiting}, LoadMean_30S: &kvtrackerv1.Load{Running: mean.Running, Waiting: mean.Waiting},
	}}})
}

// bursts decides about one request.
func (b *bench) bursts(t *testing.T) bool {
	t.Helper()
	f := &policy.Fleet{}
	endpoints := evaluate.Endpoints(b.now, evaluate.Request{Model: b.model, Tokens: func(string) int { return 100 }}, b.table, free{})
	for i := range endpoints {
		f.Endpoints = append(f.Endpoints, policy.Endpoint{Backend: endpoints[i].Backend, ID: endpoints[i].ID, Unfit: endpoints[i].Dropped, Load: endpoints[i].Load()})
	}
	d := b.model.Policies.Evaluate(&policy.Request{Model: "glm-5.3"}, f)
	if d.Action != policy.Route {
		t.Fatalf("%v by %s", d.Action, d.Rule)
	}
	return endpoints[d.Order[0]].Provider != nil
}

type free struct{}

func (free) Full(time.Time, *resources.Provider) string { return "" }

// hover sends requests for an hour, as a share of what the engine can do. It
// returns how often the decision changed, and the share of requests that burst.
func (b *bench) hover(t *testing.T, load float64) (switches int, share float64) {
	t.Helper()
	const tick = 10 * time.Millisecond
	perTick := load * float64(b.slots) * tick.Seconds() / b.service.Seconds()
	end, before, n, away := b.now.Add(time.Hour), false, 0, 0
	for i := 0; b.now.Before(end); i++ {
		b.step(b.now.Add(tick))
		if i%25 == 0 {
			b.sample()
		}
		if b.rand.Float64() >= perTick {
			continue
		}
		burst := b.bursts(t)
		if n > 0 && burst != before {
			switches++
		}
		n++
		if before = burst; burst {
			away++
		} else {
			b.take()
		}
	}
	return switches, float64(away) / float64(n)
}

// While the load stays near the threshold requests do not change sides all the
// time: the mean of 30 s moves slowly, and a burst ends only when it has come down
// to four fifths of the threshold.
func TestHysteresis(t *testing.T) {
	for _, c := range []struct {
		slots   int
		service time.Duration
		load    float64
	}{{8, time.Second, 0.95}, {8, 4 * time.Second, 1.25}, {32, 4 * time.Second, 0.95}, {2, 2 * time.Second, 1}} {
		t.Run(fmt.Sprintf("%d at once, %v each, load %v", c.slots, c.service, c.load), func(t *testing.T) {
			without, shareWithout := newBench(t, c.slots, c.service, ", until: 2").hover(t, c.load)
			with, share := newBench(t, c.slots, c.service, "").hover(t, c.load)
			t.Logf("in an hour %d changes of side (%.0f %% burst), without hysteresis %d (%.0f %%)", with, 100*share, without, 100*shareWithout)
			if with > 240 || with >= without || with == 0 {
				t.Errorf("%d changes of side in an hour, without hysteresis %d: want at most one in 15 s, and fewer", with, without)
			}
		})
	}
}

// A burst begins above the mean of 2 and ends at 1.6, not before.
func TestBurstBeginsAndEnds(t *testing.T) {
	b := newBench(t, 8, time.Second, "")
	at := func(waiting float64) bool {
		b.now = b.now.Add(time.Second)
		b.table.Update(b.now, &kvtrackerv1.WatchWorkersResponse{Synced: true, Workers: []*kvtrackerv1.WorkerState{{
			Worker: "ns.glm.w/0", WorkerSet: "ns/glm", Ready: true, SampleAge: durationpb.New(0),
			Load: &kvtrackerv1.Load{}, LoadMean_30S: &kvtrackerv1.Load{Waiting: waiting},
		}}})
		return b.bursts(t)
	}
	for _, s := range []struct {
		mean float64
		want bool
	}{{0, false}, {1.9, false}, {2, false}, {2.01, true}, {1.9, true}, {1.61, true}, {1.6, false}, {1.9, false}, {2, false}, {3, true}, {0, false}} {
		if got := at(s.mean); got != s.want {
			t.Errorf("at %v: burst %v", s.mean, got)
		}
	}
}
