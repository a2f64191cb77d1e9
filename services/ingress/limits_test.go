package ingress_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/rpc"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// limiter is a LimiterService over real Connect that never refills, so that its
// counts are exact sums.
type limiter struct {
	limiterv1connect.UnimplementedLimiterServiceHandler
	t testing.TB

	mu      sync.Mutex
	levels  map[string]int64 // used, by key
	open    map[string][]*limiterv1.Charge
	settled map[string]int // how often, by request
	words   []string       // what was settled
	asked   []*limiterv1.ReserveRequest
	hang    chan struct{} // closed: calls are answered again
	changed chan struct{}
}

func (l *limiter) wait(ctx context.Context) error {
	l.mu.Lock()
	hang := l.hang
	l.mu.Unlock()
	if hang == nil {
		return nil
	}
	select {
	case <-hang:
		return nil
	case <-ctx.Done():
		return connect.NewError(connect.CodeUnavailable, ctx.Err())
	}
}

func capacity(b *limiterv1.Bucket) int64 {
	switch k := b.GetKind().(type) {
	case *limiterv1.Bucket_Window:
		return k.Window.GetBurst()
	case *limiterv1.Bucket_Calendar:
		return k.Calendar.GetLimit()
	case *limiterv1.Bucket_Concurrency:
		return k.Concurrency.GetLimit()
	}
	return 0
}

func (l *limiter) Reserve(ctx context.Context, r *limiterv1.ReserveRequest) (*limiterv1.ReserveResponse, error) {
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked = append(l.asked, r)
	out := &limiterv1.ReserveResponse{Granted: true}
	for i, c := range r.GetCharges() {
		s := &limiterv1.State{Key: c.GetBucket().GetKey(), Limit: capacity(c.GetBucket()), Shadow: c.GetBucket().GetShadow(), Reset_: durationpb.New(time.Minute)}
		left := s.GetLimit() - l.levels[s.GetKey()]
		if s.Refused = c.GetAmount() > left; s.GetRefused() && !s.GetShadow() {
			out.Granted, out.Refused = false, ptr(uint32(i))
			out.Reason, out.RetryAfter = limiterv1.ReserveResponse_REASON_EXHAUSTED, durationpb.New(1500*time.Millisecond)
			if c.GetAmount() > s.GetLimit() {
				out.Reason, out.RetryAfter = limiterv1.ReserveResponse_REASON_NEVER, nil
			}
		}
		s.Remaining = left
		out.States = append(out.States, s)
	}
	if !out.GetGranted() {
		return out, nil
	}
	for i, c := range r.GetCharges() {
		if !out.GetStates()[i].GetRefused() {
			l.levels[c.GetBucket().GetKey()] += c.GetAmount()
			out.States[i].Remaining -= c.GetAmount()
		}
	}
	l.open[r.GetRequestId()] = r.GetCharges()
	l.wake()
	return out, nil
}

func ptr[T any](v T) *T { return &v }

func (l *limiter) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *limiter) settle(id, word string, charges []*limiterv1.Charge) bool {
	l.settled[id]++
	held, ok := l.open[id]
	delete(l.open, id)
	if !ok {
		return false
	}
	for _, c := range held {
		l.levels[c.GetBucket().GetKey()] -= c.GetAmount()
	}
	for _, c := range charges {
		if c.GetBucket().GetConcurrency() == nil {
			l.levels[c.GetBucket().GetKey()] += c.GetAmount()
		}
		word += fmt.Sprintf(" %s=%d", c.GetBucket().GetKey()[strings.LastIndexByte(c.GetBucket().GetKey(), '/')+1:], c.GetAmount())
	}
	l.words = append(l.words, word)
	l.wake()
	return true
}

func (l *limiter) Commit(ctx context.Context, r *limiterv1.CommitRequest) (*limiterv1.CommitResponse, error) {
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return &limiterv1.CommitResponse{Settled: l.settle(r.GetRequestId(), "commit", r.GetCharges())}, nil
}

func (l *limiter) Release(ctx context.Context, r *limiterv1.ReleaseRequest) (*limiterv1.ReleaseResponse, error) {
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return &limiterv1.ReleaseResponse{Released: l.settle(r.GetRequestId(), "release", nil)}, nil
}

