package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

const (
	suffix = ".usage"
	// readBytes is how much of a file is read at once; no entry is longer. What a client
	// has a say in, ids, names and tags, is bounded to a third of it.
	readBytes = 256 << 10
)

// spool is a row of files to which entries are appended. The last one is
// written to; from the first one on they are published and removed.
type spool struct {
	set  *Settings
	dir  *os.File // locked
	mu   sync.Mutex
	live map[string]*Request
	list []*segment // oldest first; the last is open for writing, if sealed is not set
	next uint64     // number of the next file
	size int64      // of all files

	dropped, recovered, corrupt uint64
	complained                  time.Time
	buf                         []byte // of an entry
	event                       []byte // of its CloudEvent
	unsynced                    []*segment
	// put is (*os.File).WriteAt, but in tests.
	put func(f *os.File, b []byte, at int64) (int, error)
}

// segment is one file.
type segment struct {
	path   string
	file   *os.File
	size   int64
	read   int64 // up to here everything is acknowledged
	sealed bool
	dirty  bool
	opens  int // live requests whose open entry is here
	done   time.Time
}

// place is how far a batch reaches.
type place struct {
	segment *segment
	end     int64
}

func openSpool(s *Settings) (*spool, error) {
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make usage spool: %w", err)
	}
	dir, err := os.Open(s.Dir)
	if err != nil {
		return nil, fmt.Errorf("open usage spool: %w", err)
	}
	if err := lock(dir); err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock usage spool %s, which another process uses: %w", s.Dir, err)
	}
	sp := &spool{set: s, dir: dir, live: map[string]*Request{}, next: 1, put: (*os.File).WriteAt}
	if err := sp.recover(); err != nil {
		sp.close()
		return nil, fmt.Errorf("read usage spool: %w", err)
	}
	return sp, nil
}

// recover reads what former processes left and settles their open requests.
func (sp *spool) recover() error {
	entries, err := os.ReadDir(sp.set.Dir)
	if err != nil {
		return err
	}
	open := map[string]*leftover{}
	for _, e := range entries { // sorted by name
		number, ok := strings.CutSuffix(e.Name(), suffix)
		n, err := strconv.ParseUint(number, 10, 63)
		if !ok || err != nil {
			continue
		}
		sp.next = max(sp.next, n+1)
		s := &segment{path: filepath.Join(sp.set.Dir, e.Name()), sealed: true}
		if s.file, err = os.OpenFile(s.path, os.O_RDWR, 0); err != nil {
			return err
		}
		sp.list = append(sp.list, s)
		info, err := s.file.Stat()
		if err != nil {
			return err
		}
		s.size = sp.scan(s.file, info.Size(), open)
		sp.size += s.size
	}
	if len(open) == 0 {
		return nil
	}
	left := make([]*leftover, 0, len(open))
	for _, l := range open {
		left = append(left, l)
	}
	slices.SortFunc(left, func(a, b *leftover) int { return strings.Compare(a.id, b.id) })
	for _, l := range left {
		switch u := l.settle(); {
		case u == nil:
			sp.corrupt++
		case sp.append(kindEvent, l.id, l.subject, u) == nil:
			sp.dropped++
		default:
			sp.recovered++
		}
	}
	sp.set.Log.Warn("settled the usage of requests that a former process left", "requests", len(left))
	return nil
}

// scan reads a file and returns up to where it is readable.
func (sp *spool) scan(f *os.File, size int64, open map[string]*leftover) int64 {
	at := int64(0)
	for at < size {
		n, stop := walk(f, at, size, func(e entry) bool {
			switch e.kind {
			case kindOpen:
				open[string(e.id)] = &leftover{id: string(e.id), subject: string(e.subject), event: slices.Clone(e.data)}
			case kindEvent:
				delete(open, string(e.id))
			case kindProgress:
				e.eachProgress(func(id []byte, p progress) {
					if l := open[string(id)]; l != nil {
						l.last = p
					}
				})
			}
			return true
		})
		at += n
		if stop || n == 0 {
			break
		}
	}
	if at < size { // torn by a loss of power
		sp.corrupt++
	}
	return at
}

// leftover is a request that a former process did not finish.
type leftover struct {
	id, subject string
	event       []byte
	last        progress
}

