package acceptance

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
)

// cluster is the services that limits need, as processes of their own, with a
// real Redis.
type cluster struct {
	*env
	redis   *testenv.RedisServer
	ingress []*killable
	limiter limiterv1connect.LimiterServiceClient
}

// killable is a process that a test may kill.
type killable struct {
	url, admin string
	cmd        *exec.Cmd
	log        *syncBuffer
	once       sync.Once
	dead       atomic.Bool
}

func launch(t *testing.T, bin string, args ...string) *killable {
	t.Helper()
	p := &killable{cmd: exec.Command(bin, args...), log: &syncBuffer{}}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(bin), p.log.tail(4<<10))
		}
	})
	return p
}

// kill ends the process as a crash would.
func (p *killable) kill() {
	p.once.Do(func() {
		p.dead.Store(true)
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
}

// clusterBinaries builds what startCluster runs.
func clusterBinaries(t *testing.T) string {
	t.Helper()
	return build(t, "services/ingress/cmd/ingress", "services/router/cmd/router", "services/limiter/cmd/limiter")
}

// startCluster runs n ingress processes with more flags.
func startCluster(t *testing.T, bin string, n int, scale float64, tenants string, flags ...string) *cluster {
	t.Helper()
	redis := testenv.Redis(t)
	w, err := fleetsim.Start(t.Context(), fleetsim.Config{Name: "w0", TimeScale: scale, Model: modelName, EventsPort: fleetsim.Off})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	c := &cluster{redis: redis, env: &env{t: t, dir: t.TempDir(), workers: []*fleetsim.Worker{w}, client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}}}
	t.Cleanup(c.client.CloseIdleConnections)
	c.write("fleet.yaml", c.workerSet(""))
	c.write("tenants.yaml", tenants)
	next := func() string { return testenv.FreeAddr(t) }
	router, limiter, nowhere := next(), next(), next()
	admin := func() []string { return []string{"--admin-listen", next()} }
	launch(t, filepath.Join(bin, "router"), append(admin(), "--config", c.dir, "--listen", router, "--kvtracker-url", "http://"+nowhere, "--time-scale", fmt.Sprint(scale), "--admin-api-listen", "127.0.0.1:0")...)
	launch(t, filepath.Join(bin, "limiter"), append(admin(), "--listen", limiter, "--redis-addrs", redis.Addr, "--redis-timeout", "50ms")...)
	for range n {
		addr, adminAddr := next(), next()
		args := append([]string{"--admin-listen", adminAddr}, "--listen", addr, "--router-url", "http://"+router, "--limiter-url", "http://"+limiter, "--drain-timeout", "2s")
		p := launch(t, filepath.Join(bin, "ingress"), append(args, flags...)...)
		p.url, p.admin = "http://"+addr, adminAddr
		c.ingress = append(c.ingress, p)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c.limiter = rpc.Client(ctx, "http://"+limiter, limiterv1connect.NewLimiterServiceClient)
	return c
}

// send posts a completion to an ingress and returns status and body; 0 if there
// was no answer.
func (c *cluster) send(ctx context.Context, url, body string) (int, http.Header, string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return 0, nil, err.Error()
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := c.client.Do(r)
	if err != nil {
		return 0, nil, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, nil, err.Error()
	}
	return resp.StatusCode, resp.Header, string(text)
}

// tokensOf is the usage of a whole answer.
func tokensOf(body string) int64 {
	var n int64
	if i := strings.Index(body, `"total_tokens":`); i >= 0 {
		_, _ = fmt.Sscanf(body[i:], `"total_tokens":%d`, &n)
	}
	return n
}

// loadTime is how long the tests under load go on: KINFERENCE_LIMITS_LOAD says
// more, such as 20s.
func loadTime(t *testing.T, short time.Duration) time.Duration {
	text := os.Getenv("KINFERENCE_LIMITS_LOAD")
	if text == "" {
		return short
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// 200 clients at once over four ingress processes on one bucket get what the
// limit grants: no more without leases, and with them no more than the limit and
// the shares that may be out together, which are a tenth of the bucket.
func TestManyClientsOneBucket(t *testing.T) {
	const perSecond, bucket, each = 1000, 10_000, 20
	tenants := tenantFile("", fmt.Sprintf("  limits: [ { name: tpm, tokens: { total: %d }, window: 1m, burst: %ds, onUnavailable: Deny } ]\n", perSecond*60, bucket/perSecond))
	bin := clusterBinaries(t)
	for _, leases := range []bool{false, true} {
		t.Run(fmt.Sprint("leases=", leases), func(t *testing.T) {
			c := startCluster(t, bin, 4, 100, tenants, fmt.Sprint("--limit-no-leases=", !leases), "--limiter-timeout", "5s")
			probe := completion(each/2, each/2, "")
			for _, p := range c.ingress {
				c.eventually("ingress serves", func() bool {
					status, _, _ := c.send(t.Context(), p.url, completion(bucket+1, 1, "")) // can never fit, so nothing is used
					return status == http.StatusTooManyRequests || status == http.StatusBadRequest
				})
			}
			d := loadTime(t, 3*time.Second)
			var mu sync.Mutex
			granted, count := int64(0), map[int]int{}
			refused := func() bool { mu.Lock(); defer mu.Unlock(); return count[429] > 0 }
			var took []time.Duration
			began := time.Now()
			var wg sync.WaitGroup
			for i := range 200 {
				url := c.ingress[i%len(c.ingress)].url
				wg.Go(func() {
					for time.Since(began) < d || !refused() && time.Since(began) < patience { // a slow machine needs longer to use the bucket up
						sent := time.Now()
						status, _, body := c.send(t.Context(), url, probe)
						mu.Lock()
						count[status]++
						granted += tokensOf(body)
						took = append(took, time.Since(sent))
						mu.Unlock()
						if status != http.StatusOK { // as clients do, though they wait longer
							<-time.After(100 * time.Millisecond)
						}
					}
				})
			}
			wg.Wait()
			elapsed := time.Since(began)
			limit := int64(bucket) + int64(elapsed.Seconds()*perSecond)
			bound := limit
			if leases {
				bound += bucket / 10
			}
			slices.Sort(took)
			t.Logf("%.1f s: granted %d tokens in %d requests; limit %d, bound %d (%.1f %% of the limit used); %d refused, statuses %v; p50 %v, p99 %v", elapsed.Seconds(), granted, count[200],
				limit, bound, 100*float64(granted)/float64(limit), count[429], count, took[len(took)/2].Round(time.Millisecond), took[len(took)*99/100].Round(time.Millisecond))
			if granted > bound {
				t.Errorf("granted %d tokens, the bound is %d", granted, bound)
			}
			// 503: on a machine this busy Redis may not answer in time, and the limit
			// denies then.
			if granted < bucket/2 || count[429] == 0 || count[200]+count[429]+count[503] != len(took) {
				t.Errorf("granted %d tokens, statuses %v", granted, count)
			}
		})
	}
}

// The death of an ingress frees all that its requests held within the time to live
// of reservations, at the other ones.
func TestIngressCrashFreesReservations(t *testing.T) {
	c := startCluster(t, clusterBinaries(t), 2, 1, tenantFile("", "  limits: [ { name: streams, concurrency: 2, onUnavailable: Deny }, { name: day, tokens: { total: 10000 }, "+aDay()+" } ]\n"), "--limit-ttl", "5s", "--limit-lease-ttl", "1s", "--limiter-timeout", "5s")
	a, b := c.ingress[0], c.ingress[1]
	for _, p := range c.ingress {
		c.eventually("ingress serves", func() bool {
			status, _, _ := c.send(t.Context(), p.url, completion(1, 1, ""))
			return status == http.StatusOK
		})
	}
	used := func() (int64, int64) { return c.used(c.limiter, "day", 10_000) }
	var before int64
	c.eventually("all is settled", func() bool { u, leased := used(); before = u; return leased == 0 && u == 4 })
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { // until it is taken: the requests of the test hold permits, too
			for status := 0; status == 0 || status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable; {
				if t.Context().Err() != nil || a.dead.Load() {
					return
				}
				status, _, _ = c.send(t.Context(), a.url, completion(100, 3000, `,"stream":true`))
			}
		})
	}
	full := func() bool {
		status, _, body := c.send(t.Context(), b.url, completion(1, 1, ""))
		return status == http.StatusTooManyRequests && strings.Contains(body, "limit streams")
	}
	c.eventually("both streams run", func() bool { return c.workers[0].InFlight() == 2 })
	c.eventually("the other ingress knows of both streams", full)
	// Heartbeats keep them beyond their time to live.
	held := time.Now()
	c.eventually("the streams are longer than their time to live", func() bool {
		if status, _, _ := c.send(t.Context(), b.url, completion(1, 1, "")); status == http.StatusOK {
			t.Fatalf("a permit of a running stream was free after %v", time.Since(held))
		}
		return time.Since(held) > 7*time.Second
	})
	a.kill()
	dead := time.Now()
	wg.Wait()
	c.eventually("the permits are free", func() bool {
		status, _, _ := c.send(t.Context(), b.url, completion(1, 1, ""))
		return status == http.StatusOK
	})
	permits := time.Since(dead)
	var after int64
	c.eventually("the tokens are back", func() bool { u, leased := used(); after = u; return leased == 0 && u-before < 100 })
	t.Logf("after the crash: permits free after %v, 6200 reserved tokens back after %v (counted since: %d)", permits.Round(10*time.Millisecond), time.Since(dead).Round(10*time.Millisecond), after-before)
}

// onUnavailable of each limit holds while Redis is paused or dead, requests do
// not wait for it longer than the timeout, and what was used meanwhile is counted
// once when it is back.
func TestRedisAwayUnderLoad(t *testing.T) {
	var files strings.Builder
	files.WriteString("apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferencePool\nmetadata: { name: all, namespace: test }\nspec: { destinations: [ { kind: InferenceWorkerSet, name: sim } ] }\n")
	modes := []string{"allow", "local", "deny"}
	for _, mode := range modes {
		fmt.Fprintf(&files, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: %[1]s, namespace: test }
spec: { pathPrefix: /%[1]s, poolRef: { name: all }, authentication: { anonymous: { tenant: %[1]s } } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: %[1]s, namespace: test }
spec: { limits: [ { name: day, tokens: { total: 100000000 }, %[3]s, onUnavailable: %[2]s } ] }
`, mode, strings.ToUpper(mode[:1])+mode[1:], aDay())
	}
	c := startCluster(t, clusterBinaries(t), 1, 100, files.String(), "--limit-no-leases", "--limit-ttl", "10m", // nothing is put right by its expiry
		"--limit-spill", filepath.Join(t.TempDir(), "settlements")) // a long pause leaves more to settle than the queue holds
	body := completion(10, 10, "")
	var mu sync.Mutex
	tokens := map[string]int64{}
	ask := func(mode string) int {
		status, _, text := c.send(context.Background(), c.ingress[0].url+"/"+mode, body)
		mu.Lock()
		defer mu.Unlock()
		tokens[mode] += tokensOf(text)
		return status
	}
	for _, mode := range modes {
		c.eventually(mode+" is served", func() bool { return ask(mode) == http.StatusOK })
	}
	phase := "before"
	type tally struct {
		count map[int]int
		worst time.Duration
	}
	seen := map[string]*tally{}
	load := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for i := range 24 {
			mode := modes[i%len(modes)]
			wg.Go(func() {
				for ctx.Err() == nil {
					mu.Lock()
					now := phase
					mu.Unlock()
					sent := time.Now()
					status := ask(mode)
					mu.Lock()
					s := seen[now+" "+mode]
					if s == nil {
						s = &tally{count: map[int]int{}}
						seen[now+" "+mode] = s
					}
					if now == phase { // else it belongs to neither
						s.count[status]++
						s.worst = max(s.worst, time.Since(sent))
					}
					mu.Unlock()
				}
			})
		}
		return func() { cancel(); wg.Wait() }
	}
	during := func(name string, d time.Duration) {
		mu.Lock()
		phase = name
		mu.Unlock()
		end := time.Now().Add(d)
		c.eventually(name, func() bool { return time.Now().After(end) })
	}
	d := loadTime(t, 1500*time.Millisecond)
	check := func(phases ...string) {
		t.Helper()
		for _, mode := range modes {
			for _, p := range phases {
				s := seen[p+" "+mode]
				if s == nil {
					t.Fatalf("%s %s: no request", p, mode)
				}
				t.Logf("%-9s %-6s %v, slowest %v", p, mode, s.count, s.worst.Round(time.Millisecond))
				away := p == "paused" || p == "dead"
				want := http.StatusOK
				if away && mode == "deny" {
					want = http.StatusServiceUnavailable
				}
				if s.count[want] == 0 || away && len(s.count) > 1 {
					t.Errorf("%s %s: %v, want %d", p, mode, s.count, want)
				}
				if s.worst > 5*time.Second { // no measurement: a hang
					t.Errorf("%s %s: a request took %v", p, mode, s.worst)
				}
			}
		}
	}
	stop := load()
	during("healthy", d)
	during("turning", 0)
	c.redis.Pause()
	during("settling", 500*time.Millisecond)
	during("paused", d)
	during("turning", 0)
	c.redis.Resume()
	c.eventually("deny is served again", func() bool { return ask("deny") == http.StatusOK })
	during("resumed", d)
	during("ending", 0)
	stop()
	check("healthy", "paused", "resumed")
	// All that was used is counted, once.
	read := func(mode string) int64 {
		resp, err := c.limiter.Read(t.Context(), &limiterv1.ReadRequest{Organisation: "test/" + mode, Buckets: []*limiterv1.Bucket{{
			Key: "test/" + mode + "/day", Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: 100_000_000, Period: limiterv1.Calendar_PERIOD_DAY, TimeZone: testenv.Noon()}},
		}}})
		if err != nil {
			return -1
		}
		return 100_000_000 - resp.GetStates()[0].GetRemaining()
	}
	for _, mode := range modes {
		var got int64
		c.eventually(mode+" is settled", func() bool { got = read(mode); return got == tokens[mode] })
		t.Logf("%-6s %d tokens were used, %d are counted", mode, tokens[mode], got)
	}

	// A Redis that dies comes back empty: then limits begin anew, and nobody waits.
	stop = load()
	during("running", d/2)
	during("turning", 0)
	c.redis.Stop()
	during("settling", 500*time.Millisecond)
	during("dead", d)
	during("turning", 0)
	c.redis.Start(t)
	c.eventually("deny is served again", func() bool { return ask("deny") == http.StatusOK })
	during("restarted", d)
	during("ending", 0)
	stop()
	check("running", "dead", "restarted")
}

// What limits add to a request: none, shares in hand, and a trip to Redis for
// each. It reports; nothing here fails for being slow.
func TestLatencyOfLimits(t *testing.T) {
	files := tenantFile("limits: [ { name: org, tokens: { total: 100000000 }, window: 1m } ]", `  limits:
  - { name: tpm, tokens: { total: 100000000 }, window: 1m }
  - { name: day, tokens: { total: 1000000000 }, `+aDay()+` }
  - { name: rpm, requests: 10000000, window: 1m }
`) + `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: free, namespace: test }
spec: { pathPrefix: /free, poolRef: { name: all }, authentication: { anonymous: { tenant: free } } }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: free, namespace: test }
`
	n := 300
	if os.Getenv("KINFERENCE_LIMITS_LOAD") != "" {
		n = 5000
	}
	bin := clusterBinaries(t)
	for _, leases := range []bool{true, false} {
		c := startCluster(t, bin, 1, 1000, files, fmt.Sprint("--limit-no-leases=", !leases))
		url := c.ingress[0].url
		for _, path := range []string{"", "/free"} {
			c.eventually("ingress serves", func() bool {
				status, _, _ := c.send(t.Context(), url+path, completion(1, 1, ""))
				return status == http.StatusOK
			})
		}
		took := map[string][]time.Duration{}
		for range n {
			for _, path := range []string{"/free", ""} { // one beside the other, as the machine is never quiet
				began := time.Now()
				if status, _, body := c.send(t.Context(), url+path, completion(1, 1, "")); status != http.StatusOK {
					t.Fatalf("%d %s", status, body)
				}
				took[path] = append(took[path], time.Since(began))
			}
		}
		at := func(path string, q float64) time.Duration {
			slices.Sort(took[path])
			return took[path][int(q*float64(len(took[path])-1))]
		}
		t.Logf("leases=%v: whole request without limits p50 %v, p99 %v; with four limits of two levels p50 %v, p99 %v", leases,
			at("/free", .5).Round(time.Microsecond), at("/free", .99).Round(time.Microsecond), at("", .5).Round(time.Microsecond), at("", .99).Round(time.Microsecond))
		resp, err := c.client.Get("http://" + c.ingress[0].admin + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		for _, way := range []string{"lease", "trip"} {
			if n := histogram(string(text), way, 1); n > 0 {
				t.Logf("leases=%v: wait for limits by %s, of %.0f requests: p50 at most %gs, p99 at most %gs", leases, way, n, histogram(string(text), way, .5), histogram(string(text), way, .99))
			}
		}
	}
}

// histogram reads the wait for limits from an exposition: the upper bound of a
// quantile below 1, or with 1 the number of waits.
func histogram(text, way string, quantile float64) float64 {
	const name = "kinference_limit_duration_seconds_bucket{"
	type bucket struct{ le, n float64 }
	var list []bucket
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, name) || !strings.Contains(line, `way="`+way+`"`) {
			continue
		}
		var b bucket
		_, rest, _ := strings.Cut(line, `le="`)
		le, count, _ := strings.Cut(rest, `"} `)
		b.le, _ = strconv.ParseFloat(le, 64)
		b.n, _ = strconv.ParseFloat(strings.TrimSpace(count), 64)
		list = append(list, b)
	}
	if len(list) == 0 {
		return 0
	}
	all := list[len(list)-1].n
	if quantile == 1 {
		return all
	}
	for _, b := range list {
		if b.n >= quantile*all {
			return b.le
		}
	}
	return 0
}