// until waits until cond holds; the lock is held while it looks.
func (l *limiter) until(what string, cond func() bool) {
	l.t.Helper()
	timeout := time.After(patience)
	for {
		l.mu.Lock()
		ok, changed := cond(), l.changed
		state := fmt.Sprint(l.levels, len(l.open), l.words)
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			l.t.Fatalf("waited too long: %s: %s", what, state)
		}
	}
}

// end waits until n requests were settled, once each, and returns how.
func (l *limiter) end(n int) []string {
	l.t.Helper()
	l.until("all is settled", func() bool { return len(l.open) == 0 && len(l.words) >= n })
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, times := range l.settled {
		if times != 1 {
			l.t.Errorf("request %s was settled %d times", id, times)
		}
	}
	out := slices.Clone(l.words)
	slices.Sort(out)
	return out
}

func (l *limiter) level(key string) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.levels[key]
}

// pause lets calls hang until the result is called.
func (l *limiter) pause() (resume func()) {
	c := make(chan struct{})
	l.mu.Lock()
	l.hang = c
	l.mu.Unlock()
	return sync.OnceFunc(func() {
		l.mu.Lock()
		l.hang = nil
		l.mu.Unlock()
		close(c)
	})
}

// limitedEnv is an ingress whose anonymous tenant ns/team of ns/acme has limits.
type limitedEnv struct {
	*env
	limiter *limiter
}

func perMinute(name string, f func(*routerv1.Limit)) *routerv1.Limit {
	l := &routerv1.Limit{Name: name, Per: []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_TENANT}, Window: durationpb.New(time.Minute), Burst: durationpb.New(time.Minute)}
	f(l)
	return l
}

func totalTokens(n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) {
		l.Quantity = &routerv1.Limit_Tokens{Tokens: &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_TOTAL, Amount: n, InputMilli: 1000, CachedInputMilli: 1000, OutputMilli: 1000}}
	}
}

func sortOf(sort routerv1.TokenSort, n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) {
		l.Quantity = &routerv1.Limit_Tokens{Tokens: &routerv1.TokenLimit{Sort: sort, Amount: n}}
	}
}

func requestCount(n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) { l.Quantity = &routerv1.Limit_Requests{Requests: n} }
}

func atOnce(n int64) func(*routerv1.Limit) {
	return func(l *routerv1.Limit) {
		l.Quantity, l.Window, l.Burst = &routerv1.Limit_Concurrency{Concurrency: n}, nil, nil
	}
}

// startLimited starts one with these limits of ns/team.
func startLimited(t *testing.T, change func(*ingress.Config, *routerv1.Catalog), own ...*routerv1.Limit) *limitedEnv {
	t.Helper()
	l := &limiter{t: t, levels: map[string]int64{}, open: map[string][]*limiterv1.Charge{}, settled: map[string]int{}, changed: make(chan struct{})}
	nl, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = rpc.Serve(ctx, nl, rpc.Mount[limiterv1connect.LimiterServiceHandler](ctx, l, limiterv1connect.NewLimiterServiceHandler))
	}()
	t.Cleanup(func() { cancel(); <-ended })
	e := start(t, func(c *ingress.Config, cat *routerv1.Catalog) {
		c.LimiterURL, c.LimitNoLeases, c.LimiterTimeout = "http://"+nl.Addr().String(), true, patience
		cat.Guarded = true
		cat.Pools = []*routerv1.Pool{{Name: "ns/pool", Models: cat.GetModels()}}
		cat.Backends = []*routerv1.Backend{{Name: "ns/public", PathPrefix: "/", Pool: "ns/pool", AnonymousTenant: "ns/team", DefaultQos: "interactive", MaxBody: 1 << 20, MaxHeader: 64 << 10}}
		cat.Tenants = []*routerv1.Tenant{{Name: "ns/acme"}, {Name: "ns/team", Parent: "ns/acme", Limits: own}}
		if change != nil {
			change(c, cat)
		}
	})
	return &limitedEnv{e.ready(), l}
}

// usageText is an answer that used so many tokens.
func usageText(prompt, cached, output int) string {
	return fmt.Sprintf(`{"id":"c","object":"chat.completion","created":1,"model":"base-model","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}],`+
		`"usage":{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`, prompt, output, cached)
}

