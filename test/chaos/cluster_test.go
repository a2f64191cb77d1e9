package chaos

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
)

const (
	modelName = "sim/qwen"
	timeScale = 5
	workers   = 4
	// limitTTL is when what a dead ingress held is given back.
	limitTTL = 3 * time.Second
)

// cluster is an installation with replicas of all that has them, each in a process
// of its own: two of each service but relay and accounting, of which there is one,
// three NATS servers with streams of three copies, and a Redis primary with two
// replicas and three Sentinels. Only the workers are simulated, in this process,
// which thus knows the truth.
type cluster struct {
	t    *testing.T
	site *site
	dir  string
	rate int

	fleet []*fleetsim.Worker
	cloud *fleetsim.Worker
	truth truth

	ingress, router, kvtracker, relay, limiter, classifier, accounting []*process
	nats, redis, sentinel                                              []*process

	trackers []kvtrackerv1connect.KVTrackerServiceClient
	limits   limiterv1connect.LimiterServiceClient
	ledger   accountingv1connect.AccountingServiceClient
	streams  jetstream.JetStream
	probe    *http.Client
	balancer *balancer

	out     atomic.Int64 // requests at the provider
	leaked  atomic.Int64 // those of them with personal data
	session int
}

// truth is what the engines know of each request: once for each that it was at.
type truth struct {
	mu   sync.Mutex
	used map[string][]fleetsim.Used
}

func (k *truth) add(u fleetsim.Used) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.used == nil {
		k.used = map[string][]fleetsim.Used{}
	}
	k.used[u.RequestID] = append(k.used[u.RequestID], u)
}

// of returns those whose ids begin with a prefix.
func (k *truth) of(prefix string) map[string][]fleetsim.Used {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[string][]fleetsim.Used{}
	for id, u := range k.used {
		if strings.HasPrefix(id, prefix) {
			out[id] = u
		}
	}
	return out
}

// startCluster starts all at once: services wait for each other.
func startCluster(t *testing.T, rate int) *cluster {
	t.Helper()
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, site: newSite(t), dir: t.TempDir(), rate: rate, probe: &http.Client{Timeout: time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 2}}}
	t.Cleanup(c.probe.CloseIdleConnections)
	c.startFleet()
	conf := filepath.Join(c.dir, "conf")
	c.write(conf, "fleet.yaml", c.resources())

	natsURL := c.startNATS(filepath.Join(bin, "nats-server"))
	c.startRedis()
	var sentinels []string
	for _, s := range c.sentinel {
		sentinels = append(sentinels, s.addr+":26379")
	}

	places := func(n int) (out []*place) {
		for range n {
			out = append(out, c.site.place())
		}
		return out
	}
	urls := func(list []*place, port int) string {
		var out []string
		for _, p := range list {
			out = append(out, fmt.Sprintf("http://%s:%d", p.addr, port))
		}
		return strings.Join(out, ",")
	}
	routers, trackers, limiters, classifiers, accounts := places(2), places(2), places(2), places(2), places(1)
	start := func(name string, at []*place, port int, args func(i int) []string) (out []*process) {
		for i, p := range at {
			full := []string{"--admin-listen", p.addr + ":9990", "--drain-timeout", "10s"}
			if port > 0 {
				full = append(full, "--listen", fmt.Sprintf("%s:%d", p.addr, port))
			}
			title := name
			if len(at) > 1 {
				title = fmt.Sprintf("%s-%d", name, i)
			}
			program := name
			if name == "relay" {
				program = "kvtracker"
			}
			out = append(out, c.newProcess(title, p, func() bool { return c.get("http://" + p.addr + ":9990/readyz") }, filepath.Join(bin, program), append(full, args(i)...)...))
		}
		return out
	}
	router := urls(routers, 7102)
	c.accounting = start("accounting", accounts, 7106, func(int) []string {
		return []string{"--nats-url", natsURL, "--usage-replicas", "3", "--ledger", filepath.Join(c.dir, "ledger.db")}
	})
	c.limiter = start("limiter", limiters, 7104, func(int) []string {
		return []string{"--redis-addrs", strings.Join(sentinels, ","), "--redis-mode", "sentinel", "--redis-master", "m"}
	})
	c.kvtracker = start("kvtracker", trackers, 7103, func(int) []string {
		return []string{"--mode", "tracker", "--nats-url", natsURL, "--stream-replicas", "3", "--stream-file"}
	})
	c.router = start("router", routers, 7102, func(int) []string {
		return []string{"--config", conf, "--admin-api-listen", "", "--kvtracker-url", urls(trackers, 7103), "--nats-url", natsURL, "--time-scale", fmt.Sprint(timeScale), "--probe-interval", "250ms"}
	})
	c.relay = start("relay", places(1), 0, func(int) []string {
		return []string{"--mode", "relay", "--nats-url", natsURL, "--router-url", router, "--stream-replicas", "3", "--stream-file"}
	})
	c.classifier = start("classifier", classifiers, 7105, func(int) []string { return []string{"--router-url", router} })
	c.ingress = start("ingress", places(2), 8080, func(i int) []string {
		return []string{
			"--router-url", router, "--limiter-url", urls(limiters, 7104), "--classifier-url", urls(classifiers, 7105), "--nats-url", natsURL, "--usage-replicas", "3",
			"--usage-dir", filepath.Join(c.dir, fmt.Sprint("usage-", i)), "--limit-spill", filepath.Join(c.dir, fmt.Sprint("settlements-", i)), "--limit-replicas", "2",
			"--limit-ttl", limitTTL.String(), "--limit-lease-ttl", "2s", "--limiter-timeout", "250ms", "--provider-private-networks", "10.0.0.0/8,127.0.0.0/8", "--parity-interval", "1h",
		}
	})

	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	for _, p := range trackers {
		c.trackers = append(c.trackers, rpc.Client(ctx, urls([]*place{p}, 7103), kvtrackerv1connect.NewKVTrackerServiceClient))
	}
	c.limits = rpc.Client(ctx, urls(limiters, 7104), limiterv1connect.NewLimiterServiceClient)
	c.ledger = rpc.Client(ctx, urls(accounts, 7106), accountingv1connect.NewAccountingServiceClient)
	c.balancer = newBalancer(c)
	for _, p := range c.processes() {
		c.waitFor(p)
	}
	return c
}

