package classifier

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/daemon"
)

// metrics of the service. Labels are of fixed sets: names of built-in tags,
// states and causes; never text, and no custom names.
type metrics struct {
	prompts  metric.Int64Counter
	bytes    metric.Int64Counter
	tags     metric.Int64Counter
	unknown  metric.Int64Counter
	refused  metric.Int64Counter
	duration metric.Float64Histogram
	ctx      context.Context
}

// counted are the tags whose states are counted.
var counted = []string{"pii-detected", "secret-detected", "injection", "complexity-low", "complexity-medium", "complexity-high", "complexity-unknown", "code"}

func newMetrics(ctx context.Context, c *classify.Classifier) *metrics {
	m := daemon.Meter(ctx)
	x := &metrics{ctx: context.WithoutCancel(ctx)}
	// Only invalid names fail, and these are ours; what cannot be made counts nothing.
	x.prompts, _ = m.Int64Counter("kinference.classifier.prompts", metric.WithDescription("Prompts classified"), metric.WithUnit("{prompt}"))
	x.bytes, _ = m.Int64Counter("kinference.classifier.bytes", metric.WithDescription("Bytes of text, by whether the conversation cache knew them"), metric.WithUnit("By"))
	x.tags, _ = m.Int64Counter("kinference.classifier.tags", metric.WithDescription("Tags given, by name and state"), metric.WithUnit("{tag}"))
	x.unknown, _ = m.Int64Counter("kinference.classifier.unknown", metric.WithDescription("Prompts of which a detector has not read all, by detector and cause"), metric.WithUnit("{prompt}"))
	x.refused, _ = m.Int64Counter("kinference.classifier.refused", metric.WithDescription("Calls refused because all slots were taken"), metric.WithUnit("{call}"))
	x.duration, _ = m.Float64Histogram("kinference.classifier.duration", metric.WithDescription("Time to classify one prompt"), metric.WithUnit("s"),
		metric.WithExplicitBucketBoundaries(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, .1, .25))
	parts, err := m.Int64ObservableGauge("kinference.classifier.cache.parts", metric.WithDescription("Parts that the conversation cache holds"), metric.WithUnit("{part}"))
	if err == nil {
		_, _ = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
			n, _ := c.Cached()
			o.ObserveInt64(parts, int64(n))
			return nil
		}, parts)
	}
	return x
}

func (m *metrics) refuse() { m.refused.Add(m.ctx, 1) }

func (m *metrics) done(r *classify.Result, d time.Duration) {
	m.prompts.Add(m.ctx, 1)
	m.duration.Record(m.ctx, d.Seconds())
	m.bytes.Add(m.ctx, int64(r.CachedBytes), metric.WithAttributes(attribute.Bool("cached", true)))
	m.bytes.Add(m.ctx, int64(r.Bytes-r.CachedBytes), metric.WithAttributes(attribute.Bool("cached", false)))
	for _, n := range counted {
		m.tags.Add(m.ctx, 1, metric.WithAttributes(attribute.String("tag", n), attribute.String("state", r.Tag(n).State.String())))
	}
	for i := range r.Coverage {
		for _, c := range r.Coverage[i].Causes {
			m.unknown.Add(m.ctx, 1, metric.WithAttributes(attribute.String("detector", r.Coverage[i].Detector), attribute.String("cause", c)))
		}
	}
}