// allSorts counts everything that a request uses.
func allSorts() []*routerv1.Limit {
	return []*routerv1.Limit{
		perMinute("r", requestCount(1000)), perMinute("in", sortOf(routerv1.TokenSort_TOKEN_SORT_INPUT, 100_000)), perMinute("ca", sortOf(routerv1.TokenSort_TOKEN_SORT_CACHED_INPUT, 100_000)),
		perMinute("out", sortOf(routerv1.TokenSort_TOKEN_SORT_OUTPUT, 100_000)), perMinute("c", atOnce(100)),
	}
}

func many(list ...http.HandlerFunc) []http.HandlerFunc { return list }

// What a request is settled with is what it used, however it ends; and every
// request is settled once, with nothing left reserved.
func TestSettlement(t *testing.T) {
	for _, c := range []struct {
		name, path, body string
		workers          []http.HandlerFunc
		status           int
		want             string
	}{
		{"whole", chatPath, chatRequest(false, `,"max_tokens":50`), many(refuses(200, usageText(12, 8, 2))), 200, "commit r=1 in=4 ca=8 out=2 c=1"},
		{"stream whose client did not ask for usage", chatPath, chatRequest(true, ""), many(answers(textChunk("a"), textChunk("b"), stopChunk, usageChunk, doneEvent)), 200, "commit r=1 in=4 ca=8 out=2 c=1"},
		{"completions", textPath, `{"model":"chat","prompt":"Hello","max_tokens":5}`,
			many(refuses(200, `{"model":"base-model","choices":[{"index":0,"text":"Hi","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":4}}`)), 200, "commit r=1 in=3 ca=0 out=4 c=1"},
		{"worker that never tells", chatPath, chatRequest(true, ""), many(answers(roleChunk(), textChunk("a"), textChunk("b"), textChunk("c"), stopChunk, doneEvent)), 200, "commit r=1 in=%d ca=0 out=4 c=1"},
		{"failover", chatPath, chatRequest(false, ""), many(refuses(500, "{}"), refuses(200, usageText(12, 0, 2))), 200, "commit r=1 in=12 ca=0 out=2 c=1"},
		{"all workers fail", chatPath, chatRequest(false, ""), many(refuses(500, "{}"), refuses(503, "{}")), 0, "release"},
		{"no worker", chatPath, chatRequest(false, ""), nil, 503, "release"},
		{"request at fault", chatPath, chatRequest(false, `,"temperature":-1`), many(refuses(400, `{"error":{"message":"temperature"}}`)), 400, "commit r=1 in=0 ca=0 out=0 c=1"},
		{"stream that breaks", chatPath, chatRequest(true, ""), many(answers(textChunk("a"), textChunk("b"))), 200, "commit r=1 in=%d ca=0 out=2 c=1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startLimited(t, nil, allSorts()...)
			var list []*worker
			for i, w := range c.workers {
				list = append(list, newWorker(t, fmt.Sprint("w", i), w))
			}
			if len(list) > 0 {
				e.router.routes(list...)
			}
			resp, body := e.post(c.path, c.body)
			if c.status != 0 && resp.StatusCode != c.status {
				t.Errorf("%d %s", resp.StatusCode, body)
			}
			got := e.limiter.end(1)
			want := c.want
			if strings.Contains(want, "%d") { // ours: text and JSON by three bytes a token
				want = fmt.Sprintf(want, len(`[{"role":"user","content":"Hello there"}]`)/3+1)
			}
			if d := cmp.Diff([]string{want}, got); d != "" {
				t.Error(d)
			}
			if n := e.limiter.level("ns/team/c"); n != 0 {
				t.Errorf("%d permits are not back", n)
			}
		})
	}
}

