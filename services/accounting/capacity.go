package accounting

import (
	"cmp"
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/capacity"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

const (
	// maxCapacityEvents bounds the events that an answer of Capacity looks at: the
	// latest of a longer time.
	maxCapacityEvents = 200_000
	// interval is the length of the intervals that time is divided in, and stale the
	// longest time between two samples, in seconds.
	interval, stale = 15, 10
	// maxShares bounds the slices of time that shares are told for.
	maxShares = 60
	// curvePoints are the points of a curve.
	curvePoints = 40
	defaultTTFT = 2 * time.Second
)

// errEnough ends an export.
var errEnough = errors.New("enough")

// served are the requests of one worker set.
type served struct {
	requests     []gputime.Request
	ids, tenants []string      // of each request
	ttft         []float64     // of those that had one
	arrived      int           // in the span
	cost         *usagev1.Cost // of the last one
}

// Capacity implements the AccountingService.
func (v *server) Capacity(ctx context.Context, r *accountingv1.CapacityRequest) (*accountingv1.CapacityResponse, error) {
	f, err := filterOf(&accountingv1.Filter{From: r.GetFrom(), To: r.GetTo()})
	if err != nil {
		return nil, err
	}
	if f.To.IsZero() {
		f.To = time.Now()
	}
	if f.From.IsZero() {
		f.From = f.To.Add(-time.Hour)
	}
	limit := cmp.Or(r.GetTtft().AsDuration(), defaultTTFT)
	if limit < 0 || len(r.GetTenants()) > maxValues || len(r.GetWorkerSets()) > maxValues {
		return nil, invalid("ttft, tenants or worker_sets are out of range")
	}
	factors := map[string]float64{}
	for _, t := range r.GetTenants() {
		if x := t.GetFactor(); !(x >= 0) || x > 1e6 {
			return nil, invalid("factor %v of %.64q is none", x, t.GetTenant())
		}
		factors[t.GetTenant()] = t.GetFactor()
	}
	if f, err = v.latest(ctx, f); err != nil {
		return nil, err
	}
	from, to := float64(f.From.UnixMicro())/1e6, float64(f.To.UnixMicro())/1e6
	states := v.watched.between(from, to)
	requests, _, err := v.served(ctx, f)
	if err != nil {
		return nil, err
	}
	out := &accountingv1.CapacityResponse{}
	for _, set := range slices.Sorted(keysOf(states)) {
		if want := r.GetWorkerSets(); len(want) > 0 && !slices.Contains(want, set) {
			continue
		}
		if s := requests[set]; s != nil {
			out.Sets = append(out.Sets, capacityOf(set, v.prior(set), states[set], s, from, to, limit.Seconds(), int(r.GetMoreWorkers()), factors))
		}
	}
	if len(out.Sets) == 0 {
		return nil, rpc.Error(connect.CodeNotFound, "no worker was seen at work in this time: accounting remembers an hour and a half, and needs nats-url", 0)
	}
	return out, nil
}

func keysOf(m map[string]*seen) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

func (v *server) maxEvents() int { return cmp.Or(v.fewEvents, maxCapacityEvents) }

// latest shortens a time so that served can look at all that ended in it, and at what
// was running at its end.
func (v *server) latest(ctx context.Context, f ledger.Filter) (ledger.Filter, error) {
	since, err := v.ledger.Since(ctx, f.To, v.maxEvents()/4*3)
	if since.After(f.From) {
		f.From = since
	}
	return f, err
}

// served reads the requests of workers from the ledger; all is false if there were too
// many, of which the first to end are there.
func (v *server) served(ctx context.Context, f ledger.Filter) (out map[string]*served, all bool, err error) {
	out = map[string]*served{}
	n := 0
	arrivedFrom, to := f.From, f.To
	f.To = time.Time{} // what was running at the end has ended since, or is not known
	err = v.ledger.Export(ctx, f, func(page []*usagev1.Usage) error {
		for _, u := range page {
			if u.GetWorker() == "" || u.GetOverload() || u.GetReceived().AsTime().After(to) {
				continue
			}
			if n++; n > v.maxEvents() {
				return errEnough
			}
			s := out[u.GetWorkerSet()]
			if s == nil {
				s = &served{}
				out[u.GetWorkerSet()] = s
			}
			received := float64(u.GetReceived().AsTime().UnixMicro()) / 1e6
			t := u.GetTokens()
			request := gputime.Request{
				Worker: u.GetWorker(), Sent: received + max(given(u.Queue), 0), End: float64(u.GetEnded().AsTime().UnixMicro()) / 1e6,
				Uncached: int(t.GetInput()) - int(t.GetCachedInput()), Cached: int(t.GetCachedInput()), Output: int(t.GetOutput()),
			}
			if v := given(u.Ttft); v >= 0 {
				request.First = received + v
				s.ttft = append(s.ttft, v)
			} else if u.GetOutcome() == usagev1.Outcome_OUTCOME_OK {
				// An answer in one piece tells nothing of its first token: most of the time
				// was for what it generated.
				request.First = request.Sent + (request.End-request.Sent)/float64(max(request.Output, 1))
			}
			if u.GetReceived().AsTime().After(arrivedFrom) {
				s.arrived++
			}
			s.requests, s.ids, s.tenants = append(s.requests, request), append(s.ids, u.GetId()), append(s.tenants, tenantName(u))
			s.cost = u.GetCost()
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, false, err
	}
	return out, err == nil, nil
}

func tenantName(u *usagev1.Usage) string {
	if list := u.GetTenants(); len(list) > 0 {
		return list[0]
	}
	return openTenant
}

// capacityOf is what a worker set can bear.
func capacityOf(set string, prior gputime.Weights, o *seen, s *served, from, to, limit float64, more int, factors map[string]float64) *accountingv1.SetCapacity {
	intervals := gputime.Intervals(o.states, interval, stale)
	class, fit := capacity.Learn(prior, s.requests, o.states, intervals)
	m := &accountingv1.SetCapacity{WorkerSet: set, Workers: uint32(max(o.workers+more, 0)), Rate: 0}
	w := &class.Weights
	m.Speed = &accountingv1.LearnedSpeed{
		Step: w.Step, Launch: w.Launch, Token: w.Token, Attention: w.Attention, Sequence: w.Sequence, Context: w.Context, Batch: uint32(w.Batch),
		KvRequest: class.KVRequest, KvToken: class.KVToken, Prefixes: class.Prefixes, Error: fit.Error, Intervals: uint32(fit.Intervals),
	}
	shares(m, class.Weights, s, intervals)

	kinds := make([]capacity.Kind, 0, len(s.requests))
	sum := 0.0
	for i, r := range s.requests {
		k := capacity.Kind{Weight: factorOf(factors, s.tenants[i]), Uncached: r.Uncached, Cached: r.Cached, Output: r.Output}
		sum += k.Weight
		kinds = append(kinds, k)
	}
	m.Rate = float64(s.arrived) / max(to-from, 1) * sum / float64(max(len(kinds), 1))
	workers := int(m.GetWorkers())
	load := class.Load(kinds)
	m.Knee = load.Knee(workers, limit)
	m.WorkersNeeded = uint32(load.WorkersFor(m.Rate, limit))
	now := load.At(m.Rate, workers)
	m.TtftPredicted = finite(now.TTFT90)
	if m.Bound = "compute"; load.At(m.Knee, workers).Memory {
		m.Bound = "memory"
	}
	if len(s.ttft) > 0 {
		slices.Sort(s.ttft)
		m.TtftObserved = finite(s.ttft[int(.9*float64(len(s.ttft)-1))])
	}
	for i := 1; i <= curvePoints; i++ {
		p := load.At(1.25*max(m.Knee, m.Rate)*float64(i)/curvePoints, workers)
		point := &accountingv1.CapacityPoint{Rate: p.Rate, TtftP90: finite(p.TTFT90)}
		if p.Stable {
			point.Running, point.KvUsage = p.Running, p.KVUsage
		}
		m.Curve = append(m.Curve, point)
	}
	return m
}

func factorOf(factors map[string]float64, tenant string) float64 {
	if f, ok := factors[tenant]; ok {
		return f
	}
	if f, ok := factors["*"]; ok {
		return f
	}
	return 1
}

// finite is a duration, nil for one without end.
func finite(seconds float64) *durationpb.Duration {
	if math.IsInf(seconds, 0) || math.IsNaN(seconds) || seconds > 1e9 {
		return nil
	}
	return durationpb.New(time.Duration(seconds * float64(time.Second)))
}

// shares fills in who used the workers.
func shares(m *accountingv1.SetCapacity, w gputime.Weights, s *served, intervals []gputime.Interval) {
	tenants := map[string]*accountingv1.TenantShare{}
	of := func(name string) *accountingv1.TenantShare {
		t := tenants[name]
		if t == nil {
			t = &accountingv1.TenantShare{Tenant: name}
			tenants[name] = t
		}
		return t
	}
	for i, r := range s.requests {
		t := of(s.tenants[i])
		t.Requests++
		t.UncachedTokens += float64(r.Uncached)
		t.CachedTokens += float64(r.Cached)
		t.OutputTokens += float64(r.Output)
	}
	splits := gputime.Attribute(w, s.requests, intervals)
	first, last := math.Inf(1), math.Inf(-1)
	for _, sp := range splits {
		first, last = min(first, sp.From), max(last, sp.To)
	}
	pieces := int(min(max(math.Ceil((last-first)/60), 1), maxShares))
	if len(splits) == 0 {
		pieces = 0
	}
	busy := make([]float64, pieces)
	for _, sp := range splits {
		at := min(int((sp.From-first)/(last-first)*float64(pieces)), pieces-1)
		m.WallSeconds += sp.To - sp.From
		m.IdleSeconds += sp.Idle
		m.OtherSeconds += sp.Other
		busy[at] += sp.Busy
		for _, sh := range sp.Shares {
			t := of(s.tenants[sh.Request])
			t.PrefillSeconds += sh.Prefill
			t.DecodeSeconds += sh.Decode
			if t.Shares == nil {
				t.Shares = make([]float64, pieces)
			}
			t.Shares[at] += sh.Prefill + sh.Decode
		}
	}
	for _, t := range tenants {
		n := max(float64(t.GetRequests()), 1)
		t.UncachedTokens /= n
		t.CachedTokens /= n
		t.OutputTokens /= n
		for i := range t.Shares {
			t.Shares[i] /= max(busy[i], 1e-9)
		}
		m.Tenants = append(m.Tenants, t)
	}
	slices.SortFunc(m.Tenants, func(a, b *accountingv1.TenantShare) int {
		return cmp.Or(cmp.Compare(b.GetPrefillSeconds()+b.GetDecodeSeconds(), a.GetPrefillSeconds()+a.GetDecodeSeconds()), cmp.Compare(a.GetTenant(), b.GetTenant()))
	})
}
