package acceptance

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
)

// tenantFile lets everybody in as the tenant team of the organisation acme.
func tenantFile(acme, team string) string {
	return `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: all, namespace: test }
spec: { destinations: [ { kind: InferenceWorkerSet, name: sim } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: public, namespace: test }
spec: { poolRef: { name: all }, authentication: { anonymous: { tenant: team } } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: acme, namespace: test }
spec: { ` + acme + ` }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: test }
spec:
  parentRef: { name: acme }
` + team
}

// aDay is the period of a daily budget, which does not end during a test.
func aDay() string { return "calendar: { period: Day, timeZone: " + testenv.Noon() + " }" }

func (e *env) tenants(acme, team string) {
	e.t.Helper()
	e.reload("tenants.yaml", tenantFile(acme, team))
}

// completion is a request with so many tokens of prompt and of answer.
func completion(prompt, output int, more string) string {
	ids := strings.TrimSuffix(strings.Repeat("7,", prompt), ",")
	return fmt.Sprintf(`{"model":%q,"prompt":[%s],"max_tokens":%d,"ignore_eos":true%s}`, modelName, ids, output, more)
}

func (e *env) complete(ctx context.Context, prompt, output int, more string) answer {
	return e.post(ctx, "/v1/completions", completion(prompt, output, more))
}

// used is what the limiter counts of a daily budget of the tenant team, at the end
// of which all shares are back.
func (e *env) used(limiter limiterv1connect.LimiterServiceClient, name string, limit int64) (used, leased int64) {
	e.t.Helper()
	resp, err := limiter.Read(e.t.Context(), &limiterv1.ReadRequest{Organisation: "test/acme", Buckets: []*limiterv1.Bucket{{
		Key: "test/team/" + name, Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: limit, Period: limiterv1.Calendar_PERIOD_DAY, TimeZone: testenv.Noon()}},
	}}})
	if err != nil {
		e.t.Fatal(err)
	}
	s := resp.GetStates()[0]
	return limit - s.GetRemaining(), s.GetLeased()
}

func (e *env) limiter() limiterv1connect.LimiterServiceClient {
	ctx, cancel := context.WithCancel(context.Background())
	e.t.Cleanup(cancel)
	return rpc.Client(ctx, e.stack.LimiterURL(), limiterv1connect.NewLimiterServiceClient)
}

// Five requests of 58, 80, 175, 175 and 175 tokens at once do not get through a
// limit of 100 tokens a minute: that was 663 at a peer.
func TestFiveRequestsThroughALimit(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.tenants("", "  limits: [ { name: tpm, tokens: { total: 100 }, window: 1m } ]\n")
	var granted, never atomic.Int64
	var wg sync.WaitGroup
	for _, n := range []int{58, 80, 175, 175, 175} {
		wg.Go(func() {
			switch a := e.complete(t.Context(), 8, n-8, ""); {
			case a.status == http.StatusOK:
				granted.Add(int64(a.usage.Prompt + a.usage.Output))
			case a.status != http.StatusTooManyRequests || *a.errorBody().Code != "rate_limit_exceeded" || a.errorBody().Type != "tokens":
				t.Errorf("%d tokens: %d %s", n, a.status, a.body)
			case n > 100:
				never.Add(1)
				if a.header.Get("X-Should-Retry") != "false" || a.header.Get("Retry-After") != "" || !strings.Contains(a.errorBody().Message, "too large for limit tpm") {
					t.Errorf("%d tokens never fit: %s %v", n, a.body, a.header)
				}
			default:
				if s, _ := strconv.Atoi(a.header.Get("Retry-After")); s < 1 || s > 60 || a.header.Get("X-Ratelimit-Limit-Tokens") != "100" {
					t.Errorf("%d tokens do not fit now: %v", n, a.header)
				}
			}
		})
	}
	wg.Wait()
	// A second of refill is less than two tokens.
	if n := granted.Load(); n != 58 && n != 80 || never.Load() != 3 {
		t.Errorf("granted %d tokens, %d requests can never fit", n, never.Load())
	}
	t.Logf("granted %d of 663 tokens through a limit of 100", granted.Load())
}

