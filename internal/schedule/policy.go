package schedule

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
)

// Names of the policies.
const (
	// Random picks a worker at random for each request: a Kubernetes Service
	// whose clients open a connection per request.
	Random = "random"
	// Connection picks a worker at random for each client connection:
	// kube-proxy with clients that keep their connections alive.
	Connection = "connection"
	// RoundRobin takes the workers in turn, by name.
	RoundRobin = "roundrobin"
	// LeastRequests picks the worker with the fewest requests in flight.
	LeastRequests = "leastrequests"
	// PredictedTTFT picks the worker with the least predicted time to first
	// token.
	PredictedTTFT = "predictedttft"
	// K2 holds requests in line until their best worker can begin soon, and
	// counts what each prefill costs others (docs/decisions/0011). It is the
	// default.
	K2 = "k2"
)

// Policy ranks the candidates of a request. Scheduler calls it under its
// mutex, so an implementation needs no lock of its own.
type Policy interface {
	// Name is one of Policies().
	Name() string
	// Rank sorts order, which holds the indices of e, best first. Random
	// choices come from rng only.
	Rank(order []int, r *Request, e []Estimate, rng *rand.Rand)
}

// Policies returns the names of all policies.
func Policies() []string {
	return append([]string{Random, Connection, RoundRobin, LeastRequests, PredictedTTFT, K2}, PeerPolicies()...)
}

func newPolicy(name string) (Policy, error) {
	switch name {
	case Random:
		return randomPolicy{}, nil
	case Connection:
		return &connectionPolicy{}, nil
	case RoundRobin:
		return &roundRobinPolicy{}, nil
	case LeastRequests:
		return leastRequestsPolicy{}, nil
	case PredictedTTFT:
		return predictedTTFTPolicy{}, nil
	case K2, "":
		return k2Policy{}, nil
	}
	if p := newPeer(name); p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("unknown policy %q: want one of %s", name, strings.Join(Policies(), ", "))
}

type randomPolicy struct{}

func (randomPolicy) Name() string { return Random }

func (randomPolicy) Rank(order []int, _ *Request, _ []Estimate, rng *rand.Rand) {
	rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
}

// connectionPolicy needs no table of connections: a hash of connection and
// worker is as good as a random number that is remembered, and moves only the
// connections of a worker that goes away.
type connectionPolicy struct{ seed *uint64 }

func (connectionPolicy) Name() string { return Connection }

func (p *connectionPolicy) Rank(order []int, r *Request, e []Estimate, rng *rand.Rand) {
	if p.seed == nil {
		seed := rng.Uint64()
		p.seed = &seed
	}
	if r.Connection == "" {
		randomPolicy{}.Rank(order, r, e, rng)
		return
	}
	key := kvhash.Extra(kvhash.Hash(*p.seed), r.Connection)
	slices.SortStableFunc(order, func(i, j int) int { return rendezvous(key, e[i].Worker, e[j].Worker) })
}

type roundRobinPolicy struct{ last string }

func (*roundRobinPolicy) Name() string { return RoundRobin }

func (p *roundRobinPolicy) Rank(order []int, _ *Request, e []Estimate, _ *rand.Rand) {
	slices.SortStableFunc(order, func(i, j int) int { return strings.Compare(e[i].Worker, e[j].Worker) })
	next := slices.IndexFunc(order, func(i int) bool { return e[i].Worker > p.last })
	if next > 0 {
		rotate(order, next)
	}
	p.last = e[order[0]].Worker
}

func rotate(s []int, n int) {
	slices.Reverse(s[:n])
	slices.Reverse(s[n:])
	slices.Reverse(s)
}

type leastRequestsPolicy struct{}

func (leastRequestsPolicy) Name() string { return LeastRequests }

func (leastRequestsPolicy) Rank(order []int, r *Request, e []Estimate, rng *rand.Rand) {
	randomPolicy{}.Rank(order, r, e, rng) // equals in random order
	slices.SortStableFunc(order, func(i, j int) int { return e[i].InFlight - e[j].InFlight })
}

// Predictions closer together than this are equal (docs/decisions/0004).
const (
	tieShare   = 0.02
	tieSeconds = 0.005
)

type predictedTTFTPolicy struct{}

func (predictedTTFTPolicy) Name() string { return PredictedTTFT }

// Rank breaks ties by more matched tokens, fewer requests in flight, less
// work sent there of late, and last by a hash of prefix and worker. The third
// spreads serial requests that match nothing, for which every worker is idle
// at each pick; the hash makes replicas agree on who takes a cold prefix.
func (predictedTTFTPolicy) Rank(order []int, r *Request, e []Estimate, _ *rand.Rand) {
	rankBy(order, e, func(e *Estimate) float64 { return e.ttft }, byHash(r, e))
}

// byHash orders estimates by their tieHash, the highest first.
func byHash(r *Request, e []Estimate) func(i, j int) int {
	return func(i, j int) int {
		return cmp.Compare(tieHash(r, e[j].c, e[j].Worker), tieHash(r, e[i].c, e[i].Worker))
	}
}

