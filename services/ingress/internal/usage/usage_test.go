package usage_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bus"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
	"github.com/kinference/kinference/services/ingress/internal/usage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stream stands for JetStream: it can be away, lose acknowledgements and lose
// what it had stored.
type stream struct {
	mu     sync.Mutex
	away   bool
	events map[string][]*usagev1.Usage // by id
	last   uint64
	fail   int // so many events are stored without an acknowledgement
	calls  int
}

func newStream() *stream { return &stream{events: map[string][]*usagev1.Usage{}} }

func (s *stream) PublishUsage(_ context.Context, messages []bus.UsageMessage) (r bus.UsageResult) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	for _, m := range messages {
		if s.away {
			r.Left = append(r.Left, m)
			r.Err = context.DeadlineExceeded
			continue
		}
		u, err := bus.DecodeUsage(m.Data)
		if err != nil || u.GetId() != m.ID {
			panic(fmt.Sprint("bad event ", err))
		}
		s.events[m.ID] = append(s.events[m.ID], u)
		s.last++
		if s.fail > 0 {
			s.fail--
			r.Left = append(r.Left, m)
			r.Err = context.DeadlineExceeded
			continue
		}
		r.High = s.last
		if r.Low == 0 {
			r.Low = s.last
		}
	}
	return r
}

func (s *stream) set(f func(s *stream)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s)
}

func (s *stream) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.events)
}

func (s *stream) get(id string) []*usagev1.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events[id]
}

func open(t *testing.T, dir string, s *stream, change func(*usage.Settings)) *usage.Recorder {
	t.Helper()
	set := usage.Settings{Dir: dir, Ingress: "test", Publisher: s}
	if change != nil {
		change(&set)
	}
	r, err := usage.Open(set)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run runs a Recorder until stop is called, which a kill does not do.
func run(t *testing.T, r *usage.Recorder) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		<-tick.C
	}
}

func record(i int) *meter.Record {
	now := time.Now()
	return &meter.Record{
		ID: fmt.Sprintf("id-%05d", i), RequestID: "req", Received: now, Sent: now, Ended: now, Tenants: []string{"ns/team", "ns/org"},
		Model: "m", Worker: "w/0", Route: "/v1/chat/completions", Attempts: 1, Status: 200, Outcome: meter.OK,
		Tokens: meter.Tokens{Input: meter.Report(int64(i)), Output: meter.Report(0)},
	}
}

// copyDir takes what a killed process leaves: its files, without the lock.
func copyDir(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
	return to
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(dir, "*.usage"))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// The longest event that the bounds of its parts allow is no third of the longest entry.
func TestLongestEvent(t *testing.T) {
	name := func(n int) string { return strings.Repeat(`"`, n) } // each takes two bytes
	full := name(253) + "/" + name(253)
	r := record(1)
	r.RequestID, r.User, r.KeyID, r.CostCenter = name(128), name(1024+1+512), name(12), name(128) // issuer#subject
	r.Tenants = slices.Repeat([]string{full}, 8)
	r.Model, r.ServedModel = name(256), name(256)
	r.Pool, r.WorkerSet, r.Provider, r.Rule, r.Worker = full, full, full, name(63), full
	r.Tags = slices.Repeat([]string{strings.Repeat("x", 64)}, 512)
	if n := len(bus.EncodeUsage(nil, usage.Event(r, name(253)))); n > 256<<10/3 {
		t.Errorf("it has %d bytes", n)
	}
	s := newStream()
	u := open(t, t.TempDir(), s, nil)
	run(t, u)
	u.Begin(r).End(r)
	eventually(t, "it is published", func() bool { return s.count() == 1 })
}