func (c *cluster) processes() (all []*process) {
	for _, list := range [][]*process{c.nats, c.redis, c.sentinel, c.limiter, c.kvtracker, c.router, c.relay, c.classifier, c.accounting, c.ingress} {
		all = append(all, list...)
	}
	return all
}

// waitFor blocks until a process says that it is well.
func (c *cluster) waitFor(p *process) {
	c.t.Helper()
	if !eventually(time.Minute, p.well) {
		c.t.Fatalf("%s is not ready after a minute:\n%s", p.name, p.tail(4<<10))
	}
}

// get reports whether a URL is answered 200.
func (c *cluster) get(url string) bool {
	resp, err := c.probe.Get(url)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode == http.StatusOK
}

func (c *cluster) write(dir, name, content string) {
	c.t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// startFleet starts workers with small caches, so that blocks come and go, and a
// provider that looks for what must not leave.
func (c *cluster) startFleet() {
	profile := engine.L40SPlain16
	profile.Blocks = 3000
	start := func(cfg fleetsim.Config) *fleetsim.Worker {
		cfg.TimeScale, cfg.Profile, cfg.OnUsed = timeScale, profile, c.truth.add
		w, err := fleetsim.Start(context.Background(), cfg)
		if err != nil {
			c.t.Fatal(err)
		}
		c.t.Cleanup(w.Kill)
		return w
	}
	for i := range workers {
		c.fleet = append(c.fleet, start(fleetsim.Config{Name: fmt.Sprintf("w%d", i), Seed: int64(i), Model: modelName, Listen: c.site.host() + ":0"}))
	}
	c.cloud = start(fleetsim.Config{Name: "cloud", Model: "vendor/qwen", EventsPort: fleetsim.Off})
}

// resources let tenants in by path. There is a policy by which prompts with
// personal data stay, and others of the path /pii go to the provider.
func (c *cluster) resources() string {
	c.t.Helper()
	dir, err := model.Dir()
	if err != nil {
		c.t.Fatal(err)
	}
	target, err := url.Parse(c.cloud.URL())
	if err != nil {
		c.t.Fatal(err)
	}
	l, err := net.Listen("tcp", c.site.host()+":0")
	if err != nil {
		c.t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval = -1
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) }
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		c.out.Add(1)
		if strings.Contains(string(body), personal) {
			c.leaked.Add(1)
		}
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		proxy.ServeHTTP(w, r)
	})}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = srv.Serve(l) }()
	c.t.Cleanup(func() { srv.Close(); <-ended })

	var b strings.Builder
	fmt.Fprintf(&b, `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: sim, namespace: test }
spec:
  models: [ { name: %q, aliases: [ qwen ] } ]
  tokenizer: { path: %q }
  endpoints:
`, modelName, dir)
	for _, w := range c.fleet {
		fmt.Fprintf(&b, "  - { name: %q, address: %q, kvEvents: %q, kvReplay: %q }\n", w.Name(), w.Addr(), w.EventsAddr(0), w.ReplayAddr(0))
	}
	fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceProvider
metadata: { name: cloud, namespace: test }
spec: { schema: OpenAICompatible, endpoint: "http://%s/v1", models: [ { name: %s, upstreamName: vendor/qwen } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: own, namespace: test }
spec: { destinations: [ { kind: InferenceWorkerSet, name: sim } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: mixed, namespace: test }
spec: { destinations: [ { kind: InferenceWorkerSet, name: sim }, { kind: InferenceProvider, name: cloud } ] }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: personal-data-stays, namespace: test }
spec:
  targetRefs: [ { kind: InferencePool, name: mixed } ]
  rules:
  - name: serve
    route:
      exclude: [ { name: stays, if: { tag: pii-detected }, drop: { backend: { type: Provider } } } ]
      select: [ { type: Provider, order: [ cloud ] }, { type: Local, minimize: PredictedTTFT } ]
      onEmpty: Reject
`, l.Addr(), modelName)
	for _, k := range kinds {
		limits := ""
		switch k.path {
		case "chat":
			limits = fmt.Sprintf("limits: [ { name: day, tokens: { total: %d }, calendar: { period: Day, timeZone: %s }, onUnavailable: Allow } ]", int64(dayLimit), testenv.Noon())
		case "tight":
			limits = fmt.Sprintf("limits: [ { name: tpm, tokens: { total: %d }, window: 1m, burst: %ds, onUnavailable: Deny } ]", c.tight()*60, tightBurst)
		}
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: %[1]s, namespace: test }
spec: { %[3]s }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: %[1]s, namespace: test }
spec: { pathPrefix: /%[1]s, poolRef: { name: %[2]s }, authentication: { anonymous: { tenant: %[1]s } } }
`, k.path, k.pool, limits)
	}
	return b.String()
}

