package accounting

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/accounting/internal/gputime"
	"github.com/kinference/kinference/services/accounting/internal/ledger"
)

const (
	// gpuEvery is the length of the spans that the time of workers is divided in, and
	// gpuLate how many of them pass first: what still runs has no event yet.
	gpuEvery = time.Minute
	gpuLate  = 5
	// gpuPatience is how many spans a service waits for another one that watched the
	// workers when it did not itself.
	gpuPatience = 3 * gpuLate
	// gpuMargin is how many spans before and after one are looked at with it: who
	// generated beside whom is told by whole answers.
	gpuMargin = 2
	// gpuBehind is how many spans old the events may be that are taken now, before a span
	// waits for the ledger to catch up, for half of gpuReach.
	gpuBehind = 2
	// gpuReach is how far back a service that was away begins: what it watched is gone.
	gpuReach = 90 * time.Minute
	// relearn is how often weights are learned, from the hour before.
	relearn, learnFrom = 10 * time.Minute, time.Hour
)

// divider divides the time of workers among requests, span after span, for the
// ledger and the metrics. Of several services that share a ledger one divides each
// span. Capacity does it anew, and better, for any time that is asked for.
type divider struct {
	v       *server
	every   time.Duration
	since   time.Time // when the workers were first watched
	weights map[string]gputime.Weights
	learned time.Time
}

// divideTime divides until ctx is done.
func (v *server) divideTime(ctx context.Context) {
	d := &divider{v: v, every: cmp.Or(v.GPUEvery, gpuEvery), since: time.Now(), weights: map[string]gputime.Weights{}}
	t := time.NewTicker(d.every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			for more := true; more; {
				var err error
				if more, err = d.next(ctx, now); err != nil {
					if ctx.Err() == nil {
						v.log.Warn("the time of workers is not divided", "err", err)
					}
					break // later
				}
			}
		}
	}
}

