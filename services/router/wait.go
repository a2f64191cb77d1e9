package router

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/evaluate"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/line"
)

const (
	// aged is the age from which on what is known of endpoints is looked up anew
	// when policies are asked about a request that waits: samples come every
	// quarter second.
	aged = 50 * time.Millisecond
	// brief is a wait that is none: of a request that nothing held.
	brief = 5 * time.Millisecond
	// maxLineBytes bounds what those that wait take in memory: half of what the chart
	// gives a router.
	maxLineBytes = 512 << 20
	// hashBytes is what a hash of a block takes: in the request, and for the scheduler.
	hashBytes = 16
	// endpointBytes is what is known of an endpoint for one request, here and in the
	// scheduler: measured with 4 and 64 workers, 300 in line.
	endpointBytes = 1300
)

// outlook is the fleet as one look at it found it.
type outlook struct {
	at        time.Time
	newest    *catalog.Version
	offered   *plan.Model         // by newest; nil: the model is no more
	endpoints []evaluate.Endpoint // workers that could serve first
	live      int                 // how many of them: the scheduler's candidates
	seen      []policy.Endpoint   // the endpoints as policies see them
	found     *found
	// candidates are the first live endpoints as the scheduler takes them, with loads
	// as old as they were when it was looked.
	candidates []schedule.Candidate
	looked     time.Time
}

// wait decides: it returns when the request's turn has come, or policies have
// something else to do with it. The error is for the caller, outcome its name.
func (x *routing) wait() (outcome string, err error) {
	if x.req.RequestId == "" { // nobody could report on it
		x.decide()
		return x.canceled()
	}
	x.dispatch, err = x.line.Wait(x.ctx, &line.Ask{
		Request: x.request(x.req.RequestId), Bytes: x.bytes(),
		Look: func() ([]schedule.Candidate, func()) {
			v := x.look()
			return v.candidates, func() { x.adopt(v) }
		},
		Choose: x.choose,
		Stays:  func() (time.Duration, bool) { return x.verdict.Wait, x.verdict.Action == policy.Queue },
	})
	x.decision = x.dispatch.Decision
	switch {
	case err == nil:
		x.at = x.now()
	case errors.As(err, &x.refusal) && x.refusal.Reason == line.Stopped:
		// Without a time to come back: ingress asks another router at once.
		return "stopped", rpc.Error(connect.CodeUnavailable, "the router stops", 0)
	case x.refusal != nil:
		x.decide() // without workers
	}
	if outcome, err := x.canceled(); err != nil {
		return outcome, err
	}
	if err != nil && x.refusal == nil {
		return "invalid", rpc.Error(connect.CodeInvalidArgument, err.Error(), 0)
	}
	x.booked()
	return "", nil
}

// canceled is the error of a caller who has left: nobody would report what is booked.
func (x *routing) canceled() (outcome string, err error) {
	if err := x.ctx.Err(); err != nil {
		x.scheduler.Drop(x.now(), x.req.RequestId)
		x.providers.Done(x.req.RequestId)
		return "canceled", err
	}
	return "", nil
}

// waited is the time in line; 0 if nothing held the request.
func (x *routing) waited() time.Duration {
	if x.dispatch.Waited < brief {
		return 0
	}
	return x.dispatch.Waited
}

// request is what the scheduler is told, under an id.
func (x *routing) request(id string) schedule.Request {
	return schedule.Request{
		ID: id, Tenant: x.req.Tenant, Model: x.req.Model, Connection: x.req.Connection, MaxTokens: x.attributes.MaxTokens, Whole: x.req.Whole,
		QoS: schedule.QoS(x.attributes.QoS), Weight: x.version.Plan.Weights[x.req.Tenant], Objective: schedule.Objective(x.model.Policies.Objective(&x.attributes)),
	}
}

// bytes is about what the request takes while it waits.
func (x *routing) bytes() int64 {
	n := int64(0)
	for _, p := range x.prompts {
		n += int64(len(p.hashes))
		for i := range p.others {
			n += int64(len(p.others[i].hashes))
		}
	}
	n *= hashBytes
	for i := range x.model.Targets {
		if p := x.model.Targets[i].Profile; p != nil {
			n += int64(len(p.Set.Workers)*p.Set.Ranks) * endpointBytes
		}
	}
	return n
}

// decide decides at once, without booking: of requests that nobody has made, and of
// those for which there is no place in line. Those were looked at a moment ago.
func (x *routing) decide() {
	if x.outlook == nil || x.now().Sub(x.looked) > aged {
		x.adopt(x.look())
	}
	if x.ctx.Err() == nil {
		x.decision = x.scheduler.DecideBy(x.looked, x.request(""), x.candidates, x.choose)
	}
}

// asked is what an evaluation needs to know of the request.
func (x *routing) asked(m *plan.Model) evaluate.Request {
	return evaluate.Request{
		Model: m, Exclude: x.req.Exclude,
		Tokens: func(profile string) int {
			if p := x.prompts[profile]; p != nil && p.Approximate {
				return 0 // an estimate is no reason to refuse
			}
			return longestOf(x.prompts, profile)
		},
	}
}