func TestEventsArePublishedAndRemoved(t *testing.T) {
	dir, s := t.TempDir(), newStream()
	r := open(t, dir, s, func(s *usage.Settings) { s.SegmentBytes = 8 << 10 })
	stop := run(t, r)
	for i := range 500 {
		r.Begin(record(i)).End(record(i))
	}
	eventually(t, "all are published", func() bool { return s.count() == 500 })
	u := s.get("id-00007")
	if len(u) != 1 || u[0].GetTokens().GetInput() != 7 || u[0].GetTokens().Output == nil || u[0].GetTokens().CachedInput != nil || u[0].GetRecovered() {
		t.Errorf("got %v", u)
	}
	stop()
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("files are left: %v", left)
	}
	if st := r.Stats(); st.Published != 500 || st.Dropped != 0 || st.Running != 0 {
		t.Errorf("got %+v", st)
	}
}

// While NATS is away everything waits; the next process publishes it.
func TestAwayThenKilled(t *testing.T) {
	dir, s := t.TempDir(), newStream()
	s.away = true
	r := open(t, dir, s, func(s *usage.Settings) { s.SegmentBytes = 4 << 10; s.Progress = time.Millisecond })
	run(t, r)
	for i := range 100 {
		r.Begin(record(i)).End(record(i))
	}
	// Three are under way when the process is killed: one without a sign of life,
	// one with some tokens, and one whose prompt was counted only.
	r.Begin(record(100))
	some, counted := r.Begin(record(101)), r.Begin(record(102))
	some.Progress(40, 0)
	some.Progress(41, 17)
	counted.Progress(42, -1)
	var killed string
	eventually(t, "progress is on disk", func() bool {
		killed = copyDir(t, dir)
		check := newStream()
		second := open(t, copyDir(t, killed), check, nil)
		stop := run(t, second)
		defer stop()
		eventually(t, "all are published", func() bool { return check.count() == 103 })
		return check.get("id-00101")[0].GetTokens().GetOutput() == 17 && check.get("id-00102")[0].GetTokens().GetInput() == 42
	})

	after := newStream()
	second := open(t, killed, after, nil)
	if n := second.Stats().Recovered; n != 3 {
		t.Errorf("%d were recovered, want 3", n)
	}
	stop := run(t, second)
	eventually(t, "all are published", func() bool { return after.count() == 103 })
	stop()
	for id, want := range map[string]struct{ input, output uint32 }{"id-00100": {100, 0}, "id-00101": {41, 17}, "id-00102": {42, 0}} {
		u := after.get(id)[0]
		if !u.GetRecovered() || u.GetOutcome() != usagev1.Outcome_OUTCOME_FAILED || u.GetTokens().GetInput() != want.input ||
			u.GetTokens().GetOutput() != want.output || !u.GetTokens().GetOutputEstimated() || u.GetTenants()[0] != "ns/team" {
			t.Errorf("%s: got %v, want %v", id, u, want)
		}
	}
	if u := after.get("id-00099")[0]; u.GetRecovered() {
		t.Errorf("a request that was over is recovered: %v", u)
	}
	// A third process finds nothing to do.
	third := open(t, killed, after, nil)
	if st := third.Stats(); st.Recovered != 0 || st.Bytes != 0 {
		t.Errorf("the third process finds %+v", st)
	}
	run(t, third)()
}

// An acknowledgement that does not come makes an event come again, not vanish.
func TestLostAcknowledgements(t *testing.T) {
	s := newStream()
	s.fail = 30
	r := open(t, t.TempDir(), s, nil)
	for i := range 100 {
		r.Begin(record(i)).End(record(i))
	}
	run(t, r) // all are there: a first batch of one event would try it thirty times, at ever longer intervals
	eventually(t, "all are acknowledged", func() bool { return r.Stats().Pending == 0 })
	if s.count() != 100 {
		t.Errorf("%d events, want 100", s.count())
	}
}

