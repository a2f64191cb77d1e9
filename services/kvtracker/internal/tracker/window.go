package tracker

import (
	"time"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

const (
	windowLength = 30 * time.Second
	bucketLength = 500 * time.Millisecond
	numBuckets   = int(windowLength / bucketLength)
)

// load is a sample of an engine's gauges.
type load struct{ running, waiting, kvUsage float64 }

func loadOf(l *kvtrackerv1.Load) load {
	return load{running: l.GetRunning(), waiting: l.GetWaiting(), kvUsage: l.GetKvUsage()}
}

func (l load) proto() *kvtrackerv1.Load {
	return &kvtrackerv1.Load{Running: l.running, Waiting: l.waiting, KvUsage: l.kvUsage}
}

// window keeps the mean load of the last 30 seconds, weighted by time: a sample
// counts until the next one, but not longer than it is fresh. However many
// samples come, it is a ring of half-second sums.
type window struct {
	buckets [numBuckets]struct {
		slot   int64 // which half second since the epoch
		weight float64
		sum    load
	}
	last load
	at   time.Time // of last; zero for none
}

// add takes a sample. Samples must come in the order of their time.
func (w *window) add(at time.Time, l load) {
	if !w.at.IsZero() {
		w.hold(w.at, at)
	}
	w.last, w.at = l, at
}

// hold counts the last sample from one time to another, as long as it is fresh.
func (w *window) hold(from, to time.Time) {
	if limit := from.Add(staleAfter); to.After(limit) {
		to = limit
	}
	for from.Before(to) {
		slot := from.UnixNano() / int64(bucketLength)
		end := time.Unix(0, (slot+1)*int64(bucketLength))
		if end.After(to) {
			end = to
		}
		b := &w.buckets[slot%int64(numBuckets)]
		if b.slot != slot {
			b.slot, b.weight, b.sum = slot, 0, load{}
		}
		d := end.Sub(from).Seconds()
		b.weight += d
		b.sum.running += d * w.last.running
		b.sum.waiting += d * w.last.waiting
		b.sum.kvUsage += d * w.last.kvUsage
		from = end
	}
}

// mean is the mean over the 30 s before the last sample; the sample itself
// while there is no other.
func (w *window) mean() load {
	newest := w.at.UnixNano() / int64(bucketLength)
	var sum load
	var weight float64
	for i := range w.buckets {
		if b := &w.buckets[i]; b.slot > newest-int64(numBuckets) {
			weight += b.weight
			sum.running += b.sum.running
			sum.waiting += b.sum.waiting
			sum.kvUsage += b.sum.kvUsage
		}
	}
	if weight == 0 {
		return w.last
	}
	return load{running: sum.running / weight, waiting: sum.waiting / weight, kvUsage: sum.kvUsage / weight}
}