// A client that leaves gives back what it did not use, wherever its request is.
func TestCancelSettles(t *testing.T) {
	prompt := len(`[{"role":"user","content":"Hello there"}]`)/3 + 1
	for _, c := range []struct {
		name   string
		stream bool
		pieces []string
		queued bool
		want   string
	}{
		{"queued", true, nil, true, "commit r=1 in=0 ca=0 out=0 c=1"},
		{"before the first byte", true, nil, false, fmt.Sprintf("commit r=1 in=%d ca=0 out=0 c=1", prompt)},
		{"in the stream", true, []string{roleChunk(), textChunk("a"), textChunk("b")}, false, fmt.Sprintf("commit r=1 in=%d ca=0 out=2 c=1", prompt)},
		{"no stream", false, nil, false, fmt.Sprintf("commit r=1 in=%d ca=0 out=", prompt)}, // by time
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startLimited(t, nil, allSorts()...)
			h, begun, left := hang(c.pieces...)
			e.router.routes(newWorker(t, "w", h))
			routing, goOn := make(chan struct{}), make(chan struct{})
			if c.queued {
				e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
					close(routing)
					<-goOn
					return nil, rpc.Error(connect.CodeUnavailable, "too late", time.Second)
				})
				begun = routing
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			read, looked := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(read)
				resp, err := e.begin(ctx, chatPath, chatRequest(c.stream, `,"max_tokens":1000`))
				if err != nil {
					return
				}
				defer resp.Body.Close()
				r := bufio.NewReader(resp.Body)
				for range c.pieces {
					readEvent(t, r)
				}
				if len(c.pieces) > 0 {
					<-looked
				}
				cancel()
			}()
			await(t, "the request to be under way", begun)
			if n := e.limiter.level("ns/team/out"); n != 1000 {
				t.Errorf("reserved %d", n)
			}
			if n := e.limiter.level("ns/team/c"); n != 1 {
				t.Errorf("%d permits", n)
			}
			close(looked)
			if len(c.pieces) == 0 {
				cancel()
			}
			await(t, "the client", read)
			if !c.queued {
				await(t, "the worker to be left", left)
			}
			got := e.limiter.end(1)
			close(goOn)
			if len(got) != 1 || !strings.HasPrefix(got[0], c.want) {
				t.Errorf("settled %v, want %s", got, c.want)
			}
			if n := e.limiter.level("ns/team/out"); n > 900 {
				t.Errorf("%d tokens of output are charged", n)
			}
		})
	}
}

// BerriAI/litellm#18730: five requests at once through a limit of 100 tokens.
func TestFiveRequestsAtOnce(t *testing.T) {
	e := startLimited(t, nil, perMinute("tpm", totalTokens(100)))
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		var n int
		text, _ := io.ReadAll(r.Body)
		_, _ = fmt.Sscanf(string(text[strings.Index(string(text), `"max_tokens":`):]), `"max_tokens":%d`, &n)
		refuses(200, usageText(8, 0, n))(w, r)
	}))
	var wg sync.WaitGroup
	var mu sync.Mutex
	granted, never := 0, 0
	for _, n := range []int{58, 80, 175, 175, 175} {
		wg.Go(func() {
			resp, body := e.post(textPath, fmt.Sprintf(`{"model":"chat","prompt":[1,2,3,4,5,6,7,8],"max_tokens":%d}`, n-8))
			mu.Lock()
			defer mu.Unlock()
			switch kind, _, code := "", "", ""; resp.StatusCode {
			case http.StatusOK:
				granted += n
			case http.StatusTooManyRequests:
				if kind, _, code = parseError(t, body); kind != "tokens" || code != "rate_limit_exceeded" {
					t.Errorf("%s", body)
				}
				if n > 100 {
					never++
					if resp.Header.Get("X-Should-Retry") != "false" || resp.Header.Get("Retry-After") != "" {
						t.Errorf("of %d tokens: %v", n, resp.Header)
					}
				} else if resp.Header.Get("Retry-After") != "2" || resp.Header.Get("Retry-After-Ms") != "1500" || resp.Header.Get("X-Should-Retry") != "" {
					t.Errorf("of %d tokens: %v", n, resp.Header)
				}
			default:
				t.Errorf("%d %s", resp.StatusCode, body)
			}
		})
	}
	wg.Wait()
	e.limiter.end(1)
	if granted != 58 && granted != 80 || never != 3 || e.limiter.level("ns/team/tpm") != int64(granted) {
		t.Errorf("granted %d tokens, %d never fit, %d are counted", granted, never, e.limiter.level("ns/team/tpm"))
	}
	t.Logf("granted %d of 663 tokens through a limit of 100", granted)
}