func unix(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

// next divides the next span, if it is old enough.
func (d *divider) next(ctx context.Context, now time.Time) (more bool, err error) {
	from, err := d.v.ledger.Divided(ctx, now.Truncate(d.every))
	if err != nil {
		return false, err
	}
	if oldest := now.Add(-gpuReach).Truncate(d.every); from.Before(oldest) {
		_, _, err := d.v.ledger.Divide(ctx, from, oldest, nil, nil)
		return err == nil, err
	}
	if from.After(now) && !d.v.ledger.Shared() { // the clock was set back: else nothing would be divided until it is there again
		_, _, err := d.v.ledger.Divide(ctx, from, now.Truncate(d.every), nil, nil)
		return false, err
	}
	to := from.Truncate(d.every).Add(d.every)
	others := d.v.ledger.Shared() && from.Before(d.since) // may have watched then
	switch late := now.Sub(to); {
	case late < gpuLate*d.every, others && late < gpuPatience*d.every:
		return false, nil
	case late < gpuReach/2 && d.v.behind(ctx, gpuBehind*d.every):
		return false, nil
	}
	return true, d.divide(ctx, from, to)
}

// behind tells whether events wait on the stream and what came last to the ledger is
// older than most, as after a time without its database: the time of workers would go to
// nobody before their requests are known.
func (v *server) behind(ctx context.Context, most time.Duration) bool {
	if v.conn == nil || !v.conn.Connected() || time.Since(time.UnixMicro(v.stored.Load())) <= most {
		return false
	}
	lag, ok := v.lag(ctx)
	return !ok || lag > 0 // who cannot say how many may have some
}

// length is that of intervals.
func (d *divider) length() float64 { return min(interval, d.every.Seconds()) }

func (d *divider) divide(ctx context.Context, from, to time.Time) error {
	if time.Since(d.learned) > relearn {
		if err := d.learn(ctx, to); err != nil {
			return err
		}
		d.learned = time.Now()
	}
	margin := gpuMargin * d.every
	requests, all, err := d.v.served(ctx, ledger.Filter{From: from.Add(-margin), To: to.Add(margin)})
	if err == nil && !all { // those of the span come first
		requests, all, err = d.v.served(ctx, ledger.Filter{From: from, To: to})
	}
	if err != nil {
		return err
	}
	if !all {
		d.v.log.Warn("the time of workers is divided among a part of the requests: there are too many", "requests", d.v.maxEvents(), "from", from)
	}
	var shares []ledger.Share
	var times []ledger.WorkerTime
	var count []func()
	for set, o := range d.v.watched.between(unix(from.Add(-margin)), unix(to.Add(margin))+stale) {
		s := requests[set]
		if s == nil {
			s = &served{}
		}
		w, ok := d.weights[set]
		if !ok {
			w = d.v.prior(set)
		}
		const rounding = 1e-3
		splits := slices.DeleteFunc(gputime.Attribute(w, s.requests, gputime.Intervals(o.states, d.length(), stale)), func(sp gputime.Split) bool {
			return sp.From < unix(from)-rounding || sp.To > unix(to)+rounding
		})
		if len(splits) == 0 {
			continue
		}
		of, t := wholeMicros(s, splits)
		shares = append(shares, of...)
		t.WorkerSet = set
		d.v.price(&t, s)
		times = append(times, t)
		count = append(count, func() {
			for _, sp := range splits {
				d.v.metrics.divided(ctx, set, sp, s.tenants)
			}
		})
	}
	spent, done, err := d.v.ledger.Divide(ctx, from, to, shares, times)
	if err != nil || !done {
		return err
	}
	for _, f := range count {
		f()
	}
	for _, s := range spent {
		d.v.metrics.spentTime(ctx, s)
	}
	return nil
}

// wholeMicros adds up splits by request, in whole µs of which the sum is the time that
// passed.
func wholeMicros(s *served, splits []gputime.Split) (shares []ledger.Share, t ledger.WorkerTime) {
	micros := func(seconds float64) time.Duration { return time.Duration(math.Round(seconds*1e6)) * time.Microsecond }
	sums := map[int]*gputime.Share{}
	var order []int
	wall, other := 0.0, 0.0
	for _, sp := range splits {
		wall += sp.To - sp.From
		other += sp.Other
		for _, sh := range sp.Shares {
			if sums[sh.Request] == nil {
				sums[sh.Request] = &gputime.Share{}
				order = append(order, sh.Request)
			}
			sums[sh.Request].Prefill += sh.Prefill
			sums[sh.Request].Decode += sh.Decode
		}
	}
	for _, i := range order {
		share := ledger.Share{ID: s.ids[i], Prefill: micros(sums[i].Prefill), Decode: micros(sums[i].Decode)}
		if used := share.Prefill + share.Decode; used > 0 {
			shares = append(shares, share)
			t.Used += used
		}
	}
	t.Other = micros(other)
	t.Idle = max(micros(wall)-t.Used-t.Other, 0)
	return shares, t
}

func (d *divider) learn(ctx context.Context, to time.Time) error {
	span, err := d.v.latest(ctx, ledger.Filter{From: to.Add(-learnFrom), To: to})
	if err != nil {
		return err
	}
	requests, _, err := d.v.served(ctx, span)
	if err != nil {
		return err
	}
	for set, o := range d.v.watched.between(unix(span.From), unix(to)) {
		if s := requests[set]; s != nil {
			d.weights[set], _ = gputime.Calibrate(d.v.prior(set), s.requests, gputime.Intervals(o.states, interval, stale))
		}
	}
	return nil
}

// workerSets is what the catalog says of worker sets.
type workerSets struct {
	sets   map[string]*routerv1.WorkerSet
	prices map[string]*routerv1.Price
}

func workerSetsOf(c *routerv1.Catalog) *workerSets {
	out := &workerSets{map[string]*routerv1.WorkerSet{}, map[string]*routerv1.Price{}}
	for _, s := range c.GetWorkerSets() {
		out.sets[s.GetName()] = s
	}
	for _, p := range c.GetPrices() {
		if p.GetHourly() != "" {
			out.prices[p.GetBackend()] = p
		}
	}
	return out
}

// prior are the weights of a worker set before anything was learned: those of its
// class, with the tokens of its steps.
func (v *server) prior(set string) gputime.Weights {
	speeds := schedule.DefaultSpeeds()
	speed := speeds[""]
	s := (*routerv1.WorkerSet)(nil)
	if known := v.sets.Load(); known != nil {
		s = known.sets[set]
	}
	if of, ok := speeds[s.GetAccelerator()]; ok {
		speed = of
	}
	if n := s.GetMaxBatchedTokens(); n > 0 {
		speed.Chunk = int(n)
	}
	return gputime.Prior(speed)
}

// price writes what the time of a worker set costs now, or did for its last request.
func (v *server) price(t *ledger.WorkerTime, s *served) {
	if known := v.sets.Load(); known != nil {
		if p := known.prices[t.WorkerSet]; p != nil {
			t.PriceVersion, t.Currency, t.HourlyPrice = p.GetVersion(), p.GetCurrency(), p.GetHourly()
			return
		}
	}
	if c := s.cost; c.GetHourlyPrice() != "" {
		t.PriceVersion, t.Currency, t.HourlyPrice = c.GetPriceVersion(), c.GetCurrency(), c.GetHourlyPrice()
	}
}
