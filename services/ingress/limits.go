package ingress

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/limit"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/rpc"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/limits"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// limiting is what requests are limited with.
type limiting struct {
	client    *limit.Client
	table     atomic.Pointer[limits.Table]
	learned   limits.Learner
	occupancy limits.Occupancy
	metrics   limitMetrics
}

// closeTime bounds how long a stop waits for the last settlements.
const closeTime = 2 * time.Second

// startLimiting makes the limiter's client. It lives until stop is called,
// after the last request.
func (v *server) startLimiting(ctx context.Context) (stop func(), err error) {
	l := &v.limits
	if err := l.metrics.init(daemon.Meter(v.ctx)); err != nil {
		return nil, err
	}
	l.learned.Exact = v.LimitExact
	l.client, err = limit.New(ctx, limit.Settings{
		Limiter: rpc.Client(ctx, v.LimiterURL, limiterv1connect.NewLimiterServiceClient), Timeout: v.LimiterTimeout, TTL: v.LimitTTL, LeaseTTL: v.LimitLeaseTTL,
		NoLeases: v.LimitNoLeases, Replicas: v.LimitReplicas, SpillFile: v.LimitSpill,
	})
	if err != nil {
		return nil, err
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTime)
		defer cancel()
		if err := l.client.Close(ctx); err != nil {
			daemon.Logger(v.ctx).Error("limits were not settled", "err", err)
		}
	}, nil
}

// limit takes over the limits of a catalog.
func (v *server) limit(view *catalog.View) {
	var tenants []*routerv1.Tenant
	for _, t := range view.Tenants() {
		tenants = append(tenants, t.Message)
	}
	table, err := limits.New(tenants, view.LimitPolicies, v.limits.table.Load())
	if err != nil {
		daemon.Logger(v.ctx).Error("limits that cannot be kept deny all", "err", err)
	}
	v.limits.table.Store(table)
}

// limited is what one request has reserved.
type limited struct {
	changes  []openai.Change // to the body: max_tokens
	choices  int64
	charges  []limits.Charge
	estimate limits.Estimate
	held     *limit.Reservation
	gpu      time.Duration // of the last attempt
}

// bound checks the numbers that decide how much is generated and cuts
// max_tokens to what the tenant may ask for.
func (x *exchange) bound() *openai.Error {
	b := &x.req.Body
	x.limited.choices = 1
	for _, name := range []string{"n", "best_of"} {
		v := b.Get(name)
		if !v.Given() {
			continue
		}
		// Engines take "5" for 5: what is not a number here would be one there.
		n, ok := v.Int()
		if !ok {
			return openai.Invalid(name, "", "The value of "+name+" must be an integer.")
		}
		x.limited.choices = max(x.limited.choices, min(n, limits.MaxChoices))
	}
	if x.caller == nil || x.caller.Tenant == nil {
		return nil
	}
	maximum := int(x.caller.Tenant.Message.GetMaximumMaxTokens())
	if maximum == 0 {
		return nil
	}
	for _, name := range []string{"max_tokens", "max_completion_tokens"} {
		if n, ok := b.Get(name).Int(); ok && n > int64(maximum) {
			x.setMaxTokens(name, maximum)
		}
	}
	x.req.MaxTokens = min(x.req.MaxTokens, maximum)
	return nil
}

func (x *exchange) setMaxTokens(name string, n int) {
	x.limited.changes = append(x.limited.changes, openai.Set(strconv.AppendInt(nil, int64(n), 10), name))
}

// defaultMaxTokens sets the tenant's default where the client says nothing: what
// is left of the model's context would be reserved, or used, else.
func (x *exchange) defaultMaxTokens(room int64) {
	if x.req.MaxTokens > 0 || x.req.Body.Get("max_tokens").Given() || x.req.Body.Get("max_completion_tokens").Given() || x.caller == nil || x.caller.Tenant == nil {
		return
	}
	m := x.caller.Tenant.Message
	n := int64(m.GetDefaultMaxTokens())
	if most := int64(m.GetMaximumMaxTokens()); most > 0 && (n == 0 || n > most) {
		n = most
	}
	if n == 0 {
		return
	}
	if room > 0 {
		n = min(n, room)
	}
	x.req.MaxTokens = int(min(n, math.MaxInt32))
	x.setMaxTokens("max_tokens", x.req.MaxTokens)
}

// room is what the context leaves for one answer to the longest prompt, by the
// shortest of those that may serve the request; 0: unknown.
func (x *exchange) room() int64 {
	room := int64(0)
	for i := range x.prompts {
		if p := &x.prompts[i]; p.Profile.MaxModelLen > 0 {
			if left := int64(max(1, p.Profile.MaxModelLen-p.Longest())); room == 0 || left < room {
				room = left
			}
		}
	}
	return room
}

// promptTokens is how long the prompts are: counted, or else estimated so that it
// is rather too much.
func (x *exchange) promptTokens() int64 {
	counted, exact := 0, true
	for i := range x.prompts {
		counted = max(counted, x.prompts[i].Tokens)
		exact = exact && x.prompts[i].Exact()
	}
	if !exact || counted == 0 {
		counted = max(counted, estimatedTokens(&x.req))
	}
	if x.req.Prompts <= 1 {
		return int64(counted)
	}
	return x.allTokens(int64(counted))
}

