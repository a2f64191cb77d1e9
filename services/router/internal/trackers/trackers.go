// Package trackers follows several kvtrackers as if they were one.
//
// Each tracker says in its stream which shard of the worker sets it holds, of how many, and
// whether it has caught up. Trackers of one number of shards are a layout. The router goes by
// the layout of which the most shards can be asked, so that trackers of a new layout may be
// started beside the old ones and take over once they are ready. Of replicas of a shard one is
// followed and asked, as long as it keeps up; if it fails, the next one is asked at once.
// A tracker that rebuilds its index is never asked; one that is late only while no replica of
// its shard keeps up.
//
// The router runs one Set. It is safe for concurrent use; its loops retry for ever and end
// with their context.
package trackers

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/shard"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// Table takes what the trackers say of workers, as if one said it.
type Table interface {
	// Update takes a message.
	Update(now time.Time, m *kvtrackerv1.WatchWorkersResponse)
	// Switch takes a message of another tracker than before, which counts anew.
	Switch(now time.Time, m *kvtrackerv1.WatchWorkersResponse)
	// Away notes that no tracker is followed any more.
	Away()
}

// Tracker is one to follow.
type Tracker struct {
	// URL is for people.
	URL    string
	Client kvtrackerv1connect.KVTrackerServiceClient
}

// Delays between attempts to reach a tracker.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// maxShards bounds what a tracker can make the router remember.
const maxShards = 1024

// Set is the trackers together. Use New.
type Set struct {
	table    Table
	log      *slog.Logger
	trackers []*tracker
	plan     atomic.Pointer[plan]

	mu sync.Mutex
	// followed has, by shard of the plan's layout, the tracker whose word on workers goes to
	// the table; nil: none.
	followed []*tracker
	shown    map[string]string // worker sets by the workers that the table has
}

// tracker is what is known of one.
type tracker struct {
	Tracker
	number int
	// avoided is until when, in Unix nanoseconds, others are asked first, because it did not
	// answer.
	avoided atomic.Int64

	// Guarded by Set.mu.
	open         bool // its stream is, and its listing complete
	anew         bool // it was listed again since it was shown
	shard, count int
	state        kvtrackerv1.TrackerState
	workers      map[string]said
}

// said is the newest word on a worker, and when it came.
type said struct {
	*kvtrackerv1.WorkerState
	at time.Time
}

// plan says whom to ask. It does not change.
type plan struct {
	count  int
	shards [][]*tracker // by shard, best first
	// spare is another layout of which each shard can be asked; nil for none.
	spare *plan
}

// covered is the share of the shards that can be asked.
func (p *plan) covered() float64 {
	n := 0
	for _, list := range p.shards {
		n += min(len(list), 1)
	}
	return float64(n) / float64(max(p.count, 1))
}

// New returns a set of trackers that tells the table.
func New(list []Tracker, table Table, log *slog.Logger) *Set {
	s := &Set{table: table, log: log, shown: map[string]string{}}
	for i, t := range list {
		s.trackers = append(s.trackers, &tracker{Tracker: t, number: i})
	}
	return s
}

// Follow keeps the table in step with the trackers' streams until ctx is done.
func (s *Set) Follow(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, t := range s.trackers {
		g.Go(func() error { return s.follow(ctx, t) })
	}
	return g.Wait()
}

func (s *Set) follow(ctx context.Context, t *tracker) error {
	delay := firstRetry
	for ctx.Err() == nil {
		synced, err := s.stream(ctx, t)
		s.close(t)
		if ctx.Err() != nil {
			return nil
		}
		if synced {
			delay = firstRetry
		}
		if delay == firstRetry { // once per outage, not per attempt
			s.log.Warn("kvtracker is away", "url", t.URL, "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		delay = min(2*delay, lastRetry)
	}
	return nil
}

// stream follows a tracker until its stream ends.
func (s *Set) stream(ctx context.Context, t *tracker) (synced bool, err error) {
	stream, err := t.Client.WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		return false, err
	}
	defer stream.Close()
	listing := map[string]said{}
	for stream.Receive() {
		m, now := stream.Msg(), time.Now()
		if synced {
			s.hear(now, t, m)
			continue
		}
		for _, w := range m.Workers {
			listing[w.Worker] = said{w, now}
		}
		if synced = m.Synced; synced {
			s.opened(now, t, m, listing)
		}
	}
	return synced, stream.Err()
}

// opened takes the whole listing of a tracker.
func (s *Set) opened(now time.Time, t *tracker, m *kvtrackerv1.WatchWorkersResponse, listing map[string]said) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.open, t.anew, t.workers = true, true, listing
	t.describe(m)
	s.choose(now)
}

// hear takes a later message of a tracker.
func (s *Set) hear(now time.Time, t *tracker, m *kvtrackerv1.WatchWorkersResponse) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range m.Workers {
		t.workers[w.Worker] = said{w, now}
	}
	for _, id := range m.Removed {
		delete(t.workers, id)
	}
	if slices.Contains(s.followed, t) {
		s.show(m)
		s.table.Update(now, m)
	}
	if t.describe(m) {
		s.choose(now)
	}
}

// show notes what the table is told.
func (s *Set) show(m *kvtrackerv1.WatchWorkersResponse) {
	for _, w := range m.Workers {
		s.shown[w.Worker] = w.WorkerSet
	}
	for _, id := range m.Removed {
		delete(s.shown, id)
	}
}

// close notes that a tracker's stream has ended.
func (s *Set) close(t *tracker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.open {
		t.open = false
		s.choose(time.Now())
	}
}