// Clients learn how much is left, and of the levels above nothing.
func TestLimitAnswers(t *testing.T) {
	e := startLimited(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Tenants[0].Limits = []*routerv1.Limit{perMinute("secret-of-acme", totalTokens(40))}
	}, perMinute("rpm", requestCount(60)), perMinute("tpm", totalTokens(1000)))
	e.router.routes(newWorker(t, "w", refuses(200, usageText(8, 0, 20))))
	body := `{"model":"chat","prompt":[1,2,3,4,5,6,7,8],"max_tokens":20}`
	resp, text := e.post(textPath, body)
	want := map[string]string{
		"X-Ratelimit-Limit-Requests": "60", "X-Ratelimit-Remaining-Requests": "59", "X-Ratelimit-Reset-Requests": "1m0s",
		"X-Ratelimit-Limit-Tokens": "1000", "X-Ratelimit-Remaining-Tokens": "972", "X-Ratelimit-Reset-Tokens": "1m0s",
	}
	for name, value := range want {
		if got := resp.Header.Get(name); got != value {
			t.Errorf("%s: %q, want %q", name, got, value)
		}
	}
	if resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	e.limiter.end(1)
	resp, text = e.post(textPath, body)
	if resp.StatusCode != 429 || strings.Contains(text, "secret") || strings.Contains(text, "acme") || strings.Contains(text, "40") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	if resp.Header.Get("X-Ratelimit-Limit-Tokens") != "1000" || resp.Header.Get("X-Ratelimit-Remaining-Tokens") != "972" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("%v", resp.Header)
	}
	if m := e.metrics(); !strings.Contains(m, `limit="secret-of-acme",otel_scope_name`) && !strings.Contains(m, `limit="secret-of-acme"`) || !strings.Contains(m, `outcome="denied"`) {
		t.Error("the operator does not see which limit denied")
	}
	e.limiter.end(1)
	if n := e.limiter.level("ns/team/rpm"); n != 1 {
		t.Errorf("a refused request is counted: %d", n)
	}
}

// Shadow limits deny nothing and are counted.
func TestShadowLimit(t *testing.T) {
	shadow := perMinute("would-be", totalTokens(5))
	shadow.Shadow = true
	e := startLimited(t, nil, shadow)
	e.router.routes(newWorker(t, "w", refuses(200, usageText(8, 0, 20))))
	resp, text := e.post(chatPath, chatRequest(false, ""))
	if resp.StatusCode != 200 || resp.Header.Get("X-Ratelimit-Limit-Tokens") != "" {
		t.Errorf("%d %s %v", resp.StatusCode, text, resp.Header)
	}
	e.limiter.end(1)
	if m := e.metrics(); !strings.Contains(m, `outcome="shadow"`) {
		t.Error("what would have been denied is not counted")
	}
}

