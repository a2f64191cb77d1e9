package fleetsim

import (
	"math/rand/v2"
	"sync"
)

// Faults is what goes wrong with a worker. The zero value is a healthy one.
// Counts run down; the rest stays until it is changed. It is also the body of
// POST /sim/faults.
type Faults struct {
	// Slow divides the engine's speed; 0: as the profile says.
	Slow float64 `json:"slow,omitempty"`
	// Hang takes generation requests in and never answers them.
	Hang bool `json:"hang,omitempty"`
	// Unhealthy makes /health and /ping answer 503.
	Unhealthy bool `json:"unhealthy,omitempty"`

	// ErrorNext generation requests, and after them a share ErrorRate of all,
	// are answered with ErrorStatus (0: 500).
	ErrorNext   int     `json:"errorNext,omitempty"`
	ErrorRate   float64 `json:"errorRate,omitempty"`
	ErrorStatus int     `json:"errorStatus,omitempty"`

	// CloseNext generation requests have their connection closed before the
	// first byte of the answer.
	CloseNext int `json:"closeNext,omitempty"`
	// CloseAfterNext streams are cut after CloseAfterTokens tokens.
	CloseAfterNext   int `json:"closeAfterNext,omitempty"`
	CloseAfterTokens int `json:"closeAfterTokens,omitempty"`

	// Shares of event batches that are lost, that arrive after the next one, and
	// that arrive twice. The replay buffer has all of them.
	DropEvents      float64 `json:"dropEvents,omitempty"`
	ReorderEvents   float64 `json:"reorderEvents,omitempty"`
	DuplicateEvents float64 `json:"duplicateEvents,omitempty"`
	// DropNext event batches are lost.
	DropNext int `json:"dropNext,omitempty"`
}

// faults decides, request by request and batch by batch. Safe for concurrent
// use.
type faults struct {
	mu  sync.Mutex
	f   Faults
	rnd *rand.Rand
}

func newFaults(f Faults, seed int64) *faults {
	return &faults{f: f, rnd: rand.New(rand.NewPCG(uint64(seed), 0x6661756c74))}
}

func (s *faults) get() Faults {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.f
}

func (s *faults) set(f Faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.f = f
}

// requestFault is what happens to one generation request.
type requestFault struct {
	hang, drop bool
	status     int // answer with it; 0: do not
	cutAfter   int // tokens; 0: do not
}

func (s *faults) request() (r requestFault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.f
	switch {
	case f.Hang:
		r.hang = true
	case f.CloseNext > 0:
		f.CloseNext--
		r.drop = true
	case f.ErrorNext > 0:
		f.ErrorNext--
		r.status = f.ErrorStatus
		if r.status == 0 {
			r.status = 500
		}
	case f.ErrorRate > 0 && s.rnd.Float64() < f.ErrorRate:
		r.status = f.ErrorStatus
		if r.status == 0 {
			r.status = 500
		}
	case f.CloseAfterNext > 0:
		f.CloseAfterNext--
		r.cutAfter = max(1, f.CloseAfterTokens)
	}
	return r
}

type eventFault uint8

const (
	eventSend eventFault = iota
	eventDrop
	eventDelay
	eventTwice
)

func (s *faults) event() eventFault {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &s.f
	if f.DropNext > 0 {
		f.DropNext--
		return eventDrop
	}
	if f.DropEvents+f.ReorderEvents+f.DuplicateEvents == 0 {
		return eventSend
	}
	switch x := s.rnd.Float64(); {
	case x < f.DropEvents:
		return eventDrop
	case x < f.DropEvents+f.ReorderEvents:
		return eventDelay
	case x < f.DropEvents+f.ReorderEvents+f.DuplicateEvents:
		return eventTwice
	}
	return eventSend
}
