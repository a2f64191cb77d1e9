package relay

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kinference/kinference/internal/bus"
)

// instruments are the relay's metrics. The only label about workers is their
// set, which operators name: uids come and go.
type instruments struct {
	batches, bad, overflows, gaps, replays, replayFailures, restarts, clears metric.Int64Counter
	scrapes                                                                  metric.Int64Counter
	connections                                                              metric.Int64UpDownCounter
	lag                                                                      metric.Float64Histogram
}

func newInstruments(m metric.Meter) (*instruments, error) {
	var i instruments
	var errs []error
	counter := func(c *metric.Int64Counter, name, unit, description string) {
		var err error
		*c, err = m.Int64Counter("kinference.kvtracker.relay."+name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, err)
	}
	counter(&i.batches, "batches", "{batch}", "Engine batches passed on.")
	counter(&i.bad, "malformed", "{batch}", "Engine messages or batches that could not be read and were skipped.")
	counter(&i.overflows, "overflows", "{batch}", "Live batches dropped because a queue was full; they are fetched again by replay.")
	counter(&i.gaps, "gaps", "{gap}", "Gaps seen in the sequence of live batches.")
	counter(&i.replays, "replays", "{replay}", "Replays asked of engines, after connects and gaps.")
	counter(&i.replayFailures, "replay.failures", "{replay}", "Replays that got no answer.")
	counter(&i.restarts, "restarts", "{restart}", "Engine processes found to be new behind a known worker.")
	counter(&i.clears, "clears", "{clear}", "Workers whose blocks were cleared, by reason.")
	counter(&i.scrapes, "scrapes", "{scrape}", "Reads of engine metrics, by result.")
	var err error
	i.connections, err = m.Int64UpDownCounter("kinference.kvtracker.relay.connections",
		metric.WithUnit("{connection}"), metric.WithDescription("Open connections to engines' event sockets."))
	errs = append(errs, err)
	i.lag, err = m.Float64Histogram("kinference.kvtracker.relay.lag", metric.WithUnit("s"),
		metric.WithDescription("From the engine's time of a batch until the relay queued it for NATS; clocks of two machines are compared."),
		metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 5, 30))
	return &i, errors.Join(append(errs, err)...)
}

// labels are the attributes of one worker set. They are made once per link,
// because making them costs more than all else about a batch.
type labels struct {
	set  metric.MeasurementOption
	name string
}

func newLabels(w bus.Worker) labels {
	return labels{metric.WithAttributeSet(attribute.NewSet(attribute.String("worker_set", w.SetName()))), w.SetName()}
}

// with adds one more attribute, for things that are rare.
func (l labels) with(key, value string) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(attribute.String("worker_set", l.name), attribute.String(key, value)))
}

func count(c metric.Int64Counter, set metric.MeasurementOption) { c.Add(context.Background(), 1, set) }

func (i *instruments) malformed(l labels)             { count(i.bad, l.set) }
func (i *instruments) overflow(l labels)              { count(i.overflows, l.set) }
func (i *instruments) gap(l labels)                   { count(i.gaps, l.set) }
func (i *instruments) replay(l labels)                { count(i.replays, l.set) }
func (i *instruments) replayFailed(l labels)          { count(i.replayFailures, l.set) }
func (i *instruments) restart(l labels)               { count(i.restarts, l.set) }
func (i *instruments) clear(l labels, reason string)  { count(i.clears, l.with("reason", reason)) }
func (i *instruments) scrape(l labels, result string) { count(i.scrapes, l.with("result", result)) }

func (i *instruments) connected(l labels, n int64) {
	i.connections.Add(context.Background(), n, l.set)
}

// batch counts a batch that the engine published at ts, in seconds.
func (i *instruments) batch(l labels, ts float64) {
	count(i.batches, l.set)
	// Replayed batches are old on purpose.
	if lag := float64(time.Now().UnixMicro())/1e6 - ts; lag >= 0 && lag < 60 {
		i.lag.Record(context.Background(), lag, l.set)
	}
}
