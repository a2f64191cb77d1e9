// Package redis is the store of limits for production: Redis 7 or newer, or
// Valkey; one server, Sentinel or Cluster.
//
// Every call is one run of one Lua script, so it is atomic, and its clock is
// that of the server. All keys of an organisation carry it as hash tag and lie
// in one slot: one primary decides for it, and more organisations than one scale
// over a Cluster.
//
//	kinference:{<organisation>}:b:<bucket>            what is used, when, credit, shares
//	kinference:{<organisation>}:c:<bucket>            requests in flight by expiry (sorted set)
//	kinference:{<organisation>}:r:<request>           what is reserved, or that it is settled
//	kinference:{<organisation>}:l:<holder>/<bucket>   share of a holder
//	kinference:{<organisation>}:x                     expiries of reservations and shares (sorted set)
//	kinference:{holders}                              processes heard of (sorted set)
//
// Each key has a time to live, after which it means nothing any more. Where
// memory is short Redis must refuse (maxmemory-policy noeviction): what it would
// evict are limits.
//
// Replication is asynchronous: a failover may lose the last charges and the
// last settlements. A lost settlement is charged in full when it is repeated, a
// lost reservation when it is committed; nothing is charged twice, because a
// replica applies the effects of a script together.
package redis

import (
	"context"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinference/kinference/services/limiter/internal/store"
)

//go:embed limits.lua
var source string

var script = goredis.NewScript(source)

// The library writes a line for each failed connection. What fails here is
// counted, and the breaker logs it once.
func init() { goredis.SetLogger(quiet{}) }

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// Store is a store in Redis. It may be used by any number of goroutines.
type Store struct{ client goredis.UniversalClient }

var _ store.Store = (*Store)(nil)

// New returns a store that uses client, and closes it.
func New(client goredis.UniversalClient) *Store { return &Store{client} }

// Close closes the connections.
func (s *Store) Close() error { return s.client.Close() }

// Warm gives the script to the servers, so that the first requests need not.
// A server that is away gets it with the first call.
func (s *Store) Warm(ctx context.Context) error {
	var err error
	if cluster, ok := s.client.(*goredis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *goredis.Client) error { return script.Load(ctx, c).Err() })
	} else {
		err = script.Load(ctx, s.client).Err()
	}
	return unavailable(err)
}

// unavailable makes the store's error of a client's: whatever went wrong, the
// answer is not known.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", store.ErrUnavailable, err)
}

// args of one call.
type args struct {
	prefix  string
	keys    []string
	numbers []int64
	ids     []any
}

var constants = []int64{
	store.Remembered.Milliseconds(), store.Longest.Milliseconds(), store.Sweep, store.LeaseDivisor, store.LowDivisor,
}

func start(org string, things int) *args {
	a := &args{prefix: "kinference:{" + org + "}:", keys: make([]string, 0, 2+2*things), numbers: make([]int64, 0, 8+11*things)}
	a.keys = append(a.keys, a.prefix+"x")
	a.numbers = append(a.numbers, constants...)
	return a
}

func (a *args) key(kind, name string) { a.keys = append(a.keys, a.prefix+kind+name) }

func (a *args) add(v ...int64) { a.numbers = append(a.numbers, v...) }

// request adds the record of a request, and its id.
func (a *args) request(id string) {
	a.key("r:", id)
	a.ids = append(a.ids, id)
}

func name(b *store.Bucket) (kind, key string) {
	if b.Set {
		return "c:", b.Key
	}
	return "b:", b.Key
}

// bucket adds a specification.
func (a *args) bucket(b *store.Bucket, now time.Time) {
	keep := time.Second
	if b.Rate == 0 {
		keep = b.Lifetime(now)
	}
	a.add(flag(b.Set), b.Capacity, b.Rate, b.Period.Microseconds(), b.MaxDebt, keep.Milliseconds(), flag(b.Shadow))
}

func flag(v bool) int64 {
	if v {
		return 1
	}
	return 0
}

func (a *args) charges(cs []store.Charge, now time.Time) {
	for i := range cs {
		a.key(name(&cs[i].Bucket))
		a.bucket(&cs[i].Bucket, now)
		a.add(cs[i].Amount)
	}
}

// pack writes numbers, none negative, as a list in MessagePack.
func pack(numbers []int64) []byte {
	out := make([]byte, 0, 3+9*len(numbers))
	out = append(out, 0xdc) // array 16
	out = binary.BigEndian.AppendUint16(out, uint16(len(numbers)))
	for _, n := range numbers {
		switch {
		case n < 1<<7:
			out = append(out, byte(n)) // positive fixint
		case n < 1<<32:
			out = binary.BigEndian.AppendUint32(append(out, 0xce), uint32(n)) // uint 32
		default:
			out = binary.BigEndian.AppendUint64(append(out, 0xcf), uint64(n)) // uint 64
		}
	}
	return out
}

