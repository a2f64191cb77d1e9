package ingress

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/responses"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// statusLeft is recorded for a client that left before its answer. Nobody
// gets to see it; the number is nginx's.
const statusLeft = 499

// exchange is one request to a generating route, from its body to its report.
type exchange struct {
	*server
	*admission
	w      http.ResponseWriter
	r      *http.Request
	id     string // may be the client's own
	unique string // names the request for what is counted once: never the client's id
	label  string // model label for metrics

	ctx   context.Context // of the request: client, total timeout, span
	span  trace.Span
	began time.Time // when the body was complete
	req   openai.Request
	// What req was made of, for a client of another API than its own.
	messages  *anthropic.Request
	responses *responses.Request
	model     *catalog.Model
	prompts   []prompt.Prompt
	body      []byte // as sent upstream, for bodyFor
	bodyKind  bodyKind
	bodyIDs   *prompt.Prompt
	salt      string // of the caller's tenant; empty while the gateway is open

	attributes *routerv1.Attributes // for policies
	classified classified
	limited    limited
	measured   measured
	retry      retry

	counting   bool       // it only asks how many tokens it has
	routed     bool       // the router has it in its ledger
	place      *rpc.Place // which router; reports that wait hold on to it, not to the exchange
	overloaded bool       // the router had no room for it
	attempts   int
	broken     int                // endpoints that took it and broke or hung on it
	endpoint   *routerv1.Endpoint // of the last attempt
	status     int
	result     proxy.Result
}

// bodyKind is what bodies to send upstream differ in.
type bodyKind struct {
	model    string
	provider bool
	ids      *prompt.Prompt
}

// serve runs the steps of a request. Each may answer and end it.
func (x *exchange) serve() {
	body, release, e := x.readBody()
	defer release()
	x.began = time.Now()
	if e == nil && body == nil {
		x.leave()
		return
	}
	x.trace()
	defer x.endSpan()
	var cancel context.CancelFunc
	x.ctx, cancel = context.WithTimeoutCause(x.ctx, x.totalTimeout(), proxy.ErrTotal)
	defer cancel()
	if e == nil {
		e = x.parse(body)
	}
	if e == nil {
		e = x.resolve()
	}
	if e == nil {
		e = x.checkShape()
	}
	if e == nil {
		x.saltCache()
		x.attributes, e = x.attributesOf()
	}
	if e == nil {
		e = x.bound()
	}
	if e == nil {
		x.classify()
		defer x.unclassify()
		x.prompts = x.server.prompts.Make(x.ctx, &x.req, x.model.Considered)
		x.metrics.prompts(x.server.ctx, x.prompts)
		e = x.fits()
	}
	if e == nil {
		if x.classified.limits {
			x.tagged()
		}
		e = x.reserve()
	}
	if e == nil {
		x.tagged()
		x.begin()
		e = x.forward()
	}
	switch {
	case x.result.Committed:
		x.status = http.StatusOK
	case x.result.Reason == proxy.Canceled || e == nil:
		x.leave()
	default:
		x.status = e.Status
		writeError(x.w, e)
	}
}

// left reports whether the client is gone, which a stop of ours is not.
func (x *exchange) left() bool {
	return x.r.Context().Err() != nil && !errors.Is(context.Cause(x.r.Context()), proxy.ErrStopping)
}

// leave ends the request of a client that is gone. One that closed only its
// own side would take no answer for an empty one.
func (x *exchange) leave() {
	x.status = statusLeft
	writeError(x.w, &openai.Error{Status: statusLeft, Type: openai.TypeInvalidRequest, Code: "client_closed_request", Message: "The client closed the connection before the answer was there."})
}

// trace starts the request's span. A client's own trace is linked, not joined:
// it may not decide what we sample.
func (x *exchange) trace() {
	from := daemon.Propagator.Extract(context.Background(), propagation.HeaderCarrier(x.r.Header))
	options := []trace.SpanStartOption{trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(attribute.String("http.route", x.path))}
	if remote := trace.SpanContextFromContext(from); remote.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: remote}))
	}
	x.ctx, x.span = x.tracer.Start(x.r.Context(), "POST "+x.path, options...)
}

// resolve finds the model in the catalog.
func (x *exchange) resolve() *openai.Error {
	if x.model = x.named(x.req.Model); x.model == nil {
		return openai.ModelNotFound(x.req.Model)
	}
	x.label = x.model.Name
	return nil
}

// fits drops the profiles whose context the request does not fit in, by the
// engine's rule, and refuses it when none is left. There must be room for one
// token of output even if the client set no limit.
func (x *exchange) fits() *openai.Error {
	longest, tokens := 0, 0
	left := slices.DeleteFunc(x.prompts, func(p prompt.Prompt) bool {
		limit := p.Profile.MaxModelLen
		if !p.Exact() || limit == 0 || p.Longest()+max(x.req.MaxTokens, 1) <= limit {
			return false
		}
		if limit > longest {
			longest, tokens = limit, p.Longest()
		}
		return true
	})
	if len(left) == 0 && len(x.prompts) > 0 && !x.model.External {
		return x.contextError(longest, tokens)
	}
	x.prompts = left
	return nil
}

