package limiter

import (
	"context"
	"errors"
	"math"
	"math/bits"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/rpc"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

// server answers the calls: it checks them, asks the store, and says in the
// caller's terms what the numbers mean.
type server struct {
	store   store.Store
	metrics *metrics
	holders *holders
}

var _ limiterv1connect.LimiterServiceHandler = (*server)(nil)

// failure is what a caller hears of a store's error.
func failure(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, store.ErrFull):
		return rpc.Error(connect.CodeResourceExhausted, "store is full", 0)
	case errors.Is(err, store.ErrUnavailable):
		return rpc.Error(connect.CodeUnavailable, "store is unavailable", 0)
	}
	return err
}

// Reserve implements limiterv1connect.LimiterServiceHandler.
func (s *server) Reserve(ctx context.Context, req *limiterv1.ReserveRequest) (*limiterv1.ReserveResponse, error) {
	begin := time.Now()
	cs, err := charges(req.GetCharges(), 1, begin)
	life, terr := ttl(req.GetTtl(), defaultTTL, minTTL, maxTTL)
	if err := errors.Join(organisation(req.GetOrganisation()), plain("request_id", req.GetRequestId(), maxID), terr, err); err != nil {
		return nil, s.rejected("reserve", err)
	}
	if req.GetHolder() != "" {
		if err := plain("holder", req.GetHolder(), maxID); err != nil {
			return nil, s.rejected("reserve", err)
		}
		s.holders.hear(req.GetHolder())
	}
	r, err := s.store.Reserve(ctx, req.GetOrganisation(), req.GetRequestId(), life, cs)
	if err != nil {
		s.metrics.reserved(ctx, outcomeError)
		return nil, failure(err)
	}
	resp := reserveResponse(cs, r)
	resp.ReservedUnixMicros = begin.UnixMicro()
	resp.Holders = uint32(s.holders.count())
	s.metrics.reserve(ctx, resp, r.Outcome)
	return resp, nil
}

// rejected counts a malformed call.
func (s *server) rejected(call string, err error) error {
	s.metrics.rejected(call)
	var ce *connect.Error
	if errors.As(err, &ce) {
		return ce
	}
	return err
}

func reserveResponse(cs []store.Charge, r store.Result) *limiterv1.ReserveResponse {
	resp := &limiterv1.ReserveResponse{
		Granted: r.Outcome == store.Granted || r.Outcome == store.Repeated,
		States:  make([]*limiterv1.State, len(cs)),
	}
	var longest time.Duration
	for i := range cs {
		c, st := &cs[i], r.States[i]
		resp.States[i] = state(&c.Bucket, st, r.Now)
		if c.Shadow {
			continue
		}
		if resp.Tightest == nil || tighter(&c.Bucket, st, &cs[*resp.Tightest].Bucket, r.States[*resp.Tightest]) {
			resp.Tightest = new(uint32(i))
		}
		if !st.Refused {
			continue
		}
		wait, ever := c.Wait(st, c.Amount, r.Now)
		switch {
		case !ever && resp.Reason != limiterv1.ReserveResponse_REASON_NEVER:
			resp.Reason, resp.Refused = limiterv1.ReserveResponse_REASON_NEVER, new(uint32(i))
		case ever && resp.Reason != limiterv1.ReserveResponse_REASON_NEVER && (resp.Refused == nil || wait > longest):
			resp.Reason, resp.Refused, longest = limiterv1.ReserveResponse_REASON_EXHAUSTED, new(uint32(i)), wait
		}
	}
	switch {
	case r.Outcome == store.Settled:
		resp.Reason = limiterv1.ReserveResponse_REASON_SETTLED
	case resp.Reason == limiterv1.ReserveResponse_REASON_EXHAUSTED:
		resp.RetryAfter = durationpb.New(longest)
	}
	return resp
}

// tighter compares the shares that are left: a/A < b/B.
func tighter(x *store.Bucket, xs store.State, y *store.Bucket, ys store.State) bool {
	a, b := x.Remaining(xs), y.Remaining(ys)
	if a <= 0 || b <= 0 {
		return a < b || a == b && x.Capacity < y.Capacity
	}
	hi1, lo1 := bits.Mul64(uint64(a), uint64(y.Capacity))
	hi2, lo2 := bits.Mul64(uint64(b), uint64(x.Capacity))
	return hi1 < hi2 || hi1 == hi2 && lo1 < lo2
}

func state(b *store.Bucket, s store.State, now int64) *limiterv1.State {
	out := &limiterv1.State{Key: b.Key, Limit: b.Capacity, Remaining: b.Remaining(s), Refused: s.Refused, Shadow: b.Shadow, Leased: s.Leased}
	if reset, ever := b.Reset(s, now); ever {
		out.Reset_ = durationpb.New(min(reset, math.MaxInt64))
	}
	return out
}

// Commit implements limiterv1connect.LimiterServiceHandler.
func (s *server) Commit(ctx context.Context, req *limiterv1.CommitRequest) (*limiterv1.CommitResponse, error) {
	begin := time.Now()
	// A clock that is wrong by more than any request lasts is not believed.
	if at := time.UnixMicro(req.GetReservedUnixMicros()); req.GetReservedUnixMicros() > 0 && begin.Sub(at).Abs() < 2*maxTTL {
		begin = at
	}
	cs, err := charges(req.GetCharges(), 0, begin)
	if err := errors.Join(organisation(req.GetOrganisation()), plain("request_id", req.GetRequestId(), maxID), err); err != nil {
		return nil, s.rejected("commit", err)
	}
	r, err := s.store.Commit(ctx, req.GetOrganisation(), req.GetRequestId(), cs)
	if err != nil {
		return nil, failure(err)
	}
	resp := &limiterv1.CommitResponse{Settled: r.Outcome == store.Granted}
	for i := range cs {
		resp.States = append(resp.States, state(&cs[i].Bucket, r.States[i], r.Now))
	}
	s.metrics.settle(ctx, resp.Settled, "commit")
	return resp, nil
}

