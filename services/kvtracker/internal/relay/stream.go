package relay

import (
	"context"
	"log/slog"
	"sync"
	"time"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kinference/kinference/internal/bus"
)

// streamWatch notices that the stream of KV events was lost: it lives in memory
// by default, and is made again by whoever publishes next.
type streamWatch struct {
	bus      *bus.Conn
	settings bus.StreamSettings
	every    time.Duration
	lost     func()
	check    chan struct{} // capacity 1: look now

	mu      sync.Mutex
	created time.Time
	highest uint64 // newest ack
}

// acked notes an ack. One below an earlier ack of the same link, which is what
// before is, makes the watch look at once.
func (s *streamWatch) acked(ack *jetstream.PubAck, before uint64) {
	if ack.Duplicate {
		return // names the first copy
	}
	if ack.Sequence <= before {
		signal(s.check)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.highest = max(s.highest, ack.Sequence)
}

func (s *streamWatch) run(ctx context.Context) {
	tick := time.NewTicker(s.every)
	defer tick.Stop()
	for {
		s.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.check:
		}
	}
}

func (s *streamWatch) look(ctx context.Context) {
	if !s.bus.Connected() {
		return
	}
	// Read before asking: acks that come meanwhile must not look lost.
	s.mu.Lock()
	created, highest := s.created, s.highest
	s.mu.Unlock()
	stream, err := s.bus.EnsureKVStream(ctx, s.settings)
	if err != nil {
		return // asked again soon
	}
	info := stream.CachedInfo()
	same := created.IsZero() || info.Created.Equal(created) && info.State.LastSeq >= highest
	s.mu.Lock()
	s.created = info.Created
	if !same {
		s.highest = 0
	}
	s.mu.Unlock()
	if !same {
		s.lost()
	}
}

// reportStore writes the reports that late joiners read, apart from the scrapers
// so that an absent NATS does not hold them up. Only the newest of each worker
// waits.
type reportStore struct {
	bus  *bus.Conn
	log  *slog.Logger
	wake chan struct{}

	mu      sync.Mutex
	pending map[string]*kvtrackerv1.WorkerReport
}

func (s *reportStore) put(r *kvtrackerv1.WorkerReport) {
	s.mu.Lock()
	s.pending[r.GetWorkerSet()+"/"+r.GetWorker()] = r
	s.mu.Unlock()
	signal(s.wake)
}

func (s *reportStore) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		}
		s.mu.Lock()
		batch := s.pending
		s.pending = make(map[string]*kvtrackerv1.WorkerReport, len(batch))
		s.mu.Unlock()
		for key, r := range batch {
			if err := s.bus.StoreReport(ctx, r); err != nil && ctx.Err() == nil {
				s.log.Debug("report not stored", "worker", r.GetWorker(), "err", err)
				s.retry(key, r)
				pause(ctx, 0, time.Second, time.Second)
			}
		}
	}
}

// retry puts r back unless a newer one waits.
func (s *reportStore) retry(key string, r *kvtrackerv1.WorkerReport) {
	s.mu.Lock()
	if _, newer := s.pending[key]; !newer {
		s.pending[key] = r
	}
	s.mu.Unlock()
	signal(s.wake)
}