const (
	// bytesPerToken of text, rather too few.
	bytesPerToken = 3
	// mediaTokens of a picture or sound in the body, whatever its bytes.
	mediaTokens = 1500
)

func estimatedTokens(r *openai.Request) int {
	if r.PromptTokens != nil {
		return len(r.PromptTokens)
	}
	text, media := textBytes(r.Messages)
	return (len(r.Tools)+text+len(r.Prompt))/bytesPerToken + 1 + media*mediaTokens
}

// textBytes counts the bytes of messages without those of media, which are
// base64 strings, and the media.
func textBytes(messages []byte) (text, media int) {
	text = len(messages)
	for _, mark := range []string{";base64,", `"data":"`} {
		rest := messages
		for {
			i := bytes.Index(rest, []byte(mark))
			if i < 0 {
				break
			}
			rest = rest[i+len(mark):]
			n := bytes.IndexByte(rest, '"')
			if n < 0 {
				break
			}
			if bytes.IndexByte(rest[:n], ' ') < 0 && n > mediaTokens { // else it is no media, or no more than its bytes
				text -= n
				media++
			}
			rest = rest[n:]
		}
	}
	return text, media
}

func textTokens(v openai.Value) int {
	if v.Kind != openai.Array {
		return len(v.Raw)/bytesPerToken + 1
	}
	n := 0
	for range v.Elements() {
		n++
	}
	return n
}

// reserve takes what the request may use from all limits it must fit.
func (x *exchange) reserve() *openai.Error {
	room := int64(0)
	if !x.counting {
		room = x.room()
		x.defaultMaxTokens(room)
	}
	table := x.limits.table.Load()
	if table.Empty() {
		return nil
	}
	l := &x.limited
	r := limits.Request{Tenants: x.caller.Tenants(), User: x.caller.User, Key: x.caller.KeyID, Model: x.model.Root, Policy: x.policyRequest}
	if x.caller.Backend != nil {
		r.Pool = x.caller.Backend.Pool
	}
	l.charges = table.Charges(nil, &r)
	if len(l.charges) == 0 {
		return nil
	}
	var use limits.Use
	if !x.counting {
		use = limits.Use{Estimated: true, Input: x.promptTokens(), Prices: x.admission.view.Prices(x.model.Name)}
		ask := limits.Ask{Max: int64(x.req.MaxTokens), Room: room, Choices: l.choices * int64(max(1, x.req.Prompts))}
		l.estimate = x.limits.learned.Estimate(x.caller.Name(), x.model.Root, ask, limits.Lend(l.charges))
		use.Output, use.GPU = l.estimate.Output, l.estimate.GPU
	}
	request := limit.Request{Organisation: x.caller.Organisation(), ID: x.unique, Charges: make([]limit.Charge, len(l.charges))}
	if request.Organisation == "" { // an open gateway
		request.Organisation = "-"
	}
	for i := range l.charges {
		c := &l.charges[i]
		request.Charges[i] = limit.Charge{Bucket: c.Bucket, Amount: c.Reserve(&use, &l.estimate), OnUnavailable: unavailable(c.Limit), Organisation: c.Organisation()}
	}
	answer, err := x.limits.client.Reserve(x.ctx, request)
	if err != nil {
		if x.left() {
			x.result.Reason = proxy.Canceled
		} else {
			daemon.Logger(x.server.ctx).Error("limits could not be checked", "request_id", x.id, "err", err)
		}
		return uncheckable()
	}
	x.levels().Levels(x.w.Header(), time.Now(), l.charges, answer.States)
	x.limits.metrics.decided(x.server.ctx, l.charges, answer)
	if answer.Granted() {
		l.held = answer.Reservation
		return nil
	}
	if answer.Reason == limit.Away || answer.Refused < 0 || answer.Refused >= len(l.charges) {
		return uncheckable()
	}
	i := answer.Refused
	refusal := limits.Refusal{Charge: &l.charges[i], Wanted: request.Charges[i].Amount, Never: answer.Reason == limit.Never, After: answer.RetryAfter}
	if i < len(answer.States) {
		refusal.State = answer.States[i]
	}
	return refusal.OpenAIError(x.w.Header())
}

// noRetry tells SDKs that the same request would be refused again.
func (x *exchange) noRetry() { x.w.Header().Set(limits.ShouldRetry, "false") }

// uncheckable is the answer while a limit that then denies cannot be checked.
func uncheckable() *openai.Error {
	return openai.Overloaded("Limits cannot be checked now. Try again later.", time.Second)
}

func unavailable(l *limits.Limit) limit.Unavailable {
	switch l.OnUnavailable {
	case routerv1.OnUnavailable_ON_UNAVAILABLE_ALLOW:
		return limit.Allow
	case routerv1.OnUnavailable_ON_UNAVAILABLE_DENY:
		return limit.Deny
	}
	return limit.Local
}

