package gossip

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/schedule"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	// maxBytes is about the size at which a message is sent.
	maxBytes = 256 << 10
	// maxLessons bounds the workers in one message.
	maxLessons = 1000
	// longest bounds what is said of predictions: a message that says more is
	// refused (internal/bus), with all that is in it.
	longest = time.Hour
)

var kinds = map[schedule.DeltaKind]routerv1.GossipKind{
	schedule.Routed: routerv1.GossipKind_GOSSIP_KIND_ROUTED,
	schedule.Began:  routerv1.GossipKind_GOSSIP_KIND_FIRST_TOKEN,
	schedule.Ended:  routerv1.GossipKind_GOSSIP_KIND_DONE,
	schedule.Waits:  routerv1.GossipKind_GOSSIP_KIND_WAITS,
}

var words = map[routerv1.GossipKind]schedule.DeltaKind{
	routerv1.GossipKind_GOSSIP_KIND_ROUTED:      schedule.Routed,
	routerv1.GossipKind_GOSSIP_KIND_FIRST_TOKEN: schedule.Began,
	routerv1.GossipKind_GOSSIP_KIND_DONE:        schedule.Ended,
	routerv1.GossipKind_GOSSIP_KIND_WAITS:       schedule.Waits,
}

// batches are the messages that hold deltas, in their order.
func batches(now time.Time, list []schedule.Delta) []*routerv1.Gossip {
	var out []*routerv1.Gossip
	size := maxBytes
	for i := range list {
		e := event(now, &list[i])
		if size >= maxBytes {
			out, size = append(out, &routerv1.Gossip{}), 0
		}
		last := out[len(out)-1]
		last.Events = append(last.Events, e)
		size += 64 + len(e.Request) + len(e.Worker) + len(e.Class) + len(e.Group) + 8*len(e.BlockHashes)
	}
	return out
}

func event(now time.Time, d *schedule.Delta) *routerv1.GossipEvent {
	e := &routerv1.GossipEvent{Kind: kinds[d.Kind], Request: d.ID, Age: durationpb.New(max(0, now.Sub(d.At)))}
	if d.Kind != schedule.Routed && d.Kind != schedule.Waits {
		return e
	}
	e.Worker, e.Class, e.Group, e.Whole = d.Worker, d.Class, d.Group, d.Whole
	e.Tokens, e.Cached, e.MaxTokens, e.BlockSize, e.Stride = uint32(d.Tokens), uint32(d.Cached), uint32(d.MaxTokens), uint32(d.BlockSize), uint32(d.Stride)
	e.Work, e.Ttft = durationpb.New(min(d.Work, longest)), durationpb.New(min(d.TTFT, longest))
	e.BlockHashes = make([]uint64, len(d.Hashes))
	for i, h := range d.Hashes {
		e.BlockHashes[i] = uint64(h)
	}
	return e
}

// deltas are what a message says that was sent at a time of our clock.
func deltas(at time.Time, list []*routerv1.GossipEvent) []schedule.Delta {
	out := make([]schedule.Delta, len(list))
	for i, e := range list {
		d := &out[i]
		d.Kind, d.ID, d.At = words[e.Kind], e.Request, at.Add(-e.GetAge().AsDuration())
		if d.Kind != schedule.Routed && d.Kind != schedule.Waits {
			continue
		}
		d.Worker, d.Class, d.Group, d.Whole = e.Worker, e.Class, e.Group, e.Whole
		d.Tokens, d.Cached, d.MaxTokens, d.BlockSize, d.Stride = int(e.Tokens), int(e.Cached), int(e.MaxTokens), int(e.BlockSize), int(e.Stride)
		d.Work, d.TTFT = e.GetWork().AsDuration(), e.GetTtft().AsDuration()
		d.Hashes = make([]kvhash.Hash, len(e.BlockHashes))
		for j, h := range e.BlockHashes {
			d.Hashes[j] = kvhash.Hash(h)
		}
	}
	return out
}

// lessons are the messages that hold what was learned; at least one.
func lessons(learned map[string]schedule.Learned) []*routerv1.Gossip {
	out := []*routerv1.Gossip{{}}
	for worker, l := range learned {
		last := out[len(out)-1]
		if len(last.Learned) == maxLessons {
			last = &routerv1.Gossip{}
			out = append(out, last)
		}
		last.Learned = append(last.Learned, &routerv1.GossipLearned{
			Worker: worker, Slowness: l.Slowness, Samples: uint32(max(0, l.Samples)), Reuse: l.Reuse, Hits: uint32(max(0, l.Hits)),
		})
	}
	return out
}

func learned(list []*routerv1.GossipLearned) map[string]schedule.Learned {
	out := make(map[string]schedule.Learned, len(list))
	for _, l := range list {
		out[l.Worker] = schedule.Learned{Slowness: l.Slowness, Samples: int(l.Samples), Reuse: l.Reuse, Hits: int(l.Hits)}
	}
	return out
}
