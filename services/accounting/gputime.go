package accounting

import (
	"cmp"
	"context"
	"time"

	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

const (
	// gpuEvery is how often the time of workers is divided among tenants, and gpuLate
	// how many times that passes first: what still runs has no event yet.
	gpuEvery = time.Minute
	gpuLate  = 5
	// relearn is how often weights are learned, from the hour before.
	relearn, learnFrom = 10 * time.Minute, time.Hour
)

// divider divides the time of workers among tenants for the metrics, span after
// span. Capacity does it anew, and better, for any time that is asked for.
type divider struct {
	v       *server
	after   map[string]float64 // by worker: the last sample that was used
	weights map[string]gputime.Weights
	learned time.Time
}

// divideTime counts for the metrics until ctx is done.
func (v *server) divideTime(ctx context.Context) {
	every := cmp.Or(v.GPUEvery, gpuEvery)
	d := &divider{v: v, after: map[string]float64{}, weights: map[string]gputime.Weights{}}
	from := time.Now()
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			to := now.Add(-gpuLate * every)
			if !to.After(from) {
				continue
			}
			if err := d.divide(ctx, from, to); err != nil {
				if ctx.Err() == nil {
					v.log.Warn("the time of workers is not divided", "err", err)
				}
				continue // the next span is the longer
			}
			from = to
		}
	}
}

func unix(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

func (d *divider) divide(ctx context.Context, from, to time.Time) error {
	if time.Since(d.learned) > relearn {
		if err := d.learn(ctx, to); err != nil {
			return err
		}
		d.learned = time.Now()
	}
	requests, err := d.v.served(ctx, ledger.Filter{From: from, To: to})
	if err != nil {
		return err
	}
	// The sample before the span is its beginning.
	for set, o := range d.v.watched.between(unix(from)-60, unix(to)) {
		var states []gputime.State
		for _, s := range o.states {
			if s.At >= d.after[s.Worker] {
				states = append(states, s)
			}
		}
		for _, s := range states {
			d.after[s.Worker] = max(d.after[s.Worker], s.At)
		}
		s := requests[set]
		if s == nil {
			s = &served{}
		}
		w, ok := d.weights[set]
		if !ok {
			w = gputime.Prior(schedule.DefaultSpeeds()[""])
		}
		for _, sp := range gputime.Attribute(w, s.requests, gputime.Intervals(states, interval, stale)) {
			d.v.metrics.divided(ctx, set, sp, s.tenants)
		}
	}
	for worker, at := range d.after { // of workers that are gone
		if unix(to)-at > 3600 {
			delete(d.after, worker)
		}
	}
	return nil
}

func (d *divider) learn(ctx context.Context, to time.Time) error {
	from := to.Add(-learnFrom)
	requests, err := d.v.served(ctx, ledger.Filter{From: from, To: to})
	if err != nil {
		return err
	}
	for set, o := range d.v.watched.between(unix(from), unix(to)) {
		if s := requests[set]; s != nil {
			d.weights[set], _ = gputime.Calibrate(gputime.Prior(schedule.DefaultSpeeds()[""]), s.requests, gputime.Intervals(o.states, interval, stale))
		}
	}
	return nil
}
