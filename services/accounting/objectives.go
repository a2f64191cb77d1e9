package accounting

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/rpc"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
	"github.com/kinference/kinference/services/accounting/internal/objective"
)

// followCatalog takes the objectives of every catalog until ctx is done. While
// the router is away the last ones hold.
func (v *server) followCatalog(ctx context.Context) {
	client := rpc.Client(ctx, v.RouterURL, routerv1connect.NewRouterServiceClient)
	for delay := 250 * time.Millisecond; ; {
		got, err := v.readCatalogs(ctx, client)
		if ctx.Err() != nil {
			return
		}
		if got {
			delay = 250 * time.Millisecond
		}
		v.log.Debug("the catalog does not come", "err", err, "retry_in", delay.String())
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		delay = min(2*delay, 10*time.Second)
	}
}

func (v *server) readCatalogs(ctx context.Context, client routerv1connect.RouterServiceClient) (got bool, err error) {
	stream, err := client.WatchCatalog(ctx, &routerv1.WatchCatalogRequest{})
	if err != nil {
		return false, err
	}
	defer stream.Close()
	for stream.Receive() {
		got = true
		v.sets.Store(workerSetsOf(stream.Msg().GetCatalog()))
		if err := v.setObjectives(ctx, stream.Msg().GetCatalog().GetObjectives()); err != nil {
			return got, err
		}
	}
	return got, stream.Err()
}

// setObjectives takes objectives over, and lets the new ones count what is in the
// ledger.
func (v *server) setObjectives(ctx context.Context, list []*routerv1.Objective) error {
	v.counting.Lock()
	defer v.counting.Unlock()
	if err := v.follow(ctx); err != nil {
		return err
	}
	objectives := make([]objective.Objective, 0, len(list))
	for _, m := range list {
		percent, err := strconv.ParseFloat(m.GetTarget(), 64)
		if err != nil || percent <= 0 || percent > 100 {
			v.log.Warn("an objective is left out: its target is no percentage", "owner", m.GetOwner(), "objective", m.GetName())
			continue
		}
		objectives = append(objectives, objective.Objective{
			Kind: m.GetKind(), Owner: m.GetOwner(), Name: m.GetName(), Models: m.GetModels(), Tenants: m.GetTenants(), QoS: m.GetQos(),
			Indicator: m.GetIndicator(), Threshold: m.GetThreshold().AsDuration(), Target: percent / 100, Window: max(m.GetWindow().AsDuration(), time.Minute),
		})
	}
	fresh := v.board.Set(objectives)
	if len(fresh) > 0 {
		ids, longest := map[string]bool{}, time.Duration(0)
		for i := range fresh {
			ids[fresh[i].ID()] = true
			longest = max(longest, fresh[i].Window)
			// So that a rate sees the first request too.
			v.metrics.judged(ctx, &fresh[i], true, 0)
			v.metrics.judged(ctx, &fresh[i], false, 0)
		}
		err := v.ledger.Export(ctx, ledger.Filter{From: time.Now().Add(-longest), UpTo: v.counted}, func(page []*usagev1.Usage) error {
			for _, u := range page {
				v.board.Count(judged(u), ids)
			}
			return nil
		})
		if err != nil {
			// The board and those who measure have the list.
			v.board.Set(slices.DeleteFunc(slices.Clone(objectives), func(o objective.Objective) bool { return ids[o.ID()] }))
			return err
		}
	}
	v.known.Store(true)
	return nil
}

// follow counts events that came to the ledger since; the caller holds counting.
func (v *server) follow(ctx context.Context) (err error) {
	if v.board.Empty() {
		v.counted, err = v.ledger.Seq(ctx)
		return err
	}
	v.counted, err = v.ledger.Follow(ctx, v.counted, func(u *usagev1.Usage) { v.board.Count(judged(u), nil) })
	return err
}

// catchUp lets the board have all events.
func (v *server) catchUp(ctx context.Context) error {
	v.counting.Lock()
	defer v.counting.Unlock()
	return v.follow(ctx)
}

// measure counts events that this service put into the ledger in its metrics. Those
// of all services are added up by whoever scrapes them.
func (v *server) measure(ctx context.Context, events []*usagev1.Usage) {
	for _, u := range events {
		v.metrics.spent(ctx, u)
		for _, j := range v.board.Judge(judged(u)) {
			v.metrics.judged(ctx, j.Objective, j.Good, 1)
		}
	}
}