// Release implements limiterv1connect.LimiterServiceHandler.
func (s *server) Release(ctx context.Context, req *limiterv1.ReleaseRequest) (*limiterv1.ReleaseResponse, error) {
	if err := errors.Join(organisation(req.GetOrganisation()), plain("request_id", req.GetRequestId(), maxID)); err != nil {
		return nil, s.rejected("release", err)
	}
	r, err := s.store.Release(ctx, req.GetOrganisation(), req.GetRequestId())
	if err != nil {
		return nil, failure(err)
	}
	s.metrics.settle(ctx, r.Outcome == store.Granted, "release")
	return &limiterv1.ReleaseResponse{Released: r.Outcome == store.Granted}, nil
}

// Extend implements limiterv1connect.LimiterServiceHandler.
func (s *server) Extend(ctx context.Context, req *limiterv1.ExtendRequest) (*limiterv1.ExtendResponse, error) {
	ids := req.GetRequestIds()
	life, err := ttl(req.GetTtl(), defaultTTL, minTTL, maxTTL)
	if len(ids) == 0 || len(ids) > maxExtend {
		err = invalid("got %d request_ids, want 1 to %d", len(ids), maxExtend)
	}
	for _, id := range ids {
		if err == nil {
			err = plain("request_id", id, maxID)
		}
	}
	if err := errors.Join(organisation(req.GetOrganisation()), err); err != nil {
		return nil, s.rejected("extend", err)
	}
	unknown, _, err := s.store.Extend(ctx, req.GetOrganisation(), ids, life)
	if err != nil {
		return nil, failure(err)
	}
	s.metrics.unknown(ctx, len(unknown))
	return &limiterv1.ExtendResponse{Unknown: unknown}, nil
}

// Read implements limiterv1connect.LimiterServiceHandler.
func (s *server) Read(ctx context.Context, req *limiterv1.ReadRequest) (*limiterv1.ReadResponse, error) {
	begin := time.Now()
	err := organisation(req.GetOrganisation())
	if n := len(req.GetBuckets()); err == nil && (n == 0 || n > maxBuckets) {
		err = invalid("got %d buckets, want 1 to %d", n, maxBuckets)
	}
	bs := make([]store.Bucket, 0, min(len(req.GetBuckets()), maxBuckets))
	for _, in := range req.GetBuckets() {
		if err == nil {
			var b store.Bucket
			b, err = decode(in, begin)
			bs = append(bs, b)
		}
	}
	if err != nil {
		return nil, s.rejected("read", err)
	}
	r, err := s.store.Read(ctx, req.GetOrganisation(), bs)
	if err != nil {
		return nil, failure(err)
	}
	resp := &limiterv1.ReadResponse{}
	for i := range bs {
		resp.States = append(resp.States, state(&bs[i], r.States[i], r.Now))
	}
	return resp, nil
}

// Lease implements limiterv1connect.LimiterServiceHandler.
func (s *server) Lease(ctx context.Context, req *limiterv1.LeaseRequest) (*limiterv1.LeaseResponse, error) {
	shares, life, err := decodeLease(req)
	if err != nil {
		return nil, s.rejected("lease", err)
	}
	s.holders.hear(req.GetHolder())
	grants, r, err := s.store.Lease(ctx, req.GetOrganisation(), req.GetHolder(), life, shares)
	if err != nil {
		return nil, failure(err)
	}
	resp := &limiterv1.LeaseResponse{}
	for i, g := range grants {
		resp.Grants = append(resp.Grants, &limiterv1.Grant{Held: g.Held, Synchronous: g.Synchronous, State: state(&shares[i].Bucket, g.State, r.Now)})
	}
	s.metrics.lease(ctx, resp)
	return resp, nil
}

func decodeLease(req *limiterv1.LeaseRequest) ([]store.Share, time.Duration, error) {
	life, err := ttl(req.GetTtl(), defaultLeaseTTL, minLeaseTTL, maxLeaseTTL)
	if n := len(req.GetShares()); err == nil && (n == 0 || n > maxBuckets) {
		err = invalid("got %d shares, want 1 to %d", n, maxBuckets)
	}
	if err := errors.Join(organisation(req.GetOrganisation()), plain("holder", req.GetHolder(), maxID), err); err != nil {
		return nil, 0, err
	}
	begin := time.Now()
	out := make([]store.Share, len(req.GetShares()))
	for i, sh := range req.GetShares() {
		b, err := decode(sh.GetBucket(), begin)
		if err != nil {
			return nil, 0, err
		}
		if err := errors.Join(amount("spent of "+b.Key, sh.GetSpent()), amount("want of "+b.Key, sh.GetWant())); err != nil {
			return nil, 0, err
		}
		if b.Set || b.Shadow || sh.GetSequence() == 0 || sh.GetSequence() > 1<<52 {
			return nil, 0, invalid("share of %s: want a sequence, and neither concurrency nor shadow", b.Key)
		}
		for j := range i {
			if out[j].Key == b.Key {
				return nil, 0, invalid("bucket %s is named twice", b.Key)
			}
		}
		out[i] = store.Share{Bucket: b, Sequence: sh.GetSequence(), Spent: sh.GetSpent(), Want: sh.GetWant()}
	}
	return out, life, nil
}