// policyRequest is the request as matches of policies see it.
func (x *exchange) policyRequest() *policy.Request {
	a := x.attributes
	r := &policy.Request{
		ID: x.unique, Model: x.req.Model, Tenants: a.GetTenants(), QoS: v1alpha1.QoS(a.GetQos()), PromptTokens: int(a.GetEstimatedTokens()), MaxTokens: x.req.MaxTokens,
		Endpoint: v1alpha1.APIEndpoint(a.GetEndpoint()), Stream: x.req.Stream, Tools: a.GetTools(), Headers: a.GetHeaders(),
		Tags: policyTags(a),
	}
	for i := range x.prompts {
		if x.prompts[i].Exact() {
			r.PromptTokens, _ = counted(&x.prompts[i])
			break
		}
	}
	if a.GetClaimsJson() != "" {
		_ = json.Unmarshal([]byte(a.GetClaimsJson()), &r.Claims) // made by us
	}
	return r
}

// settle ends what the request reserved with what it used. It never waits.
func (x *exchange) settle() {
	l := &x.limited
	x.limits.learned.Return(&l.estimate)
	if l.held == nil {
		return
	}
	use, did := x.used()
	if !did {
		l.held.Release()
		x.limits.metrics.settled(x.server.ctx, "released")
		return
	}
	amounts := make([]int64, len(l.charges))
	for i := range l.charges {
		amounts[i] = l.charges[i].Limit.Amount(&use)
	}
	l.held.Commit(amounts)
	x.limits.metrics.settled(x.server.ctx, "committed")
}

// used is what the request used, as its usage event says; false if it came to
// nothing through no doing of the client.
func (x *exchange) used() (limits.Use, bool) {
	r := &x.result
	switch {
	case x.counting:
		return limits.Use{}, true
	case r.Committed:
	case r.Reason == proxy.Canceled:
		if r.Sent.IsZero() { // it was asked for, but nothing was done yet
			return limits.Use{}, true
		}
	case r.Reason == proxy.Status && r.Err != nil && r.Err.Status >= 400 && r.Err.Status < 500 && r.Err.Status != http.StatusTooManyRequests:
		return limits.Use{}, true // the request is at fault
	default:
		return limits.Use{}, false
	}
	record := x.measure()
	t := &record.Tokens
	use := limits.Use{Input: t.Input.N, Cached: t.Cached.N, Output: t.Output.N, GPU: x.limited.gpu, Prices: []*meter.Price{record.Price}}
	if x.outcome() == routerv1.Outcome_OUTCOME_OK {
		x.limits.learned.Learn(x.caller.Name(), x.model.Root, use.Output/x.choices(), use.GPU, r.LastContent.Sub(r.Sent))
	}
	return use, true
}

// choices is how many answers the request is for.
func (x *exchange) choices() int64 { return max(1, x.limited.choices) * int64(max(1, x.req.Prompts)) }

// limitMetrics count decisions and settlements. Labels are bounded: configured
// limits and fixed words.
type limitMetrics struct {
	decisions   metric.Int64Counter
	settlements metric.Int64Counter
	sets        sync.Map // of attributes, by limitWord
}

type limitWord struct{ owner, limit, outcome string }

func (m *limitMetrics) init(meter metric.Meter) (err error) {
	if m.decisions, err = meter.Int64Counter("kinference.ingress.limits.decisions", metric.WithUnit("{request}"),
		metric.WithDescription("Requests by the limits they had to fit, and outcome: allowed, denied, shadow (would have been denied), unavailable (decided without the limiter).")); err != nil {
		return err
	}
	m.settlements, err = meter.Int64Counter("kinference.ingress.limits.settlements", metric.WithUnit("{request}"),
		metric.WithDescription("Requests that had reserved, by whether what they used was charged (committed) or all was given back (released)."))
	return err
}

func (m *limitMetrics) decided(ctx context.Context, charges []limits.Charge, a *limit.Answer) {
	for i := range charges {
		var state *limiterv1.State
		if i < len(a.States) {
			state = a.States[i]
		}
		word := "allowed"
		switch {
		case !a.Granted() && i == a.Refused:
			word = "denied"
		case state.GetShadow() && state.GetRefused():
			word = "shadow"
		case !a.Granted(): // another one denied it
			continue
		case state == nil && a.Degraded:
			word = "unavailable"
		}
		l := charges[i].Limit
		m.decisions.Add(ctx, 1, m.set(limitWord{l.Owner, l.Name, word}))
	}
}

func (m *limitMetrics) set(w limitWord) metric.MeasurementOption {
	if s, ok := m.sets.Load(w); ok {
		return s.(metric.MeasurementOption)
	}
	s := metric.WithAttributeSet(attribute.NewSet(attribute.String("owner", w.owner), attribute.String("limit", w.limit), attribute.String("outcome", w.outcome)))
	m.sets.Store(w, s)
	return s
}

func (m *limitMetrics) settled(ctx context.Context, word string) {
	m.settlements.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", word)))
}