// The tenant's default and maximum decide what engines get and what is reserved;
// whatever clients write is not believed.
func TestMaxTokens(t *testing.T) {
	for _, c := range []struct {
		name, path, body   string
		byDefault, maximum uint32
		sent               []string // parts of the body that the worker gets
		not                string
		reserved           int64 // output; -1: refused
	}{
		{"default", textPath, `{"model":"chat","prompt":[1,2]}`, 100, 500, []string{`"max_tokens":100`}, "", 100},
		{"only a maximum", textPath, `{"model":"chat","prompt":[1,2]}`, 0, 500, []string{`"max_tokens":500`}, "", 500},
		{"null is absent", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":null}`, 100, 0, []string{`"max_tokens":100`}, "null", 100},
		{"more than the maximum", textPath, `{"model":"chat","max_tokens":999999999,"prompt":[1,2]}`, 100, 500, []string{`"max_tokens":500,"prompt"`}, "999", 500},
		{"exponent", textPath, `{"model":"chat","max_tokens":1e9,"prompt":[1,2]}`, 100, 500, []string{`"max_tokens":500`}, "1e9", 500},
		{"both names", chatPath, chatRequest(false, `,"max_tokens":600,"max_completion_tokens":700`), 100, 500, []string{`"max_tokens":500`, `"max_completion_tokens":500`}, "", 500},
		{"new name", chatPath, chatRequest(false, `,"max_completion_tokens":70`), 100, 500, []string{`"max_completion_tokens":70`}, `"max_tokens"`, 70},
		{"less", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7}`, 100, 500, []string{`"max_tokens":7`}, "", 7},
		{"each choice", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":3}`, 100, 500, []string{`"max_tokens":7`}, "", 21},
		{"best_of", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":2,"best_of":4}`, 100, 500, nil, "", 28},
		{"n with a point", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":3.0}`, 100, 500, nil, "", 21},
		{"n with an exponent", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":3e0}`, 100, 500, nil, "", 21},
		{"n as text", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":"300"}`, 100, 500, nil, "", -1},
		{"hostile n", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":128}`, 100, 500, nil, "", 7 * 128},
		{"negative n", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":7,"n":-5}`, 100, 500, nil, "", 7},
		{"several prompts", textPath, `{"model":"chat","prompt":[[1,2],[3,4,5],[6]],"max_tokens":7}`, 100, 500, nil, "", 21},
		{"several prompts of which the longest leaves less", textPath, `{"model":"chat","prompt":[[1,2],[3,4,5]]}`, 5000, 0, []string{`"max_tokens":4093`}, "", 2 * 4093},
		{"no limits of the tenant", textPath, `{"model":"chat","prompt":[1,2],"max_tokens":900}`, 0, 0, []string{`"max_tokens":900`}, "", 900},
		{"nothing is said", textPath, `{"model":"chat","prompt":[1,2]}`, 0, 0, nil, `"max_tokens"`, 1024},
		{"default beyond the context", textPath, `{"model":"chat","prompt":[1,2]}`, 5000, 0, []string{`"max_tokens":4094`}, "", 4094},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := startLimited(t, func(_ *ingress.Config, cat *routerv1.Catalog) {
				cat.Tenants[1].DefaultMaxTokens, cat.Tenants[1].MaximumMaxTokens = c.byDefault, c.maximum
			}, perMinute("out", sortOf(routerv1.TokenSort_TOKEN_SORT_OUTPUT, 1e9)), perMinute("in", sortOf(routerv1.TokenSort_TOKEN_SORT_INPUT, 1e9)))
			sent := make(chan string, 1)
			e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
				text, _ := io.ReadAll(r.Body)
				sent <- string(text)
				refuses(200, usageText(2, 0, 1))(w, r)
			}))
			resp, text := e.post(c.path, c.body)
			if c.reserved < 0 {
				if resp.StatusCode != 400 {
					t.Errorf("%d %s", resp.StatusCode, text)
				}
				return
			}
			if resp.StatusCode != 200 {
				t.Fatalf("%d %s", resp.StatusCode, text)
			}
			body := <-sent
			for _, part := range c.sent {
				if !strings.Contains(body, part) {
					t.Errorf("the worker got %s", body)
				}
			}
			if c.not != "" && strings.Contains(body, c.not) {
				t.Errorf("the worker got %s", body)
			}
			e.limiter.end(1)
			charges := e.limiter.asked[0].GetCharges()
			if got := charges[0].GetAmount(); got != c.reserved {
				t.Errorf("reserved %d, want %d", got, c.reserved)
			}
			if c.name == "several prompts" && charges[1].GetAmount() != 6 {
				t.Errorf("reserved %d of input", charges[1].GetAmount())
			}
		})
	}
}

// While the limiter hangs, each limit's onUnavailable holds and no request waits
// longer than the timeout; what was used is settled when it is back.
func TestLimiterHangs(t *testing.T) {
	for _, c := range []struct {
		on     routerv1.OnUnavailable
		status int
	}{
		{routerv1.OnUnavailable_ON_UNAVAILABLE_ALLOW, 200},
		{routerv1.OnUnavailable_ON_UNAVAILABLE_LOCAL, 200},
		{routerv1.OnUnavailable_ON_UNAVAILABLE_DENY, 503},
	} {
		t.Run(c.on.String(), func(t *testing.T) {
			l := perMinute("tpm", totalTokens(1000))
			l.OnUnavailable = c.on
			e := startLimited(t, func(c *ingress.Config, _ *routerv1.Catalog) { c.LimiterTimeout = 50 * time.Millisecond }, l)
			e.router.routes(newWorker(t, "w", refuses(200, usageText(8, 0, 20))))
			resume := e.limiter.pause()
			defer resume()
			began := time.Now()
			resp, text := e.post(textPath, `{"model":"chat","prompt":[1,2,3,4,5,6,7,8],"max_tokens":20}`)
			t.Logf("answered after %v", time.Since(began))
			if resp.StatusCode != c.status {
				t.Fatalf("%d %s", resp.StatusCode, text)
			}
			if c.status == 503 && resp.Header.Get("Retry-After") == "" {
				t.Errorf("%v", resp.Header)
			}
			// Local grants no more than the limit, too.
			if resp, text := e.post(textPath, `{"model":"chat","prompt":[1,2,3,4,5,6,7,8],"max_tokens":985}`); c.on == routerv1.OnUnavailable_ON_UNAVAILABLE_LOCAL && resp.StatusCode != 429 {
				t.Errorf("%d %s", resp.StatusCode, text)
			}
			resume()
		})
	}
}

// A budget of money is charged the price of what answered, with the discount for
// cached tokens, and is reserved at the dearest price of those that may answer.
func TestCostLimit(t *testing.T) {
	budget := &routerv1.Limit{Name: "budget", Per: []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_TENANT}, Quantity: &routerv1.Limit_Cost{Cost: &routerv1.CostLimit{AmountMicros: 1000, Currency: "USD"}},
		Calendar: &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_MONTH, TimeZone: "Europe/Berlin"}}
	e := startLimited(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Prices = []*routerv1.Price{
			{Backend: "ns/cloud", Model: "vendor/m", Currency: "USD", Input: "2", CachedInput: "0.5", Output: "10", Version: "v", Names: []string{"chat"}},
			{Backend: "ns/dear", Model: "vendor/m", Currency: "USD", Input: "4", Output: "20", Version: "v", Names: []string{"chat"}},
			{Backend: "ns/yen", Model: "vendor/m", Currency: "JPY", Input: "4000", Output: "2000", Version: "v", Names: []string{"chat"}},
		}
	}, budget)
	w := newWorker(t, "provider ns/cloud", refuses(200, usageText(8, 6, 3)))
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return &routerv1.RouteResponse{Endpoints: []*routerv1.Endpoint{{Worker: w.name, Url: w.url, Provider: "ns/cloud", UpstreamModel: "vendor/m"}}}, nil
	})
	ask := func(output int) (*http.Response, string) {
		return e.post(textPath, fmt.Sprintf(`{"model":"chat","prompt":[1,2,3,4,5,6,7,8],"max_tokens":%d}`, output))
	}
	if resp, text := ask(5); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	// In billionths: 2×2 + 6×0.5 + 3×10 millionths.
	if d := cmp.Diff([]string{"commit per=1000000000=37000"}, e.limiter.end(1)); d != "" {
		t.Error(d)
	}
	// 8×4 + 5×20 millionths.
	if got := e.limiter.asked[0].GetCharges()[0].GetAmount(); got != 132_000 {
		t.Errorf("reserved %d", got)
	}
	resp, text := ask(60)
	if kind, _, code := parseError(t, text); resp.StatusCode != 429 || kind != "insufficient_quota" || code != "insufficient_quota" || resp.Header.Get("X-Should-Retry") != "false" || !strings.Contains(text, "limit 0.001 USD") {
		t.Errorf("%d %s %v", resp.StatusCode, text, resp.Header)
	}
}

