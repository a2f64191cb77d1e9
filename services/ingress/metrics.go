package ingress

import (
	"context"
	"errors"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/parity"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

// otherModel labels what asks for a model that the catalog does not have:
// names from clients would make series without bound.
const otherModel = "_unknown"

// metrics are the instruments of this service. GenAI semantic conventions come
// first; what they have no name for is kinference.ingress.*. Labels are
// bounded: routes, configured models and profiles, statuses, fixed words.
type metrics struct {
	requests    metric.Int64Counter
	active      metric.Int64UpDownCounter
	duration    metric.Float64Histogram
	firstToken  metric.Float64Histogram
	perToken    metric.Float64Histogram
	usage       metric.Int64Histogram
	cached      metric.Int64Counter
	overhead    metric.Float64Histogram
	mode        metric.Int64Counter
	tokenCache  metric.Int64Counter
	failovers   metric.Int64Counter
	reportsLost metric.Int64Counter
	checks      metric.Int64Counter
	breakers    metric.Int64Counter
	ejections   metric.Int64Counter
	hedges      metric.Int64Counter
	exhausted   metric.Int64Counter

	golden golden

	meter        metric.Meter
	registration metric.Registration
}

// Bucket boundaries in seconds, and in tokens.
var (
	durationBuckets = []float64{.01, .02, .04, .08, .16, .32, .64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 160, 320, 600}
	firstBuckets    = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 15, 20, 30, 45, 60, 120}
	perTokenBuckets = []float64{.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5}
	overheadBuckets = []float64{.0001, .00025, .0005, .00075, .001, .0015, .002, .003, .005, .01, .025, .05, .1, .25, 1}
	tokenBuckets    = []float64{1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576}
)

func newMetrics(m metric.Meter) (*metrics, error) {
	var faults []error
	counter := func(name, unit, text string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(text))
		faults = append(faults, err)
		return c
	}
	seconds := func(name, text string, buckets []float64) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(text), metric.WithExplicitBucketBoundaries(buckets...))
		faults = append(faults, err)
		return h
	}
	s := &metrics{
		meter:       m,
		checks:      counter("kinference.ingress.parity.checks", "{check}", "Comparisons of our token ids with the engines', by profile, kind (probe, or count of a served request) and result: agrees, differs, unanswered."),
		breakers:    counter("kinference.ingress.provider.events", "{event}", "What happened to a provider: open and closed are its breakers, skipped are requests that it was not asked about because of one, its concurrency or what it cannot do, barred are requests that were kept from it at the last moment because of their tags."),
		ejections:   counter("kinference.ingress.worker.events", "{event}", "What happened to workers, by worker set: ejected are those that failed several times in a row, returned those that served again, avoided are requests that went elsewhere meanwhile."),
		hedges:      counter("kinference.ingress.hedges", "{request}", "Streams for which a second endpoint was asked, by model and what came of it: first (the second one answered), late (the first one did), failed (neither), refused (the retry budget was used up)."),
		exhausted:   counter("kinference.ingress.retries.refused", "{request}", "Failed requests that were not tried again because retries are a fifth of the requests at most, by model."),
		requests:    counter("kinference.ingress.requests", "{request}", "Requests by route, model, answered status (499: the client left) and outcome: ok, canceled, failed or refused. A stream that breaks has status 200 and outcome failed."),
		duration:    seconds("gen_ai.server.request.duration", "Time from the request's last byte to the answer's.", durationBuckets),
		firstToken:  seconds("gen_ai.server.time_to_first_token", "Time from the request's last byte to the first content written.", firstBuckets),
		perToken:    seconds("gen_ai.server.time_per_output_token", "Time per output token after the first one.", perTokenBuckets),
		cached:      counter("kinference.ingress.cached_tokens", "{token}", "Prompt tokens that workers took from their cache."),
		overhead:    seconds("kinference.ingress.overhead", "Time that a request spent here and in the router until its first content, not in the worker.", overheadBuckets),
		mode:        counter("kinference.ingress.prompt.mode", "{prompt}", "Prompts by profile and by how their tokens became known: given, local, render, tokenize, approximate."),
		tokenCache:  counter("kinference.ingress.token_cache.tokens", "{token}", "Prompt tokens by whether the token cache had them (hit) or not (miss)."),
		failovers:   counter("kinference.ingress.failovers", "{attempt}", "Attempts given up for another worker, by reason."),
		reportsLost: counter("kinference.ingress.reports.dropped", "{report}", "Reports that the router never got."),
	}
	var err error
	s.active, err = m.Int64UpDownCounter("kinference.ingress.active_requests", metric.WithUnit("{request}"), metric.WithDescription("Requests being answered."))
	faults = append(faults, err)
	s.usage, err = m.Int64Histogram("gen_ai.client.token.usage", metric.WithUnit("{token}"), metric.WithDescription("Tokens of a request by type; input includes cached ones."),
		metric.WithExplicitBucketBoundaries(tokenBuckets...))
	return s, errors.Join(append(faults, err, s.golden.init(m))...)
}