// Every generating route counts, and streams do whether their client asks for
// usage or not; the budget has what the engines reported, to the token.
func TestEveryRouteCounts(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.tenants("", "  limits: [ { name: day, tokens: { total: 1000000 }, "+aDay()+" }, { name: out, tokens: { output: 500000 }, "+aDay()+" } ]\n")
	limiter := e.limiter()
	sum, output := int64(0), int64(0)
	for i, send := range []func() answer{
		func() answer { return e.chat(req{text: "whole", max: 20}) },
		func() answer {
			return e.chat(req{text: "stream with usage", max: 20, stream: true, extra: `,"stream_options":{"include_usage":true}`})
		},
		func() answer { return e.complete(t.Context(), 30, 17, "") },
		func() answer { return e.complete(t.Context(), 30, 11, `,"echo":true`) },
		func() answer { return e.complete(t.Context(), 30, 5, `,"n":3`) },
		func() answer {
			return e.complete(t.Context(), 100, 9, `,"user":"somebody else","metadata":{"tenant":"other"}`)
		},
	} {
		a := send()
		if a.status != http.StatusOK || a.usage.Prompt == 0 || a.usage.Output == 0 {
			t.Fatalf("request %d: %d %.300s", i, a.status, a.body)
		}
		sum += int64(a.usage.Prompt + a.usage.Output)
		output += int64(a.usage.Output)
	}
	// Streams that do not ask for usage, on both routes; the same texts as whole
	// answers tell what they use.
	for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
		body := completion(25, 13, "")
		if strings.Contains(path, "chat") {
			body = req{text: "hidden usage", max: 13, extra: `,"ignore_eos":true`}.body()
		}
		whole := e.post(t.Context(), path, body)
		quiet := e.post(t.Context(), path, strings.Replace(strings.Replace(body, `,"stream":false`, "", 1), "{", `{"stream":true,`, 1))
		if whole.status != 200 || quiet.status != 200 || quiet.usage.Prompt != 0 {
			t.Fatalf("%s: %d %d %.300s", path, whole.status, quiet.status, quiet.body)
		}
		sum += 2 * int64(whole.usage.Prompt+whole.usage.Output)
		output += 2 * int64(whole.usage.Output)
	}
	// The other APIs, whole and as streams; counting tokens uses none.
	for _, api := range []struct{ path, body, header string }{
		{"/v1/messages", `"max_tokens":12,"messages":[{"role":"user","content":"a message"}]`, "Anthropic-Ratelimit-Tokens-Limit"},
		{"/v1/responses", `"max_output_tokens":16,"input":"a message"`, "X-Ratelimit-Limit-Tokens"},
	} {
		for _, stream := range []bool{false, true} {
			a := e.post(t.Context(), api.path, fmt.Sprintf(`{"model":%q,"stream":%v,%s}`, modelName, stream, api.body))
			var in, out int64
			for _, part := range strings.Split(a.body, `{"`) { // the last of the cumulative counts
				if i := strings.Index(part, `input_tokens":`); i >= 0 {
					_, _ = fmt.Sscanf(part[i:], `input_tokens":%d`, &in)
				}
				if i := strings.Index(part, `output_tokens":`); i >= 0 {
					_, _ = fmt.Sscanf(part[i:], `output_tokens":%d`, &out)
				}
			}
			if a.status != http.StatusOK || in == 0 || out == 0 || a.header.Get(api.header) == "" {
				t.Fatalf("%s: %d, %d in, %d out, %v %.500s", api.path, a.status, in, out, a.header, a.body)
			}
			sum, output = sum+in+out, output+out
		}
	}
	if a := e.post(t.Context(), "/v1/messages/count_tokens", fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"a message"}]}`, modelName)); a.status != http.StatusOK {
		t.Errorf("count_tokens: %d %s", a.status, a.body)
	}
	e.eventually("the budgets have what was used", func() bool {
		u, leased := e.used(limiter, "day", 1_000_000)
		o, outLeased := e.used(limiter, "out", 500_000)
		return u == sum && o == output && leased == 0 && outLeased == 0
	})
	t.Logf("%d tokens of 14 requests are counted, %d of output", sum, output)
}

// slow is a fleet of one worker whose answers take a while.
func slow(t *testing.T) *env {
	return start(t, settings{workers: 1, scale: 1, worker: func(_ int, c *fleetsim.Config) { c.Profile = engine.L40SPlain16 }})
}

// Wherever a request is when its client leaves, what it reserved is given back:
// only what was generated stays, and the permit is free at once.
func TestClientsThatVanishLeaveNothing(t *testing.T) {
	e := slow(t)
	e.tenants("", "  limits: [ { name: day, tokens: { total: 100000 }, "+aDay()+" }, { name: streams, concurrency: 2 } ]\n")
	limiter := e.limiter()
	const prompt, output = 40, 3000
	for _, stream := range []bool{true, false} {
		t.Run(fmt.Sprint("stream=", stream), func(t *testing.T) {
			var before int64
			e.eventually("no shares are out", func() bool {
				u, leased := e.used(limiter, "day", 100_000)
				before = u
				return leased == 0
			})
			// Two that hold both permits, one that is refused.
			ctx, vanish := context.WithCancel(t.Context())
			defer vanish()
			var wg sync.WaitGroup
			began := make(chan struct{}, 2)
			for range 2 {
				wg.Go(func() { e.begin(ctx, completion(prompt, output, fmt.Sprintf(`,"stream":%v`, stream)), stream, began) })
			}
			if stream {
				<-began
				<-began
			}
			e.eventually("both permits are taken", func() bool {
				a := e.complete(t.Context(), 1, 1, "")
				return a.status == http.StatusTooManyRequests && strings.Contains(a.body, "limit streams")
			})
			e.eventually("both are in the engine", func() bool { return e.workers[0].InFlight() == 2 })
			vanish()
			wg.Wait()
			gone := time.Now()
			e.eventually("both permits are back", func() bool {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ok := make(chan struct{}, 2)
				var both sync.WaitGroup
				for range 2 {
					both.Go(func() {
						if e.complete(ctx, 1, 1, "").status == http.StatusOK {
							ok <- struct{}{}
						}
					})
				}
				both.Wait()
				return len(ok) == 2
			})
			t.Logf("permits were back within %v", time.Since(gone).Round(time.Millisecond))
			var after, leased int64
			e.eventually("what was not used is back", func() bool {
				after, leased = e.used(limiter, "day", 100_000)
				return leased == 0 && after-before < output
			})
			if after-before < 2*prompt {
				t.Errorf("%d tokens are counted for two prompts of %d", after-before, prompt)
			}
			t.Logf("%d tokens are counted of %d reserved", after-before, 2*(prompt+output))
		})
	}
}

// begin sends a completion until it is taken and reads its answer until ctx is
// done; began gets a token when the first event is here.
func (e *env) begin(ctx context.Context, body string, stream bool, began chan<- struct{}) {
	for ctx.Err() == nil && e.try(ctx, body, stream, began) == http.StatusTooManyRequests {
	}
}

func (e *env) try(ctx context.Context, body string, stream bool, began chan<- struct{}) int {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.URL()+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return 0
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := e.client.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK && stream {
		if _, err := resp.Body.Read(make([]byte, 1024)); err == nil {
			began <- struct{}{}
		}
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// A request must fit every level: the organisation's limit holds though the
// tenant's own has room, and its name and level stay secret.
func TestOrganisationsLimitHolds(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.tenants("limits: [ { name: acme-secret, tokens: { total: 150 }, "+aDay()+" } ]", "  limits: [ { name: tpm, tokens: { total: 3000 }, window: 1m } ]\n")
	if a := e.complete(t.Context(), 50, 50, ""); a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	a := e.complete(t.Context(), 50, 50, "")
	if a.status != http.StatusTooManyRequests || *a.errorBody().Code != "insufficient_quota" || a.header.Get("X-Should-Retry") != "false" || a.header.Get("Retry-After") == "" {
		t.Errorf("%d %s %v", a.status, a.body, a.header)
	}
	if strings.Contains(a.body, "acme") || strings.Contains(a.body, "150") || a.header.Get("X-Ratelimit-Limit-Tokens") != "3000" {
		t.Errorf("tells of another level: %s %v", a.body, a.header)
	}
	// What is smaller still fits: nothing was charged for the refused one.
	if a := e.complete(t.Context(), 20, 20, ""); a.status != http.StatusOK {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// Limits of a policy hold for the requests that they match.
func TestPolicyLimit(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.tenants("", "  qos: interactive\n")
	e.reload("night.yaml", `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: night, namespace: test }