// A stream that lost what it had acknowledged gets it again.
func TestStreamLosesAcknowledged(t *testing.T) {
	s := newStream()
	r := open(t, t.TempDir(), s, func(s *usage.Settings) { s.SegmentBytes = 4 << 10 })
	run(t, r)
	for i := range 50 {
		r.Begin(record(i)).End(record(i))
	}
	eventually(t, "all are acknowledged", func() bool { return s.count() == 50 && r.Stats().Pending == 0 })
	s.set(func(s *stream) { s.last, s.events = 10, map[string][]*usagev1.Usage{} })
	r.Begin(record(50)).End(record(50))
	eventually(t, "all came again", func() bool { return s.count() == 51 })
	if r.Stats().Replayed == 0 {
		t.Error("the replay is not counted")
	}
}

// A full spool drops and counts, and never blocks; what is in it is not lost.
func TestFull(t *testing.T) {
	s := newStream()
	s.away = true
	var log lockedBuffer
	r := open(t, t.TempDir(), s, func(set *usage.Settings) {
		set.MaxBytes, set.SegmentBytes, set.Log = 20<<10, 4<<10, slog.New(slog.NewTextHandler(&log, nil))
	})
	run(t, r)
	for i := range 200 {
		r.Begin(record(i)).End(record(i))
	}
	st := r.Stats()
	if st.Dropped == 0 || st.Bytes > 20<<10 || st.Running != 0 {
		t.Errorf("got %+v", st)
	}
	s.set(func(s *stream) { s.away = false })
	want := 200 - int(st.Dropped)
	eventually(t, "what was kept is published", func() bool { return s.count() == want })
	eventually(t, "there is room again", func() bool { r.Begin(record(999)).End(record(999)); return s.get("id-00999") != nil })
	if n := bytes.Count(log.Bytes(), []byte("usage events are lost")); n != 1 {
		t.Errorf("the loss is logged %d times, want once", n)
	}
}

// A full disk costs events, which are counted, and nothing else: files, say, that are
// left open with each try.
func TestDiskFull(t *testing.T) {
	s, dir := newStream(), t.TempDir()
	s.away = true
	r := open(t, dir, s, func(set *usage.Settings) { set.SegmentBytes = 4 << 10 })
	run(t, r)
	for i := range 20 {
		r.Begin(record(i)).End(record(i))
	}
	before := len(files(t, dir))
	usage.Disk(r, func(f *os.File, b []byte, at int64) (int, error) {
		n, _ := f.WriteAt(b[:len(b)/2], at)
		return n, syscall.ENOSPC
	})
	for i := range 300 {
		r.Begin(record(100 + i)).End(record(100 + i))
	}
	if n := len(files(t, dir)); n > before || r.Stats().Dropped != 300 || r.Stats().Running != 0 {
		t.Errorf("%d files, %d before; %+v", n, before, r.Stats())
	}
	usage.Disk(r, (*os.File).WriteAt)
	s.set(func(s *stream) { s.away = false })
	r.Begin(record(999)).End(record(999))
	eventually(t, "what was kept and what came later is published", func() bool { return s.count() == 21 && r.Stats().Pending == 0 })
}

// On a full disk files that are kept though they are published make room.
func TestDiskFullOfKept(t *testing.T) {
	const room = 20 << 10
	s, dir := newStream(), t.TempDir()
	r := open(t, dir, s, func(set *usage.Settings) { set.SegmentBytes = 4 << 10 })
	usage.Disk(r, func(f *os.File, b []byte, at int64) (int, error) {
		used := int64(len(b))
		for _, name := range files(t, dir) {
			info, err := os.Stat(name)
			if err != nil {
				t.Error(err)
				return 0, err
			}
			used += info.Size()
		}
		if used > room {
			return 0, syscall.ENOSPC
		}
		return f.WriteAt(b, at)
	})
	run(t, r)
	for i := range 100 {
		r.Begin(record(i)).End(record(i))
		eventually(t, "it is published", func() bool { return r.Stats().Pending == 0 })
	}
	if st := r.Stats(); st.Dropped > 0 || s.count() != 100 {
		t.Errorf("%d events; %+v", s.count(), st)
	}
}