// observe shows which profiles do without their tokenizer.
func (m *metrics) observe(c *parity.Checker) error {
	distrusted, err := m.meter.Int64ObservableGauge("kinference.ingress.parity.distrusted", metric.WithUnit("{profile}"),
		metric.WithDescription("1 while the ids of a profile's tokenizer are not those of its engines, so that these are asked; by cause: tokenizer, template, count, none."))
	if err != nil {
		return err
	}
	m.registration, err = m.meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for _, s := range c.States() {
			value := int64(1)
			if s.Cause == "none" {
				value = 0
			}
			o.ObserveInt64(distrusted, value, metric.WithAttributes(attribute.String("profile", s.Profile), attribute.String("cause", s.Cause)))
		}
		return nil
	}, distrusted)
	return err
}

func (m *metrics) close() { _ = m.registration.Unregister() }

// checked records a comparison of token ids.
func (m *metrics) checked(ctx context.Context, profile, kind, result string) {
	m.checks.Add(ctx, 1, metric.WithAttributes(attribute.String("profile", profile), attribute.String("kind", kind), attribute.String("result", result)))
}

// prompts records how prompts were made.
func (m *metrics) prompts(ctx context.Context, prompts []prompt.Prompt) {
	for i := range prompts {
		p := &prompts[i]
		m.mode.Add(ctx, 1, metric.WithAttributes(attribute.String("profile", p.Profile.ID), attribute.String("mode", string(p.Mode))))
		if p.Mode == prompt.Local {
			m.tokenCache.Add(ctx, int64(p.Cached), metric.WithAttributes(attribute.String("result", "hit")))
			m.tokenCache.Add(ctx, int64(p.Tokens-p.Cached), metric.WithAttributes(attribute.String("result", "miss")))
		}
	}
}

// answered records a finished request.
func (m *metrics) answered(ctx context.Context, x *exchange) {
	set := metric.WithAttributeSet(attribute.NewSet(attribute.String("gen_ai.operation.name", operation(x.req.Route)), attribute.String("gen_ai.request.model", x.label)))
	now := time.Now()
	m.requests.Add(ctx, 1, metric.WithAttributes(attribute.String("route", x.path), attribute.String("model", x.label), attribute.String("status", strconv.Itoa(x.status)), attribute.String("outcome", x.outcomeWord())))
	m.duration.Record(ctx, now.Sub(x.began).Seconds(), set)
	r := &x.result
	if r.Sent.IsZero() {
		return
	}
	arrived, written := r.FirstContent, r.FirstWritten
	if arrived.IsZero() {
		arrived = r.LastContent // an answer that is no stream
	} else if !written.IsZero() {
		m.firstToken.Record(ctx, written.Sub(x.began).Seconds(), set)
	}
	if !written.IsZero() && x.attempts == 1 {
		m.overhead.Record(ctx, (r.Sent.Sub(x.began) + written.Sub(arrived)).Seconds(), set)
	}
	u := &r.Usage
	if n := max(u.Output, r.Chunks); n > 1 && !r.FirstContent.IsZero() {
		m.perToken.Record(ctx, r.LastContent.Sub(r.FirstContent).Seconds()/float64(n-1), set)
	}
	for kind, n := range map[string]int{"input": u.Prompt, "output": u.Output} {
		if n != openai.Unknown {
			m.usage.Record(ctx, int64(n), metric.WithAttributes(attribute.String("gen_ai.token.type", kind), attribute.String("gen_ai.request.model", x.label)))
		}
	}
	if u.Cached > 0 {
		m.cached.Add(ctx, int64(u.Cached), metric.WithAttributes(attribute.String("model", x.label)))
	}
}

// breaker records what happened to a provider.
func (m *metrics) breaker(ctx context.Context, provider, event string) {
	m.breakers.Add(ctx, 1, metric.WithAttributes(attribute.String("provider", provider), attribute.String("event", event)))
}

// hedged records what came of a second attempt.
func (m *metrics) hedged(ctx context.Context, model, result string) {
	m.hedges.Add(ctx, 1, metric.WithAttributes(attribute.String("model", model), attribute.String("result", result)))
}

// workerEvent records what happened to a worker of a set.
func (m *metrics) workerEvent(ctx context.Context, set, event string) {
	m.ejections.Add(ctx, 1, metric.WithAttributes(attribute.String("set", set), attribute.String("event", event)))
}

// failedOver records an attempt that another worker makes good.
func (m *metrics) failedOver(ctx context.Context, reason proxy.Reason) {
	m.failovers.Add(ctx, 1, metric.WithAttributes(attribute.String("reason", string(reason))))
}