// look finds out what could serve the request by the newest catalog, and what of its
// prompt is cached there. It changes nothing.
func (x *routing) look() *outlook {
	v := &outlook{at: x.now()}
	v.newest, _ = x.catalog.Current()
	if v.offered = v.newest.Plan.Model(x.req.Pool, x.req.Model); v.offered != nil {
		v.endpoints, v.live = workersFirst(evaluate.Endpoints(v.at, x.asked(v.offered), x.fleet, &x.providers))
	}
	v.found = x.match(x.ctx, x.prompts, v.endpoints[:v.live])
	v.at = x.now()
	v.looked = v.at
	v.seen = x.policyEndpoints(v.at, v.endpoints)
	v.candidates = candidates(v.at, v.endpoints[:v.live], x.prompts, v.found)
	return v
}

// adopt goes by an outlook from now on. Who waits does not go by the catalog that was
// the newest when it came: a worker that joins serves it, too, and what policies
// forbid meanwhile is forbidden.
func (x *routing) adopt(v *outlook) {
	x.outlook = v
	if v.offered == nil || v.offered == x.model {
		return
	}
	x.version, x.model = v.newest, v.offered
	x.attributes.Tags.Doubt(x.model.Tags)
}

// choose asks the policies. It is a schedule.Choose.
func (x *routing) choose(e []schedule.Estimate, rank func([]int)) ([]int, bool) {
	if x.offered == nil {
		x.verdict = policy.Decision{Action: policy.Unavailable}
		return nil, false
	}
	if now := x.now(); now.Sub(x.at) > aged {
		x.at = now
		evaluate.Update(now, x.asked(x.model), x.endpoints, x.fleet, &x.providers)
		for i := range x.seen {
			if i < x.live || x.endpoints[i].Provider != nil {
				x.seen[i].Unfit = x.endpoints[i].Dropped
			}
		}
	}
	output := plan.Output(x.attributes.MaxTokens)
	for i := range e {
		p := &x.seen[i]
		p.TTFT, p.E2E = e[i].TTFT, e[i].TTFT+time.Duration(output)*e[i].ITL
		p.Cost = plan.WorkerCost(x.endpoints[i].Profile.Set, e[i].Work, e[i].ITL, e[i].Load.Running, output)
		if x.refusal != nil && p.Unfit == "" {
			p.Unfit = x.refusal.Error()
		}
	}
	fleet := &policy.Fleet{Endpoints: x.seen, Rank: func(order []int) { plan.Rank(order, x.seen, rank) }}
	x.verdict = x.model.Policies.Evaluate(&x.attributes, fleet)
	switch {
	case x.refusal == nil:
	case x.verdict.Action == policy.Unavailable, x.verdict.Action == policy.Queue:
		x.verdict.Action = policy.Saturated // there are workers: it may come back
	}
	switch x.verdict.Action {
	case policy.Queue:
		return nil, true
	case policy.Route:
		known, first := x.workers(x.verdict.Order)
		return known, first && !x.dry
	}
	return nil, false
}

// booked notes where the request goes, beside the scheduler's ledger.
func (x *routing) booked() {
	if x.verdict.Action != policy.Route {
		return
	}
	chosen := &x.endpoints[x.verdict.Order[0]]
	if chosen.Provider != nil {
		x.providers.Book(x.at, x.req.RequestId, chosen.Provider.Provider.Name)
		return
	}
	x.providers.Done(x.req.RequestId) // it may have been at one before
	estimate := &x.decision.Estimates[x.verdict.Order[0]]
	if p := x.prompts[chosen.Profile.ID]; p != nil {
		x.affinity.Record(x.at, chosen.ID, p.hashes)
		for i := range p.others {
			x.affinity.Record(x.at, chosen.ID, p.others[i].hashes)
		}
		if promise, ok := x.found.promise(x.at, p, chosen.ID, estimate); ok {
			x.cached.Promised(x.req.RequestId, promise)
		}
	}
	x.metrics.chosen(x.ctx, x.model.Name, estimate)
}

// follow lets those that wait take part in what becomes known of workers.
func (s *server) follow(ctx context.Context) *line.Line {
	l := line.New(s.scheduler, line.Settings{Now: s.now, MaxBytes: maxLineBytes, MaxWait: s.MaxWait, Left: func(qos schedule.QoS, how string, held schedule.Hold, waited time.Duration) {
		s.metrics.leftLine(ctx, qos, how, held, waited)
	}})
	s.fleet.CountLine(s.scheduler.InLine)
	s.fleet.OnSamples(func(now time.Time, samples []fleet.Sample) {
		for i := range samples {
			l.Sample(now, samples[i].Worker, loadOf(now, &samples[i].State))
		}
		l.Kick()
	})
	return l
}

// loadOf is a worker's as the scheduler takes it.
func loadOf(now time.Time, st *fleet.State) schedule.Load {
	out := schedule.Load{Running: st.Running, Waiting: st.Waiting, KVUsage: st.KVUsage, Known: !st.Sampled.IsZero()}
	if out.Known {
		out.Age = max(0, now.Sub(st.Sampled))
	}
	return out
}