// Limits of users and keys go by the credential, never by what the request says
// of itself: vllm-project/aibrix#859, opendatahub-io/models-as-a-service#1365.
func TestLimitsGoByTheCredential(t *testing.T) {
	perUser := perMinute("user", requestCount(2))
	perUser.Per = []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_USER}
	perKey := perMinute("key", requestCount(100))
	perKey.Per = []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_KEY}
	var keys, ids []string
	e := startLimited(t, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Backends[0].ApiKeys = true
		for _, user := range []string{"alice", "alice", "bob"} {
			key, id := apikey.New()
			sum := apikey.Hash(key)
			keys, ids = append(keys, key), append(ids, id)
			c.Tenants[1].Keys = append(c.Tenants[1].Keys, &routerv1.Key{Id: id, Sha256: sum[:], User: user})
		}
	}, perUser, perKey)
	e.router.routes(newWorker(t, "w", refuses(200, usageText(8, 0, 3))))
	ask := func(key int, forged string) int {
		resp, text := e.post(textPath, fmt.Sprintf(`{"model":"chat","prompt":[1],"max_tokens":5,"user":%q,"safety_identifier":%q}`, forged, forged),
			"Authorization", "Bearer "+keys[key], "X-User-Id", forged, "X-Authz-User-Id", forged, "X-Maas-Username", forged, "X-Kinference-User", forged, "X-Kinference-Tenant", "ns/other", "Connection", "x-kinference-tenant")
		if resp.StatusCode != 200 && resp.StatusCode != 429 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
		return resp.StatusCode
	}
	got := []int{ask(0, "carol"), ask(1, "dave"), ask(0, "erin"), ask(1, "bob"), ask(2, "alice")}
	if d := cmp.Diff([]int{200, 200, 429, 429, 200}, got); d != "" {
		t.Error(d)
	}
	e.limiter.end(3)
	want := map[string]int64{"ns/team/user/user=alice": 2, "ns/team/user/user=bob": 1, "ns/team/key/key=" + ids[0]: 1, "ns/team/key/key=" + ids[1]: 1, "ns/team/key/key=" + ids[2]: 1}
	e.limiter.mu.Lock()
	defer e.limiter.mu.Unlock()
	if d := cmp.Diff(want, e.limiter.levels); d != "" {
		t.Error(d)
	}
}