// settle makes the event of a request whose ingress died: failed, with what was
// known when it was last written down.
func (l *leftover) settle() *usagev1.Usage {
	u, err := bus.DecodeUsage(l.event)
	if err != nil {
		return nil
	}
	u.Recovered, u.Outcome = true, usagev1.Outcome_OUTCOME_FAILED
	if u.Tokens == nil {
		u.Tokens = new(usagev1.Tokens)
	}
	t := u.Tokens
	if l.last.at.IsZero() {
		l.last.input, l.last.output = -1, -1
	} else {
		u.Ended = timestamppb.New(l.last.at)
	}
	if l.last.input >= 0 {
		n := uint32(l.last.input)
		t.Input, t.InputEstimated = &n, false
	}
	// What came after the last entry nobody knows, so that it is an estimate.
	n := uint32(max(l.last.output, 0))
	t.Output, t.OutputEstimated = &n, true
	return u
}

// begin writes down that a request is under way.
func (sp *spool) begin(q *Request, subject string, u *usagev1.Usage) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	sp.live[q.id] = q
	if s := sp.append(kindOpen, q.id, subject, u); s != nil {
		q.frame = slices.Clone(sp.buf)
		q.segment = s
		s.opens++
	}
}

// end writes an event; false if it was dropped.
func (sp *spool) end(q *Request, subject string, u *usagev1.Usage) bool {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	delete(sp.live, q.id)
	if q.segment != nil {
		q.segment.opens--
	}
	if sp.append(kindEvent, q.id, subject, u) == nil {
		sp.dropped++
		return false
	}
	return true
}

// append writes an entry, and leaves it in buf. It returns nil if that was not
// possible. The lock is held.
func (sp *spool) append(kind byte, id, subject string, u *usagev1.Usage) *segment {
	sp.event = bus.EncodeUsage(sp.event[:0], u)
	sp.buf = appendEntry(sp.buf[:0], kind, id, subject, sp.event)
	return sp.write(sp.buf)
}

// write writes a whole entry at once, so that the death of the process does not
// tear it. Where there is no room, in the spool or on the disk, files that are only
// kept make some.
func (sp *spool) write(entry []byte) *segment {
	if sp.size+int64(len(entry)) > sp.set.MaxBytes {
		sp.tidyLocked(true)
	}
	switch {
	case len(entry) > readBytes:
		sp.complain(errors.New("an event is too long"))
		return nil
	case sp.size+int64(len(entry)) > sp.set.MaxBytes:
		sp.complain(errors.New("the spool is full"))
		return nil
	}
	s, err := sp.try(entry)
	if before := sp.size; err != nil {
		if sp.tidyLocked(true); sp.size < before {
			s, err = sp.try(entry)
		}
	}
	if err != nil {
		sp.complain(err)
		return nil
	}
	return s
}

// try writes an entry to the disk.
func (sp *spool) try(entry []byte) (*segment, error) {
	s, err := sp.current()
	if err != nil {
		return nil, err
	}
	if _, err := sp.put(s.file, entry, s.size); err != nil {
		s.sealed = true  // whatever was written of it is behind the end
		if s.size == 0 { // else there would be one more with each try
			sp.remove(s)
		}
		return nil, err
	}
	s.size += int64(len(entry))
	sp.size += int64(len(entry))
	if !s.dirty {
		s.dirty = true
		sp.unsynced = append(sp.unsynced, s)
	}
	if s.size >= sp.set.SegmentBytes {
		s.sealed = true
	}
	return s, nil
}

// current is the file to write to.
func (sp *spool) current() (*segment, error) {
	if n := len(sp.list); n > 0 && !sp.list[n-1].sealed {
		return sp.list[n-1], nil
	}
	path := filepath.Join(sp.set.Dir, fmt.Sprintf("%020d%s", sp.next, suffix))
	sp.next++ // also if there is one of this name, which must not stop all that follow
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	s := &segment{path: path, file: f}
	sp.list = append(sp.list, s)
	return s, nil
}

// complain logs why events are lost, at most once a minute.
func (sp *spool) complain(err error) {
	if time.Since(sp.complained) > time.Minute {
		sp.complained = time.Now()
		sp.set.Log.Error("usage events are lost", "err", err)
	}
}

