// Package window keeps the mean load of an engine over the last while.
//
// kvtracker keeps 30 seconds of each worker for all, the router longer or
// shorter ones where a policy asks for them. A Window is not safe for concurrent
// use; however many samples come, it is a ring of half-second sums.
package window

import "time"

const bucketLength = 500 * time.Millisecond

// Load is a sample of an engine's gauges.
type Load struct {
	Running, Waiting float64
	// KVUsage is the share of KV blocks that running requests use.
	KVUsage float64
}

// Window holds samples. Use New.
type Window struct {
	fresh   time.Duration
	buckets []bucket
	last    Load
	at      time.Time // of last; zero for none
}

type bucket struct {
	slot   int64 // which half second since the Unix epoch
	weight float64
	sum    Load
}

// New returns a window of a length of at least a second. A sample counts until
// the next one, but not longer than fresh.
func New(length, fresh time.Duration) *Window {
	return &Window{fresh: fresh, buckets: make([]bucket, max(2, int(length/bucketLength)))}
}

// Length is the longest mean that the window can give.
func (w *Window) Length() time.Duration { return time.Duration(len(w.buckets)) * bucketLength }

// Last is the newest sample and its time, zero if there is none.
func (w *Window) Last() (Load, time.Time) { return w.last, w.at }

// Add takes a sample. One that is not newer than the last is ignored.
func (w *Window) Add(at time.Time, l Load) {
	if !at.After(w.at) {
		return
	}
	if !w.at.IsZero() {
		w.hold(w.at, at)
	}
	w.last, w.at = l, at
}

// hold counts the last sample from one time to another, as long as it is fresh.
func (w *Window) hold(from, to time.Time) {
	if limit := from.Add(w.fresh); to.After(limit) {
		to = limit
	}
	for from.Before(to) {
		slot := from.UnixNano() / int64(bucketLength)
		end := time.Unix(0, (slot+1)*int64(bucketLength))
		if end.After(to) {
			end = to
		}
		b := &w.buckets[slot%int64(len(w.buckets))]
		if b.slot != slot {
			*b = bucket{slot: slot}
		}
		d := end.Sub(from).Seconds()
		b.weight += d
		b.sum.Running += d * w.last.Running
		b.sum.Waiting += d * w.last.Waiting
		b.sum.KVUsage += d * w.last.KVUsage
		from = end
	}
}

// Mean is the mean weighted by time over some time before the last sample, at
// most the window's length; the sample itself while there is no other.
func (w *Window) Mean(over time.Duration) Load {
	newest := w.at.UnixNano() / int64(bucketLength)
	oldest := newest - int64(min(max(1, int(over/bucketLength)), len(w.buckets)))
	var sum Load
	var weight float64
	for i := range w.buckets {
		if b := &w.buckets[i]; b.slot > oldest {
			weight += b.weight
			sum.Running += b.sum.Running
			sum.Waiting += b.sum.Waiting
			sum.KVUsage += b.sum.KVUsage
		}
	}
	if weight == 0 {
		return w.last
	}
	return Load{Running: sum.Running / weight, Waiting: sum.Waiting / weight, KVUsage: sum.KVUsage / weight}
}
