package fleetsim

import (
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"

	"github.com/kinference/kinference/internal/vllm"
)

// subscriberQueue is how many messages wait for one slow subscriber before
// more are dropped for it (vLLM's hwm, 100,000 there).
const subscriberQueue = 10_000

// eventServer publishes the cache events of one rank: a PUB socket, and a
// ROUTER socket that replays from a buffer. It numbers batches from 0.
// Methods are safe for concurrent use.
type eventServer struct {
	topic   string
	rank    int
	version vllm.Version

	eventSockets
	wg sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]struct{}
	subs   map[*subscriber]struct{}
	seq    uint64
	buffer []message // ring of the last batches
	next   int       // where the ring's next entry goes
	held   *message  // kept back to go out of order
	faults *faults
	stats  EventStats
}

// EventStats counts what one rank's event socket did since it was opened.
type EventStats struct {
	Batches       uint64 // numbered batches: the next sequence number
	Sent          uint64 // messages to subscribers
	Dropped       uint64 // batches not sent live, by a fault
	Overflowed    uint64 // messages not sent to a subscriber that was too slow
	Replays       uint64 // replay requests answered
	Subscriptions int    // topics that the connected subscribers asked for
}

type message struct {
	seq     uint64
	payload []byte
}

type subscriber struct {
	peer   *peer
	topics map[string]int // how often subscribed; guarded by the server's mu
	queue  chan [][]byte
	gone   chan struct{} // closed when the connection is over
}

// eventSockets are the listeners of one rank; router is nil without replay.
type eventSockets struct{ pub, router net.Listener }

// serveEvents takes over the listeners.
func serveEvents(sock eventSockets, topic string, rank, buffer int, v vllm.Version, f *faults) *eventServer {
	s := &eventServer{
		topic: topic, rank: rank, version: v, eventSockets: sock, faults: f,
		conns: make(map[net.Conn]struct{}), subs: make(map[*subscriber]struct{}),
		buffer: make([]message, 0, buffer),
	}
	s.wg.Go(func() { s.acceptLoop(sock.pub, zmq4.Pub, s.subscriber) })
	if sock.router != nil {
		s.wg.Go(func() { s.acceptLoop(sock.router, zmq4.Router, s.replayer) })
	}
	return s
}

// close ends all connections at once and says nothing, as a dying engine does.
func (s *eventServer) close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.pub.Close()
	if s.router != nil {
		s.router.Close()
	}
	s.wg.Wait()
}

func (s *eventServer) acceptLoop(l net.Listener, kind zmq4.SocketType, serve func(*peer)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(5 * time.Millisecond) // out of descriptors, most likely
			continue
		}
		if !s.track(conn) {
			conn.Close()
			return
		}
		s.wg.Go(func() {
			defer s.untrack(conn)
			if p, err := accept(conn, kind); err == nil {
				serve(p)
			}
		})
	}
}

func (s *eventServer) track(c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.conns[c] = struct{}{}
	}
	return !s.closed
}

func (s *eventServer) untrack(c net.Conn) {
	c.Close()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// subscriber serves one connection of the PUB socket: it reads subscriptions
// until the peer goes away.
func (s *eventServer) subscriber(p *peer) {
	sub := &subscriber{peer: p, topics: make(map[string]int), queue: make(chan [][]byte, subscriberQueue), gone: make(chan struct{})}
	s.mu.Lock()
	s.subs[sub] = struct{}{}
	s.mu.Unlock()
	s.wg.Go(func() {
		for {
			select {
			case frames := <-sub.queue:
				if p.send(frames) != nil {
					p.conn.Close() // ends the reader below, too
					return
				}
			case <-sub.gone:
				return
			}
		}
	})
	for {
		frames, err := p.receive()
		if err != nil {
			break
		}
		if len(frames) != 1 || len(frames[0]) == 0 {
			continue
		}
		topic := string(frames[0][1:])
		s.mu.Lock()
		switch frames[0][0] {
		case 1:
			if len(sub.topics) < 1000 {
				sub.topics[topic]++
			}
		case 0:
			if sub.topics[topic]--; sub.topics[topic] <= 0 {
				delete(sub.topics, topic)
			}
		}
		s.mu.Unlock()
	}
	s.mu.Lock()
	delete(s.subs, sub)
	s.mu.Unlock()
	close(sub.gone)
}

// replayer serves one connection of the ROUTER socket.
func (s *eventServer) replayer(p *peer) {
	for {
		frames, err := p.receive()
		if err != nil {
			return
		}
		// A router sees the peer's identity first.
		_, start, err := vllm.ParseReplayRequest(append([][]byte{[]byte("peer")}, frames...))
		if err != nil {
			continue // vLLM logs and ignores it
		}
		for _, m := range s.since(start) {
			if p.send(vllm.ReplayFrames(s.topic, m.seq, m.payload, s.version)) != nil {
				return
			}
		}
		if p.send(vllm.ReplayEndFrames(s.version)) != nil {
			return
		}
	}
}

// since returns the buffered batches from start on, in order.
func (s *eventServer) since(start uint64) []message {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Replays++
	var out []message
	for i := range s.buffer {
		m := s.buffer[(s.next+i)%len(s.buffer)]
		if m.seq >= start {
			out = append(out, m)
		}
	}
	return out
}

// publish numbers and sends the events of one iteration. An iteration without
// events sends nothing.
func (s *eventServer) publish(events []vllm.Event) {
	if s.version == vllm.V0_10 || s.version == vllm.V0_19 {
		// These had no groups on the wire: with events on, they ran hybrids with a
		// single group.
		kept := events[:0:0]
		for _, ev := range events {
			if ev.Group <= 0 {
				kept = append(kept, ev)
			}
		}
		events = kept
	}
	if len(events) == 0 {
		return
	}
	batch := vllm.Batch{TS: float64(time.Now().UnixNano()) / 1e9, Events: events, Rank: s.rank}
	payload := vllm.AppendBatch(nil, &batch, s.version)
	plan := s.faults.event()
	s.mu.Lock()
	defer s.mu.Unlock()
	m := message{s.seq, payload}
	s.seq++
	s.stats.Batches++
	if len(s.buffer) < cap(s.buffer) {
		s.buffer = append(s.buffer, m)
	} else if len(s.buffer) > 0 {
		s.buffer[s.next] = m
		s.next = (s.next + 1) % len(s.buffer)
	}
	held := s.held
	s.held = nil
	switch plan {
	case eventDrop:
		s.stats.Dropped++
	case eventDelay:
		s.held = &m
	case eventTwice:
		s.send(m)
		s.send(m)
	default:
		s.send(m)
	}
	if held != nil {
		s.send(*held)
	}
}

// send hands m to every subscriber of the topic. The caller holds mu.
func (s *eventServer) send(m message) {
	frames := vllm.EventFrames(s.topic, m.seq, m.payload)
	for sub := range s.subs {
		for prefix := range sub.topics {
			if strings.HasPrefix(s.topic, prefix) {
				select {
				case sub.queue <- frames:
					s.stats.Sent++
				default:
					s.stats.Overflowed++
				}
				break
			}
		}
	}
}

func (s *eventServer) snapshot() EventStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.stats
	for sub := range s.subs {
		st.Subscriptions += len(sub.topics)
	}
	return st
}