// tieHash is what decides last. It goes by the beginning of the prompt: its first
// block, or where it has none the request, so that short prompts do not all go to
// one worker.
func tieHash(r *Request, c *Candidate, worker string) kvhash.Hash {
	var hashes []kvhash.Hash
	if c != nil {
		hashes = c.Hashes
	}
	return TieHash(r.ID, hashes, worker)
}

// TieHash decides between workers that are equal in all else: the highest is
// first. hashes are those of the prompt's blocks.
func TieHash(requestID string, hashes []kvhash.Hash, worker string) kvhash.Hash {
	if len(hashes) > 0 {
		return kvhash.Extra(hashes[0], worker)
	}
	return kvhash.Extra(kvhash.Extra(0, requestID), worker)
}

// Predicted is what PredictedTTFT and K2 rank a worker by, for records of
// decisions. Times are in seconds of model time.
type Predicted struct {
	Worker string
	TTFT   float64
	Cached int // tokens
	// InFlight are our requests there, Others those of others.
	InFlight int
	Others   float64
	// Work is that of this prompt's prefill, Recent what was sent there of late.
	Work, Recent float64
	// J is what K2 ranks by instead of TTFT, Loss the part of it for what would be
	// evicted; 0 under other policies.
	J, Loss float64
	// Filled is how much of its memory is wanted, in steps. Settles: this prompt
	// would make the worker its home.
	Filled  int
	Settles bool
	// Tie is the place by TieHash.
	Tie int
}

// Predicted is what the worker was ranked by, without Tie.
func (e *Estimate) Predicted() Predicted {
	return Predicted{Worker: e.Worker, TTFT: e.ttft, Cached: e.Cached, InFlight: e.InFlight, Others: e.Others, Work: e.work, Recent: e.cold, J: e.j,
		Loss: e.loss, Filled: e.filled, Settles: e.settles}
}

// Rank sorts indices into what was recorded, best first, as the policy did or
// would have. It reports false, and leaves the order, for policies whose order
// does not follow from the record.
func Rank(policy string, order []int, p []Predicted) bool {
	score := func(e *Estimate) float64 { return e.ttft }
	switch policy {
	case PredictedTTFT:
	case K2:
		score = func(e *Estimate) float64 { return e.j }
	default:
		return false
	}
	if len(order) == 0 {
		return true
	}
	e := make([]Estimate, len(p))
	for i := range p {
		e[i] = Estimate{Worker: p[i].Worker, Cached: p[i].Cached, InFlight: p[i].InFlight, Others: p[i].Others, ttft: p[i].TTFT, j: p[i].J, work: p[i].Work, cold: p[i].Recent,
			loss: p[i].Loss, filled: p[i].Filled, settles: p[i].Settles}
	}
	rankBy(order, e, score, func(i, j int) int { return cmp.Compare(p[i].Tie, p[j].Tie) })
	return true
}

// rendezvous orders two workers by the hash of key and worker.
func rendezvous(key kvhash.Hash, a, b string) int {
	return cmp.Compare(kvhash.Extra(key, b), kvhash.Extra(key, a))
}

var what = map[string]string{PredictedTTFT: " answers soonest: ", K2: " costs least: "}

// reason says in one sentence why the first in order is first.
func reason(policy string, order []int, e []Estimate) string {
	first := &e[order[0]]
	buf := make([]byte, 0, 192)
	buf = append(buf, first.Worker...)
	switch policy {
	case PredictedTTFT, K2:
		buf = append(buf, what[policy]...)
		buf = seconds(buf, first.TTFT)
		buf = append(buf, " with "...)
		buf = strconv.AppendInt(buf, int64(first.Cached), 10)
		buf = append(buf, " of "...)
		buf = strconv.AppendInt(buf, int64(first.Tokens), 10)
		buf = append(buf, " tokens cached"...)
		if first.Wait > 0 {
			buf = append(buf, " and a wait of "...)
			buf = seconds(buf, first.Wait)
		}
		if len(order) > 1 {
			next := &e[order[1]]
			switch {
			case first.settles && next.j < first.j:
				buf = append(buf, "; it has most room, before "...)
			case next.TTFT <= first.TTFT:
				buf = append(buf, "; it won a tie with "...)
			default:
				buf = append(buf, "; next is "...)
			}
			buf = append(buf, next.Worker...)
			buf = append(buf, " in "...)
			buf = seconds(buf, next.TTFT)
		}
	case LeastRequests:
		buf = append(buf, " has the fewest requests in flight: "...)
		buf = strconv.AppendInt(buf, int64(first.InFlight), 10)
	case RoundRobin:
		buf = append(buf, " is next in turn"...)
	case Connection:
		buf = append(buf, " is the worker of this connection"...)
	default:
		buf = append(buf, " was picked at random"...)
	}
	return string(buf)
}

func seconds(buf []byte, d time.Duration) []byte {
	buf = strconv.AppendFloat(buf, d.Seconds(), 'f', 3, 64)
	return append(buf, " s"...)
}