// describe notes what a tracker says of itself, and tells whether that is news.
func (t *tracker) describe(m *kvtrackerv1.WatchWorkersResponse) bool {
	index, count, state := int(m.GetShard().GetIndex()), int(max(m.GetShard().GetCount(), 1)), m.GetState()
	if index >= count || count > maxShards {
		state = kvtrackerv1.TrackerState_TRACKER_STATE_REBUILDING // it makes no sense
	}
	news := index != t.shard || count != t.count || state != t.state
	t.shard, t.count, t.state = index, count, state
	return news
}

// usable tells whether a tracker may be asked.
func (t *tracker) usable() bool {
	return t.open && t.state != kvtrackerv1.TrackerState_TRACKER_STATE_REBUILDING
}

func (t *tracker) late() bool { return t.state == kvtrackerv1.TrackerState_TRACKER_STATE_LATE }

// choose makes a plan of the trackers that can be asked, and follows the first of each
// shard. Called with mu held.
func (s *Set) choose(now time.Time) {
	old := s.plan.Load()
	p := s.layout(old)
	if p.count == 0 {
		s.plan.Store(nil)
		if old != nil {
			s.table.Away()
		}
		return // whom it follows stays, should they come back
	}
	if old == nil || old.count != p.count {
		if old != nil {
			s.log.Info("kvtracker has another number of shards", "shards", p.count, "before", old.count)
		}
		if len(s.followed) != p.count {
			s.followed = make([]*tracker, p.count)
		}
	}
	s.plan.Store(p)
	shown := 0
	for i, list := range p.shards {
		if len(list) == 0 || list[0] == s.followed[i] && !list[0].anew {
			continue
		}
		t, same := list[0], list[0] == s.followed[i]
		s.followed[i], t.anew = t, false
		m := s.listing(now, i, p.count, t)
		s.show(m)
		if same {
			s.table.Update(now, m)
		} else {
			s.table.Switch(now, m)
		}
		shown++
	}
	if old == nil && shown == 0 {
		s.table.Update(now, &kvtrackerv1.WatchWorkersResponse{Synced: true})
	}
}

// listing is all that the tracker of a shard knows, and what the table knows of that shard
// beyond it.
func (s *Set) listing(now time.Time, index, count int, t *tracker) *kvtrackerv1.WatchWorkersResponse {
	m := &kvtrackerv1.WatchWorkersResponse{Synced: true}
	for _, w := range t.workers {
		m.Workers = append(m.Workers, w.aged(now))
	}
	for id, set := range s.shown {
		if _, there := t.workers[id]; !there && shard.Of(set, count) == index {
			m.Removed = append(m.Removed, id)
		}
	}
	return m
}

// layout makes the plan to go by: that of which the most shards can be asked, the present one
// if it is as good.
func (s *Set) layout(old *plan) *plan {
	best := &plan{}
	present := func(p *plan) int { return boolean(old != nil && old.count == p.count) }
	all := s.layouts()
	for _, p := range all {
		if cmp.Or(cmp.Compare(p.covered(), best.covered()), cmp.Compare(present(p), present(best)), cmp.Compare(p.count, best.count)) > 0 {
			best = p
		}
	}
	for _, p := range all {
		if p != best && p.covered() == 1 {
			best.spare = p
		}
	}
	return best
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// layouts are the plans that the trackers which can be asked allow, by number of shards.
func (s *Set) layouts() map[int]*plan {
	all := map[int]*plan{}
	for _, t := range s.trackers {
		if !t.usable() {
			continue
		}
		p := all[t.count]
		if p == nil {
			p = &plan{count: t.count, shards: make([][]*tracker, t.count)}
			all[t.count] = p
		}
		p.shards[t.shard] = append(p.shards[t.shard], t)
	}
	for _, p := range all {
		for i, list := range p.shards {
			slices.SortStableFunc(list, func(a, b *tracker) int { return cmp.Compare(s.rank(i, a), s.rank(i, b)) })
		}
	}
	return all
}

// rank orders the replicas of a shard, best first: the one that is followed stays so while it
// keeps up.
func (s *Set) rank(i int, t *tracker) int {
	r := 1
	if t.late() {
		r += 2
	}
	if i < len(s.followed) && s.followed[i] == t {
		r--
	}
	return r
}

// aged is the state with the age that its sample has now.
func (w said) aged(now time.Time) *kvtrackerv1.WorkerState {
	if w.SampleAge == nil {
		return w.WorkerState
	}
	c := proto.CloneOf(w.WorkerState)
	c.SampleAge = durationpb.New(w.SampleAge.AsDuration() + now.Sub(w.at))
	return c
}

// Followed tells whether a tracker of every shard can be asked.
func (s *Set) Followed() bool {
	p := s.plan.Load()
	return p != nil && !slices.ContainsFunc(p.shards, func(list []*tracker) bool { return len(list) == 0 })
}

// States counts the trackers by what they are good for: asked, spare, late, rebuilding, away.
// Late ones may be asked where there is no other; spare ones are replicas and other layouts.
func (s *Set) States() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := map[string]int{"asked": 0, "spare": 0, "late": 0, "rebuilding": 0, "away": 0}
	for _, t := range s.trackers {
		switch {
		case !t.open:
			n["away"]++
		case !t.usable():
			n["rebuilding"]++
		case t.late():
			n["late"]++
		case slices.Contains(s.followed, t):
			n["asked"]++
		default:
			n["spare"]++
		}
	}
	return n
}
