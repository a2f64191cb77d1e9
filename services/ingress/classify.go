package ingress

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/tag"
)

// classifying is what the server needs to have prompts classified.
type classifying struct {
	asker    *tag.Asker
	duration metric.Float64Histogram
	wait     metric.Float64Histogram
	breaker  metric.Registration
}

var classifyBuckets = []float64{.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 2}

func (v *server) startClassifying(ctx context.Context) (stop func(), err error) {
	c, m := &v.classifying, v.metrics.meter
	if c.duration, err = m.Float64Histogram("kinference.ingress.classify.duration", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(classifyBuckets...),
		metric.WithDescription("Time to have a prompt classified, by outcome: whole, partial (not all was read), or why there was no answer: timeout, busy, overloaded, breaker_open, unavailable, garbled, canceled.")); err != nil {
		return nil, err
	}
	if c.wait, err = m.Float64Histogram("kinference.ingress.classify.wait", metric.WithUnit("s"), metric.WithExplicitBucketBoundaries(classifyBuckets...),
		metric.WithDescription("Time that a request waited for its tags when all else was ready.")); err != nil {
		return nil, err
	}
	state, err := m.Int64ObservableGauge("kinference.ingress.classify.breaker", metric.WithUnit("{state}"),
		metric.WithDescription("State of the circuit breaker to the classifier: 0 closed, 1 half open, 2 open."))
	if err != nil {
		return nil, err
	}
	base := context.WithoutCancel(ctx)
	c.asker = tag.New(tag.Settings{
		Client: rpc.Client(ctx, v.ClassifierURL, classifierv1connect.NewClassifierServiceClient, connect.WithInterceptors(connect.UnaryInterceptorFunc(mute))), Timeout: v.ClassifyTimeout, Concurrency: v.ClassifyConcurrency,
		Done: func(outcome string, took time.Duration) {
			c.duration.Record(base, took.Seconds(), metric.WithAttributes(attribute.String("outcome", outcome)))
		},
	})
	if c.breaker, err = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(state, int64(c.asker.State()))
		return nil
	}, state); err != nil {
		return nil, err
	}
	return func() { _ = c.breaker.Unregister() }, nil
}

// mute takes the words out of errors, so that no trace tells what a peer says that
// has seen a prompt.
func mute(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, r)
		if err != nil {
			return nil, connect.NewError(connect.CodeOf(err), errSilent)
		}
		return resp, nil
	}
}

var errSilent = errors.New("the classifier did not answer")

// classified is a request on its way to its tags.
type classified struct {
	answer chan tag.Result // nil: nobody asks
	cancel context.CancelFunc
	done   bool
	limits bool // limits read tags
}

// classify begins to have the prompt classified if a policy or a limit that could
// apply looks at tags. The caller must end with unclassify.
func (x *exchange) classify() {
	limits := x.limits.table.Load().ReadTags()
	if !x.model.ReadsTags && len(limits) == 0 {
		return
	}
	read := slices.Concat(x.model.ReadTags, limits)
	slices.Sort(read)
	read = slices.Compact(read)
	ctx, cancel := context.WithCancel(x.ctx)
	c := &x.classified
	c.answer, c.cancel, c.limits = make(chan tag.Result, 1), cancel, len(limits) > 0
	go func() {
		var beside []openai.Value
		if x.messages != nil {
			beside = anthropic.Unread(&x.messages.Body)
		}
		p := tag.Take(&x.req.Body, x.ClassifyBytes, beside...)
		c.answer <- x.classifying.asker.Ask(ctx, &p, x.model.TagsNamespace, read)
	}()
	runtime.Gosched() // so that the question is on its way before this CPU makes tokens
}

// tagged waits for the tags and puts them where policies look.
func (x *exchange) tagged() {
	c := &x.classified
	if c.answer == nil || c.done {
		return
	}
	start := time.Now()
	r := <-c.answer
	x.classifying.wait.Record(x.server.ctx, time.Since(start).Seconds())
	c.done = true
	a := x.attributes
	a.Tags, a.Classified, a.AbsentTags, a.UnknownTags = r.Present, r.Complete, r.Absent, r.Unknown
	if x.span.IsRecording() {
		x.span.SetAttributes(attribute.String("kinference.classify.outcome", r.Outcome))
	}
}

// unclassify ends what classify began. It reads the body, which is not for longer.
func (x *exchange) unclassify() {
	c := &x.classified
	if c.answer == nil {
		return
	}
	c.cancel()
	if !c.done {
		<-c.answer
		c.done = true
	}
}

// policyTags are the tags of a request as matches of policies see them.
func policyTags(a *routerv1.Attributes) policy.Tags {
	t := policy.Tags{Present: a.GetTags(), Complete: a.GetClassified(), Absent: a.GetAbsentTags()}
	for _, u := range a.GetUnknownTags() {
		t.Unknown = append(t.Unknown, policy.UnknownTag{Tag: u.GetTag(), Causes: u.GetCauses()})
	}
	return t
}