// nextBatch returns the next events to publish, of one file, and their end. The
// segment is nil when there are none.
func (sp *spool) nextBatch(most int) ([]bus.UsageMessage, place) {
	sp.mu.Lock()
	var s *segment
	for _, x := range sp.list {
		if x.read < x.size {
			s = x
			break
		}
	}
	if s == nil {
		sp.mu.Unlock()
		return nil, place{}
	}
	from, size, file := s.read, s.size, s.file
	sp.mu.Unlock()
	// The file is not removed meanwhile: only its reader lets it be.
	var batch []bus.UsageMessage
	n, bad := walk(file, from, size, func(e entry) bool {
		if e.kind == kindEvent {
			batch = append(batch, bus.UsageMessage{ID: string(e.id), Subject: string(e.subject), Data: slices.Clone(e.data)})
		}
		return len(batch) < most
	})
	if bad || n == 0 { // cannot be, but must not stop the rest
		sp.mu.Lock()
		sp.corrupt++
		sp.mu.Unlock()
		n = size - from
	}
	return batch, place{s, from + n}
}

// acked notes that everything up to a place is on the stream.
func (sp *spool) acked(at place) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	at.segment.read = at.end
	if at.segment.read == at.segment.size {
		at.segment.done = time.Now()
	}
}

// rewind makes all events that are kept unpublished, and returns their bytes.
func (sp *spool) rewind() (n int64) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for _, s := range sp.list {
		n += s.read
		s.read, s.done = 0, time.Time{}
	}
	return n
}

// tidy removes files that are published and not to be kept any longer; with
// hurry those too that were to be kept.
func (sp *spool) tidy(hurry bool) {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	sp.tidyLocked(hurry)
}

func (sp *spool) tidyLocked(hurry bool) {
	for len(sp.list) > 0 {
		s := sp.list[0]
		if !s.sealed || s.read < s.size || !hurry && time.Since(s.done) < sp.set.Keep {
			return
		}
		// Requests that are still under way are written down again.
		if s.opens > 0 {
			if hurry {
				return // there is no room for that
			}
			for _, q := range sp.live {
				if q.segment == s {
					if moved := sp.write(q.frame); moved != nil && moved != s {
						s.opens--
						moved.opens++
						q.segment = moved
						q.written = nothing
					}
				}
			}
			if s.opens > 0 {
				return
			}
		}
		sp.remove(s)
	}
}

func (sp *spool) remove(s *segment) {
	s.file.Close()
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		sp.complain(err)
	}
	sp.size -= s.size
	sp.list = slices.DeleteFunc(sp.list, func(x *segment) bool { return x == s })
}

// progress writes down how far the running answers are.
func (sp *spool) progress() {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	p := newProgress(sp.buf[:0], time.Now())
	for id, q := range sp.live {
		now := counts{q.input.Load(), q.output.Load()}
		if now == q.written || q.segment == nil {
			continue
		}
		q.written = now
		p.add(id, now.input, now.output)
		if p.full() {
			sp.buf = p.entry()
			sp.write(sp.buf)
			p = newProgress(sp.buf[:0], time.Now())
		}
	}
	if p.n > 0 {
		sp.buf = p.entry()
		sp.write(sp.buf)
	}
}

// sync makes what was written safe from a loss of power.
func (sp *spool) sync() {
	sp.mu.Lock()
	list := sp.unsynced
	sp.unsynced = nil
	for _, s := range list {
		s.dirty = false
	}
	sp.mu.Unlock()
	if len(list) == 0 {
		return
	}
	err := sp.dir.Sync() // new files
	for _, s := range list {
		if e := s.file.Sync(); e != nil && !errors.Is(e, os.ErrClosed) {
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		sp.mu.Lock()
		sp.complain(err)
		sp.mu.Unlock()
	}
}

func (sp *spool) stats() Stats {
	sp.mu.Lock()
	defer sp.mu.Unlock()
	s := Stats{Bytes: sp.size, Running: len(sp.live), Dropped: sp.dropped, Recovered: sp.recovered, Corrupt: sp.corrupt}
	for _, x := range sp.list {
		s.Pending += x.size - x.read
	}
	return s
}

// close removes what is published and syncs the rest.
func (sp *spool) close() {
	sp.sync()
	sp.mu.Lock()
	defer sp.mu.Unlock()
	for _, s := range slices.Clone(sp.list) {
		if s.read == s.size && s.opens == 0 {
			sp.remove(s)
			continue
		}
		s.file.Close()
	}
	sp.list = nil
	sp.dir.Close() // and unlocks it
}