// A client that repeats its request id is a new request each time: for the limiter
// a repeated id is the same reservation.
func TestRepeatedRequestID(t *testing.T) {
	e := startLimited(t, nil, perMinute("rpm", requestCount(2)))
	e.router.routes(newWorker(t, "w", refuses(200, usageText(8, 0, 3))))
	var got []int
	for range 3 {
		resp, _ := e.post(chatPath, chatRequest(false, ""), "X-Request-Id", "the-same")
		got = append(got, resp.StatusCode)
	}
	if d := cmp.Diff([]int{200, 200, 429}, got); d != "" {
		t.Error(d)
	}
}

// A request that policies reject is not tried again by SDKs, and holds nothing.
func TestPolicyRejectHoldsNothing(t *testing.T) {
	e := startLimited(t, nil, allSorts()...)
	e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) {
		return nil, connect.NewError(connect.CodePermissionDenied, errors.New("rejected"))
	})
	resp, text := e.post(chatPath, chatRequest(false, ""))
	if resp.StatusCode != 403 || resp.Header.Get("X-Should-Retry") != "false" {
		t.Errorf("%d %s %v", resp.StatusCode, text, resp.Header)
	}
	if d := cmp.Diff([]string{"release"}, e.limiter.end(1)); d != "" {
		t.Error(d)
	}
}

// A client that asks for far more than its answers need reserves what they need;
// what an answer takes beyond is charged all the same.
func TestLearnedEstimate(t *testing.T) {
	e := startLimited(t, nil, perMinute("out", sortOf(routerv1.TokenSort_TOKEN_SORT_OUTPUT, 3000)))
	output := atomic.Int64{}
	output.Store(20)
	held, goOn := make(chan struct{}, 8), make(chan struct{})
	close(goOn)
	gate := atomic.Pointer[chan struct{}]{}
	gate.Store(&goOn)
	e.router.routes(newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		held <- struct{}{}
		<-*gate.Load()
		refuses(200, usageText(2, 0, int(output.Load())))(w, r)
	}))
	ask := func(n int) {
		t.Helper()
		resp, text := e.post(textPath, fmt.Sprintf(`{"model":"chat","prompt":[1,2],"max_tokens":%d}`, n))
		if resp.StatusCode != 200 {
			t.Fatalf("%d %s", resp.StatusCode, text)
		}
		<-held
	}
	reserved := func() int64 {
		e.limiter.mu.Lock()
		defer e.limiter.mu.Unlock()
		return e.limiter.asked[len(e.limiter.asked)-1].GetCharges()[0].GetAmount()
	}
	for range 32 {
		ask(20)
	}
	if n := reserved(); n != 20 {
		t.Fatalf("reserved %d", n)
	}
	e.limiter.end(32)
	output.Store(300) // more than is reserved
	ask(2000)
	if n := reserved(); n != 128 {
		t.Errorf("reserved %d where answers have 20 tokens", n)
	}
	e.limiter.end(33)
	if n := e.limiter.level("ns/team/out"); n != 32*20+300 {
		t.Errorf("%d tokens are charged", n)
	}
	// What is left out at once is at most one bucket: of two such requests the
	// second reserves all it asks for, and that is too much now.
	wait := make(chan struct{})
	gate.Store(&wait)
	first := make(chan int, 1)
	go func() {
		resp, _ := e.post(textPath, `{"model":"chat","prompt":[1,2],"max_tokens":2000}`)
		first <- resp.StatusCode
	}()
	<-held
	resp, text := e.post(textPath, `{"model":"chat","prompt":[1,2],"max_tokens":2500}`)
	if n := reserved(); n != 2500 || resp.StatusCode != http.StatusTooManyRequests {
		t.Errorf("reserved %d: %d %s", n, resp.StatusCode, text)
	}
	close(wait)
	if status := <-first; status != http.StatusOK {
		t.Errorf("the first: %d", status)
	}
}