spec:
  limits:
  - { name: batch-requests, requests: 1, window: 1h, matches: [ { qos: batch } ] }
  - { name: long-prompts, requests: 0, window: 1h, matches: [ { promptTokens: { greaterThan: 500 } } ] }
  - { name: trial, requests: 0, window: 1h, shadow: true }
`)
	batch := func() answer { return e.postWith(completion(5, 5, ""), "X-Kinference-Qos", "batch") }
	if a := batch(); a.status != http.StatusOK {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if a := batch(); a.status != http.StatusTooManyRequests || !strings.Contains(a.body, "limit batch-requests (requests): limit 1, remaining 0, requested 1") {
		t.Errorf("%d %s", a.status, a.body)
	}
	for range 3 {
		if a := e.complete(t.Context(), 5, 5, ""); a.status != http.StatusOK {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
	if a := e.complete(t.Context(), 501, 5, ""); a.status != http.StatusTooManyRequests || *a.errorBody().Code != "insufficient_quota" || a.header.Get("X-Should-Retry") != "false" {
		t.Errorf("%d %s %v", a.status, a.body, a.header)
	}
}

func (e *env) postWith(body string, header ...string) answer {
	e.t.Helper()
	r, err := http.NewRequestWithContext(e.t.Context(), http.MethodPost, e.stack.URL()+"/v1/completions", strings.NewReader(body))
	if err != nil {
		e.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := e.client.Do(r)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return answer{status: resp.StatusCode, header: resp.Header, body: string(text)}
}

// The tenant's default and maximum of max_tokens hold, so that a request that
// does not say is not one for the rest of the context, and one that says a
// billion is not one for everything.
func TestTenantsMaxTokens(t *testing.T) {
	e := start(t, settings{workers: 1})
	e.tenants("", "  maxTokens: { default: 10, maximum: 20 }\n  limits: [ { name: day, tokens: { total: 100 }, "+aDay()+" } ]\n")
	for _, c := range []struct {
		more   string
		output int
	}{{`"max_tokens":999999999`, 20}, {`"max_tokens":null`, 10}} {
		a := e.post(t.Context(), "/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":[1,2],"ignore_eos":true,%s}`, modelName, c.more))
		if a.status != http.StatusOK || a.usage.Output != c.output {
			t.Errorf("%s: %d %d %s", c.more, a.status, a.usage.Output, a.body)
		}
	}
}