// judged is what objectives look at in a usage event.
func judged(u *usagev1.Usage) *objective.Event {
	ended := u.GetEnded().AsTime()
	if now := time.Now(); ended.After(now) { // by a clock that is ahead: a board would have it in the place of what is to come
		ended = now
	}
	e := &objective.Event{
		Ended: ended, Pool: u.GetPool(), Model: u.GetModel(), Tenants: u.GetTenants(), QoS: u.GetQos(),
		TTFT: given(u.Ttft), ITL: given(u.ItlMean), TPOT: given(u.Tpot), E2E: given(u.E2E),
	}
	switch {
	case u.GetRoute() == "/tokenize" || u.GetRoute() == "/v1/messages/count_tokens": // no backend answers these
		e.Outcome = objective.Refused
	case u.GetOverload():
		e.Outcome = objective.Overload
	case u.GetOutcome() == usagev1.Outcome_OUTCOME_FAILED:
		e.Outcome = objective.Failed
	case u.GetOutcome() == usagev1.Outcome_OUTCOME_CANCELED:
		e.Outcome = objective.Canceled
	case u.GetOutcome() == usagev1.Outcome_OUTCOME_REFUSED:
		e.Outcome = objective.Refused
	}
	return e
}

// given is a number, or -1 where there is none.
func given(v *float64) float64 {
	if v == nil || math.IsNaN(*v) {
		return -1
	}
	return *v
}

// Objectives implements the AccountingService.
func (v *server) Objectives(ctx context.Context, r *accountingv1.ObjectivesRequest) (*accountingv1.ObjectivesResponse, error) {
	if !v.known.Load() {
		return nil, rpc.Error(connect.CodeUnavailable, "the catalog is not known: accounting needs router-url, and the router must answer", time.Second)
	}
	if len(r.GetOwners()) > maxValues {
		return nil, invalid("more than %d owners", maxValues)
	}
	if err := v.catchUp(ctx); err != nil {
		return nil, err
	}
	out := &accountingv1.ObjectivesResponse{}
	var list []objective.Objective
	for _, s := range v.board.States(time.Now()) {
		if owners := r.GetOwners(); len(owners) > 0 && !slices.Contains(owners, s.Objective.Owner) {
			continue
		}
		list = append(list, s.Objective)
		out.Objectives = append(out.Objectives, state(&s))
	}
	if r.GetRules() {
		out.Rules = objective.Rules(list)
	}
	return out, nil
}

var alerts = map[objective.Alert]accountingv1.Alert{
	objective.None: accountingv1.Alert_ALERT_NONE, objective.TooFew: accountingv1.Alert_ALERT_TOO_FEW,
	objective.Ticket: accountingv1.Alert_ALERT_TICKET, objective.Page: accountingv1.Alert_ALERT_PAGE,
}

func state(s *objective.State) *accountingv1.ObjectiveState {
	o := &s.Objective
	m := &accountingv1.ObjectiveState{
		Objective: &routerv1.Objective{
			Kind: o.Kind, Owner: o.Owner, Name: o.Name, Models: o.Models, Tenants: o.Tenants, Qos: o.QoS, Indicator: o.Indicator,
			Target: strconv.FormatFloat(100*o.Target, 'g', 7, 64), Window: durationpb.New(o.Window),
		},
		Total: s.Total, Good: s.Good, Alert: alerts[s.Alert],
	}
	if o.Threshold > 0 {
		m.Objective.Threshold = durationpb.New(o.Threshold)
	}
	if s.Total > 0 {
		m.Attainment, m.BudgetLeft = proto.Float64(s.Attainment), proto.Float64(s.BudgetLeft)
	}
	for _, b := range s.Burns {
		m.Burns = append(m.Burns, &accountingv1.Burn{
			Long: durationpb.New(b.Long), Short: durationpb.New(b.Short), LongRate: b.LongRate, ShortRate: b.ShortRate,
			Threshold: b.Factor, Alert: alerts[b.Alert], Firing: b.Firing, Events: b.Events,
		})
	}
	return m
}