// startNATS starts three servers and returns their URLs.
func (c *cluster) startNATS(bin string) string {
	c.t.Helper()
	var at []*place
	var urls, routes []string
	for range 3 {
		p := c.site.place()
		at = append(at, p)
		urls, routes = append(urls, "nats://"+p.addr+":4222"), append(routes, "nats://"+p.addr+":6222")
	}
	for i, p := range at {
		name := fmt.Sprint("nats-", i)
		c.write(c.dir, name+".conf", fmt.Sprintf(`server_name: %s
listen: %s:4222
max_payload: 4MB
jetstream { store_dir: %q }
cluster { name: chaos, listen: %s:6222, routes: [ %s ] }
`, name, p.addr, filepath.Join(c.dir, name), p.addr, strings.Join(routes, ", ")))
		c.nats = append(c.nats, c.newProcess(name, p, func() bool { return c.natsIsWell(p) }, bin, "-c", filepath.Join(c.dir, name+".conf")))
	}
	list := strings.Join(urls, ",")
	nc, err := nats.Connect(list, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(200*time.Millisecond), nats.PingInterval(time.Second), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(nc.Close)
	if c.streams, err = jetstream.New(nc, jetstream.WithDefaultTimeout(2*time.Second)); err != nil {
		c.t.Fatal(err)
	}
	// Streams have three copies only where three servers are there to make them.
	if !eventually(time.Minute, func() bool { _, err := c.streams.AccountInfo(context.Background()); return err == nil }) {
		c.t.Fatalf("JetStream is not ready after a minute:\n%s", c.nats[0].tail(4<<10))
	}
	for _, p := range c.nats {
		c.waitFor(p)
	}
	return list
}

// natsIsWell reports whether a server has a leader of JetStream and all that it
// should have.
func (c *cluster) natsIsWell(p *place) bool {
	nc, err := nats.Connect("nats://"+p.addr+":4222", nats.Timeout(time.Second), nats.NoReconnect(), nats.DontRandomize(), nats.IgnoreDiscoveredServers())
	if err != nil {
		return false
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(time.Second))
	if err != nil {
		return false
	}
	_, err = js.AccountInfo(context.Background())
	return err == nil
}

// leader returns the server that leads a stream, and one that follows.
func (c *cluster) leader(stream string) (leader, follower *process) {
	c.t.Helper()
	if !eventually(30*time.Second, func() bool {
		s, err := c.streams.Stream(context.Background(), stream)
		if err != nil {
			return false
		}
		info := s.CachedInfo()
		if info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != 2 {
			return false
		}
		for _, r := range info.Cluster.Replicas {
			if !r.Current {
				return false
			}
		}
		for _, p := range c.nats {
			switch p.name {
			case info.Cluster.Leader:
				leader = p
			case info.Cluster.Replicas[0].Name:
				follower = p
			}
		}
		return leader != nil && follower != nil
	}) {
		c.t.Fatalf("the stream %s has no leader with two followers that are current", stream)
	}
	return leader, follower
}

// startRedis starts a primary with two replicas, which write all to disk each second,
// and three Sentinels. A primary that is silent for a second is replaced. One without
// a replica takes no writes: else one that was killed and comes back too soon takes
// some that are lost when it becomes a replica.
func (c *cluster) startRedis() {
	c.t.Helper()
	first := ""
	for i := range 3 {
		p := c.site.place()
		name := fmt.Sprint("redis-", i)
		dir := filepath.Join(c.dir, name)
		conf := fmt.Sprintf("port 6379\nbind %s\nprotected-mode no\ndir %s\nsave \"\"\nappendonly yes\nrepl-diskless-sync-delay 0\nmin-replicas-to-write 1\n", p.addr, dir)
		if i == 0 {
			first = p.addr
		} else {
			conf += "replicaof " + first + " 6379\n" // Sentinels write it anew
		}
		c.write(dir, "redis.conf", conf)
		c.redis = append(c.redis, c.newProcess(name, p, func() bool { return redis(p.addr+":6379", "PING") == "+PONG" }, "redis-server", filepath.Join(dir, "redis.conf")))
	}
	for i := range 3 {
		p := c.site.place()
		name := fmt.Sprint("sentinel-", i)
		dir := filepath.Join(c.dir, name)
		c.write(dir, "sentinel.conf", fmt.Sprintf("port 26379\nbind %s\nprotected-mode no\ndir %s\nsentinel monitor m %s 6379 2\nsentinel down-after-milliseconds m 1000\nsentinel failover-timeout m 4000\n", p.addr, dir, first))
		c.sentinel = append(c.sentinel, c.newProcess(name, p, func() bool { return redis(p.addr+":26379", "PING") == "+PONG" }, "redis-server", filepath.Join(dir, "sentinel.conf"), "--sentinel"))
	}
}

// primary returns the Redis server that a Sentinel takes for the primary, once the
// others follow it.
func (c *cluster) primary() *process {
	c.t.Helper()
	var found *process
	if !eventually(time.Minute, func() bool {
		named := redis(c.sentinel[0].addr+":26379", "SENTINEL", "get-master-addr-by-name", "m")
		found = nil
		for _, p := range c.redis {
			if strings.Contains(named, p.addr+"\r\n") {
				found = p
			} else if !strings.Contains(redis(p.addr+":6379", "INFO", "replication"), "master_link_status:up") {
				return false
			}
		}
		return found != nil
	}) {
		c.t.Fatal("Redis has no primary with two replicas")
	}
	return found
}

// redis sends a command and returns the answer, the first line or all of a bulk.
func redis(addr string, command ...string) string {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	fmt.Fprintf(conn, "*%d\r\n", len(command))
	for _, word := range command {
		fmt.Fprintf(conn, "$%d\r\n%s\r\n", len(word), word)
	}
	in := bufio.NewReader(conn)
	line, err := in.ReadString('\n')
	if err != nil {
		return ""
	}
	switch line[0] {
	case '$', '*': // as much as comes at once: it is small
		rest := make([]byte, 8<<10)
		n, _ := in.Read(rest)
		return string(rest[:n])
	}
	return strings.TrimSpace(line)
}
