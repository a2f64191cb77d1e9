package schedule

import (
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// DeltaKind is what happened to a request.
type DeltaKind uint8

// Kinds of deltas.
const (
	Routed DeltaKind = iota
	Began            // its first token came
	Ended
)

// Delta is one change of a router's ledger, for the other routers.
type Delta struct {
	Kind DeltaKind
	// ID names the request among those of its router.
	ID string
	// At is when it happened, by the clock of its router.
	At time.Time

	// What follows is set for Routed only.

	Worker, Class, Group string
	// Tokens is the prompt's length, Cached the part that was predicted not to
	// be prefilled, MaxTokens the limit of the output or 0.
	Tokens, Cached, MaxTokens int
	BlockSize                 int
	// Hashes are those of every Stride-th block of the prompt, beginning with
	// block Stride-1: at most 64.
	Hashes []kvhash.Hash
	Stride int
	// Work is the predicted prefill, TTFT the predicted time to first token.
	Work, TTFT time.Duration
	Whole      bool
}

// Learned is what a router's calibration knows of one worker.
type Learned struct {
	// Slowness is the factor on the prior speed of the class, from Samples first tokens.
	Slowness float64
	Samples  int
	// Reuse is the share of predicted cached tokens that came true, from Hits answers.
	Reuse float64
	Hits  int
}

// remotes is what goes between this router and others.
type remotes struct{}

func newRemotes() remotes { return remotes{} }

// tell notes a change for the other routers.
func (s *Scheduler) tell(t float64, e *entry, k DeltaKind) {}

// Deltas returns what this router did since the last call, oldest first. At
// most 4096 are kept: a caller that never asks costs nothing more.
func (s *Scheduler) Deltas(now time.Time) []Delta { return nil }

// Remote books what another router said at time at. What is older than 0.3 s
// adds no request in flight: the gauges show those by then. from names the router.
func (s *Scheduler) Remote(now time.Time, from string, at time.Time, d []Delta) {}

// Gone drops all that a router has told: it has stopped.
func (s *Scheduler) Gone(now time.Time, from string) {}

// Calibration returns what was learned of every worker here, for other routers.
func (s *Scheduler) Calibration() map[string]Learned { return nil }

// Learn takes in what another router has learned.
func (s *Scheduler) Learn(now time.Time, from string, workers map[string]Learned) {}