// route asks the router for workers, again for a short while when it cannot
// be reached: it may be restarting.
func (x *exchange) route(exclude []string) ([]*routerv1.Endpoint, *openai.Error) {
	ctx, cancel := context.WithTimeout(x.ctx, x.RouteTimeout+x.QueueTimeout)
	defer cancel()
	connection, _ := x.r.Context().Value(connKey{}).(string)
	request := &routerv1.RouteRequest{
		RequestId: x.id, Model: x.req.Model, MaxTokens: uint32(x.req.MaxTokens), Connection: connection, Exclude: exclude, Whole: !x.req.Stream,
		Attributes: x.attributes, Tenant: x.caller.Name(), Pool: x.pool(), Prompts: make([]*routerv1.Prompt, len(x.prompts)),
	}
	for i := range x.prompts {
		p := &x.prompts[i]
		request.Prompts[i] = &routerv1.Prompt{
			Profile: p.Profile.ID, Tokens: uint32(p.Tokens), BlockSize: uint32(p.BlockSize), BlockHashes: numbers(p.Hashes), Approximate: !p.Exact(), Others: othersOf(p),
		}
	}
	// Whatever goes wrong from here on, the router may have booked it.
	before := x.routed
	x.routed = true
	for delay := 50 * time.Millisecond; ; delay *= 2 {
		answer, err := x.router.Route(rpc.Stay(ctx, x.place), request)
		if err == nil {
			x.measured.decision = answer
			x.retry = retry{attempts: int(answer.GetAttempts()), on: answer.GetRetryOn(), hedge: answer.GetHedge()}
			x.overloaded = len(answer.GetEndpoints()) == 0
			return answer.GetEndpoints(), noWorkers(answer.GetEndpoints())
		}
		after, told := rpc.RetryAfter(err)
		switch code := connect.CodeOf(err); {
		case x.left():
			x.result.Reason = proxy.Canceled
			return nil, nil
		case code == connect.CodeNotFound:
			x.routed = before
			return nil, openai.ModelNotFound(x.req.Model)
		case code == connect.CodeOutOfRange: // the router knows of a shorter context than the catalog
			x.routed = before
			return nil, openai.Invalid(x.req.Route.PromptParam(), openai.CodeContextLength, "The prompt is longer than the maximum context length of the model.")
		case code == connect.CodeInvalidArgument:
			x.routed = before
			return nil, openai.Invalid("", "", "The router refused the request.")
		case code == connect.CodePermissionDenied:
			x.routed = before
			x.noRetry()
			return nil, rejected(err)
		case code == connect.CodeResourceExhausted:
			x.routed, x.overloaded = before, true
			return nil, saturated(max(after, time.Second))
		case told:
			x.routed, x.overloaded = before, true
			return nil, openai.Overloaded("No model server is ready for this request. Try again later.", max(after, time.Second))
		case code != connect.CodeUnavailable || delay > 400*time.Millisecond || ctx.Err() != nil:
			x.overloaded = true
			daemon.Logger(x.server.ctx).Error("router did not decide", "request_id", x.id, "err", err)
			return nil, openai.Overloaded("The gateway cannot route requests now. Try again later.", time.Second)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

func noWorkers(endpoints []*routerv1.Endpoint) *openai.Error {
	if len(endpoints) > 0 {
		return nil
	}
	return openai.Overloaded("No model server is ready for this request. Try again later.", time.Second)
}

// bodyFor is the body as the endpoint's engine must get it. Nearly always all
// endpoints get the same one, so the last is kept.
func (x *exchange) bodyFor(endpoint *routerv1.Endpoint) ([]byte, error) {
	name := endpoint.GetUpstreamModel()
	if name == "" {
		name = x.req.Model
	}
	ids := x.passIDs(endpoint)
	kind := bodyKind{name, endpoint.GetProvider() != "", ids}
	if x.body != nil && kind == x.bodyKind {
		return x.body, nil
	}
	changes := slices.Clip(x.limited.changes)
	if name != x.req.Model {
		changes = append(changes, openai.Set(openai.AppendString(nil, name), "model"))
	}
	switch {
	case endpoint.GetProvider() != "": // it would not know what is the engine's own
		changes = append(changes, openai.Remove("cache_salt"), openai.Remove("kv_transfer_params"))
	case x.salt != "": // how soon it is served, and whose blocks are fetched, is not for a tenant to say
		changes = append(changes, openai.Set(openai.AppendString(nil, x.salt), "cache_salt"),
			openai.Remove("priority"), openai.Remove("kv_transfer_params"), openai.Remove("ec_transfer_params"))
	case x.req.Body.Get("kv_transfer_params").Given(): // ids there would be another prompt than the one that was judged
		changes = append(changes, openai.Remove("kv_transfer_params", "prompt_token_ids"))
	}
	changes = append(changes, x.askForUsage(endpoint.GetProvider() != "")...)
	if ids != nil {
		list := make([]byte, 0, 7*len(ids.IDs)+2)
		list = append(list, '[')
		for i, id := range ids.IDs {
			if i > 0 {
				list = append(list, ',')
			}
			list = strconv.AppendUint(list, uint64(id), 10)
		}
		changes = append(changes, openai.Set(append(list, ']'), "kv_transfer_params", "prompt_token_ids"))
	}
	if len(changes) == 0 {
		x.body = x.req.Body.Raw()
	} else {
		out, err := x.req.Body.Apply(make([]byte, 0, len(x.req.Body.Raw())+256), changes...)
		if err != nil {
			return nil, err
		}
		x.body = out
	}
	x.bodyKind, x.bodyIDs = kind, ids
	return x.body, nil
}

// passIDs returns the prompt whose token ids the engine of an endpoint takes
// over, nil if it shall tokenise itself: wrong ids would get wrong answers, so
// only an engine that makes the same ones gets ours.
func (x *exchange) passIDs(endpoint *routerv1.Endpoint) *prompt.Prompt {
	if x.req.Route != openai.RouteChat {
		return nil
	}
	p := x.promptFor(endpoint)
	if p == nil || !p.Profile.PassTokenIDs || p.Mode != prompt.Local || !x.parity.Proven(p.Profile, uidOf(endpoint)) {
		return nil
	}
	return p
}

// promptFor is the prompt as the engine of an endpoint sees it, nil if the router
// named a profile that it was not made for.
func (x *exchange) promptFor(endpoint *routerv1.Endpoint) *prompt.Prompt {
	for i := range x.prompts {
		if p := &x.prompts[i]; p.Profile.ID == endpoint.GetProfile() {
			return p
		}
	}
	return nil
}

// uidOf is the engine behind a worker: uid/rank.
func uidOf(endpoint *routerv1.Endpoint) string {
	id := endpoint.GetWorker()
	if i := strings.LastIndexByte(id, '/'); i >= 0 {
		return id[:i]
	}
	return id
}

// compareCount lets the parity check see how many prompt tokens the engine
// counted, unless they are ours anyway.
func (x *exchange) compareCount() {
	if x.outcome() != routerv1.Outcome_OUTCOME_OK || x.result.Usage.Prompt == openai.Unknown || x.bodyIDs != nil || x.countsOther() {
		return
	}
	if p := x.promptFor(x.endpoint); p != nil && p.Local >= 0 {
		x.parity.Served(p.Profile.ID, uidOf(x.endpoint), p.Local, x.result.Usage.Prompt)
	}
}

// countsOther reports that the engine counts other prompt tokens than those that the
// request was routed by: all prompts of a list, embeddings, or what came from
// another engine.
func (x *exchange) countsOther() bool {
	return x.req.Prompts > 1 || x.req.Body.Get("kv_transfer_params").Given() || x.req.Body.Get("prompt_embeds").Given()
}

// reported is the usage for the router, which compares it with its prediction.
func (x *exchange) reported() openai.Usage {
	u := x.usage()
	if n, ok := x.req.Body.Get("n").Int(); ok && n > 1 {
		// Of one of the choices, which found the first one's blocks in the cache.
		u.Cached = openai.Unknown
	}
	if x.countsOther() {
		u.Prompt, u.Cached = openai.Unknown, openai.Unknown
	}
	return u
}

// usage is what the engine reported, and where it reported nothing the number
// of events with content: close to the tokens it generated until then.
func (x *exchange) usage() openai.Usage {
	u := x.result.Usage
	if x.result.Sent.IsZero() {
		return openai.NoUsage
	}
	switch {
	case u.Output != openai.Unknown:
	case x.req.Route == openai.RouteEmbeddings && x.result.Committed:
		u.Output = 0
	case x.result.Chunks > 0:
		u.Output = x.result.Chunks
	}
	return u
}

func (x *exchange) outcome() routerv1.Outcome {
	switch x.result.Reason {
	case proxy.Served:
		if x.result.Committed {
			return routerv1.Outcome_OUTCOME_OK
		}
	case proxy.Canceled:
		return routerv1.Outcome_OUTCOME_CANCELED
	}
	return routerv1.Outcome_OUTCOME_FAILED
}

// outcomeWord is the outcome for metrics, which know refused requests as well.
func (x *exchange) outcomeWord() string {
	switch {
	case x.status == statusLeft:
		return "canceled"
	case x.status >= 400 && x.status < 500:
		return "refused"
	}
	switch x.outcome() {
	case routerv1.Outcome_OUTCOME_OK:
		return "ok"
	case routerv1.Outcome_OUTCOME_CANCELED:
		return "canceled"
	}
	return "failed"
}