// A file that was not there when the spool was opened, of a request that ended after
// its process had let go of the folder, is in nobody's way.
func TestLateFile(t *testing.T) {
	s, dir := newStream(), t.TempDir()
	r := open(t, dir, s, nil)
	if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%020d.usage", 1)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, r)
	r.Begin(record(1)).End(record(1))
	eventually(t, "the event is published", func() bool { return s.get("id-00001") != nil })
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) Bytes() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bytes.Clone(b.b.Bytes())
}

// Files that a loss of power tore give what can be read of them.
func TestTornFiles(t *testing.T) {
	dir, s := t.TempDir(), newStream()
	s.away = true
	r := open(t, dir, s, func(s *usage.Settings) { s.SegmentBytes = 4 << 10 })
	run(t, r)
	for i := range 40 {
		r.Begin(record(i)).End(record(i))
	}
	for name, tear := range map[string]func(b []byte) []byte{
		"cut":     func(b []byte) []byte { return b[:len(b)-5] },
		"flipped": func(b []byte) []byte { b[len(b)-20] ^= 1; return b },
		"zeros":   func(b []byte) []byte { return append(b, make([]byte, 4096)...) },
		"length":  func(b []byte) []byte { b[3] = 0xff; return b },
	} {
		t.Run(name, func(t *testing.T) {
			torn := copyDir(t, dir)
			first := files(t, torn)[0]
			b, err := os.ReadFile(first)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(first, tear(b), 0o600); err != nil {
				t.Fatal(err)
			}
			after := newStream()
			second := open(t, torn, after, nil)
			stop := run(t, second)
			eventually(t, "the rest is published", func() bool { return second.Stats().Pending == 0 })
			if st := second.Stats(); st.Corrupt == 0 || after.count() < 20 || after.get("id-00039") == nil {
				t.Errorf("got %+v and %d events", st, after.count())
			}
			stop()
		})
	}
}

// Long answers do not keep the files of others, and outlive those themselves.
func TestLongRequestKeepsNoFiles(t *testing.T) {
	dir, s := t.TempDir(), newStream()
	r := open(t, dir, s, func(s *usage.Settings) { s.SegmentBytes, s.Keep = 4<<10, time.Nanosecond })
	long := r.Begin(record(0))
	stop := run(t, r)
	for i := range 300 {
		r.Begin(record(i + 1)).End(record(i + 1))
	}
	eventually(t, "the files of the others are gone", func() bool {
		usage.Tidy(r)
		return len(files(t, dir)) <= 2
	})
	killed := open(t, copyDir(t, dir), newStream(), nil)
	if n := killed.Stats().Recovered; n != 1 {
		t.Errorf("%d were recovered, want the long one", n)
	}
	run(t, killed)()
	long.End(record(0))
	eventually(t, "it is published", func() bool { return s.get("id-00000") != nil })
	stop()
	if len(files(t, dir)) != 0 {
		t.Error("files are left")
	}
}

func TestOneProcessPerFolder(t *testing.T) {
	dir := t.TempDir()
	r := open(t, dir, newStream(), nil)
	if _, err := usage.Open(usage.Settings{Dir: dir, Publisher: newStream()}); err == nil {
		t.Error("two processes share a folder")
	}
	run(t, r)()
	run(t, open(t, dir, newStream(), nil))()
}

// Without a Recorder nothing is written, and nobody has to ask for it.
func TestOff(t *testing.T) {
	var r *usage.Recorder
	q := r.Begin(record(1))
	q.Progress(1, 2)
	q.End(record(1))
	if r.Stats() != (usage.Stats{}) {
		t.Error("figures of nothing")
	}
}

func BenchmarkRequest(b *testing.B) {
	s := newStream()
	s.away = true
	set := usage.Settings{Dir: b.TempDir(), Publisher: s, MaxBytes: 1 << 40}
	r, err := usage.Open(set)
	if err != nil {
		b.Fatal(err)
	}
	rec := record(1)
	b.ReportAllocs()
	for b.Loop() {
		r.Begin(rec).End(rec)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r.Run(ctx)
}