// run returns the script's answer without the clock and the outcome, of which
// there are width numbers for each of n things.
func (s *Store) run(ctx context.Context, call string, a *args, n, width int) ([]int64, store.Result, error) {
	out, err := script.Run(ctx, s.client, a.keys, append([]any{call, a.prefix, pack(a.numbers)}, a.ids...)...).Int64Slice()
	if err != nil {
		return nil, store.Result{}, unavailable(err)
	}
	if len(out) != 2+n*width {
		return nil, store.Result{}, unavailable(errors.New("script answered " + strconv.Itoa(len(out)) + " numbers"))
	}
	return out[2:], store.Result{Now: out[0], Outcome: store.Outcome(out[1])}, nil
}

func states(out []int64, r *store.Result) {
	for ; len(out) >= 5; out = out[5:] {
		r.States = append(r.States, store.State{Used: out[0], Credit: out[1], Leased: out[2], First: out[3], Refused: out[4] != 0})
	}
}

// Reserve charges all or nothing.
func (s *Store) Reserve(ctx context.Context, org, id string, ttl time.Duration, charges []store.Charge) (store.Result, error) {
	now := time.Now()
	a := start(org, len(charges))
	a.request(id)
	a.add(ttl.Microseconds(), store.Retention(now, buckets(charges)).Milliseconds())
	a.charges(charges, now)
	out, r, err := s.run(ctx, "reserve", a, len(charges), 5)
	states(out, &r)
	return r, err
}

func buckets(cs []store.Charge) func(func(*store.Bucket) bool) {
	return func(yield func(*store.Bucket) bool) {
		for i := range cs {
			if !yield(&cs[i].Bucket) {
				return
			}
		}
	}
}

// Commit settles.
func (s *Store) Commit(ctx context.Context, org, id string, charges []store.Charge) (store.Result, error) {
	a := start(org, len(charges))
	a.request(id)
	a.charges(charges, time.Now())
	out, r, err := s.run(ctx, "commit", a, len(charges), 5)
	states(out, &r)
	return r, err
}

// Release gives all back.
func (s *Store) Release(ctx context.Context, org, id string) (store.Result, error) {
	a := start(org, 0)
	a.request(id)
	_, r, err := s.run(ctx, "release", a, 0, 0)
	return r, err
}

// Extend prolongs reservations.
func (s *Store) Extend(ctx context.Context, org string, ids []string, ttl time.Duration) ([]string, store.Result, error) {
	a := start(org, 0)
	a.add(ttl.Microseconds())
	for _, id := range ids {
		a.request(id)
	}
	out, r, err := s.run(ctx, "extend", a, len(ids), 1)
	var unknown []string
	for i, ok := range out {
		if ok == 0 {
			unknown = append(unknown, ids[i])
		}
	}
	return unknown, r, err
}

// Read looks at buckets.
func (s *Store) Read(ctx context.Context, org string, buckets []store.Bucket) (store.Result, error) {
	a := start(org, len(buckets))
	now := time.Now()
	for i := range buckets {
		a.key(name(&buckets[i]))
		a.bucket(&buckets[i], now)
		a.add(0)
	}
	out, r, err := s.run(ctx, "read", a, len(buckets), 5)
	states(out, &r)
	return r, err
}

// Lease changes shares.
func (s *Store) Lease(ctx context.Context, org, holder string, ttl time.Duration, shares []store.Share) ([]store.Grant, store.Result, error) {
	now := time.Now()
	a := start(org, 2*len(shares))
	a.add(ttl.Microseconds(), store.Retention(now, func(yield func(*store.Bucket) bool) {
		for i := range shares {
			if !yield(&shares[i].Bucket) {
				return
			}
		}
	}).Milliseconds())
	for i := range shares {
		sh := &shares[i]
		a.key("l:", holder+"/"+sh.Key)
		a.key(name(&sh.Bucket))
		a.bucket(&sh.Bucket, now)
		a.add(sh.MaxLeased, int64(sh.Sequence), sh.Spent, sh.Want)
	}
	out, r, err := s.run(ctx, "lease", a, len(shares), 5)
	if err != nil {
		return nil, r, err
	}
	grants := make([]store.Grant, len(shares))
	for i := range grants {
		v := out[5*i:]
		grants[i] = store.Grant{Held: v[0], Synchronous: v[1] != 0, State: store.State{Used: v[2], Credit: v[3], Leased: v[4]}}
	}
	return grants, r, nil
}

// Holders counts processes.
func (s *Store) Holders(ctx context.Context, heard []string) (int, error) {
	a := &args{keys: []string{"kinference:{holders}"}, numbers: append(slices.Clone(constants), store.HeardFor.Microseconds())}
	for _, h := range heard {
		a.ids = append(a.ids, h)
	}
	_, r, err := s.run(ctx, "holders", a, 0, 0)
	return int(r.Outcome), err
}
