package acceptance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// mortal is a process that a test kills and starts again with the same command.
type mortal struct {
	t    *testing.T
	name string
	path string
	args []string
	log  *syncBuffer

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
}

// mortalProcess starts a process that ends with the test.
func mortalProcess(t *testing.T, name, path string, args ...string) *mortal {
	t.Helper()
	p := &mortal{t: t, name: name, path: path, args: args, log: &syncBuffer{}}
	p.start()
	t.Cleanup(func() {
		p.end(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("%s:\n%s", name, p.log.tail(6<<10))
		}
	})
	return p
}

func (p *mortal) start() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd = exec.Command(p.path, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		p.t.Errorf("start %s: %v", p.name, err)
		return
	}
	p.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(p.cmd, p.done)
}

// end sends a signal and waits; SIGKILL is what it gets if it takes too long.
func (p *mortal) end(signal syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done == nil {
		return
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, signal) // it may have ended
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		<-p.done
	}
	p.done = nil
}

// truth is what the fleet knows about each request.
type truth struct {
	mu   sync.Mutex
	used map[string][]fleetsim.Used
}

func (k *truth) add(u fleetsim.Used) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.used[u.RequestID] = append(k.used[u.RequestID], u)
}

// requests is how many the test sends: KINFERENCE_USAGE_REQUESTS, else few.
func requests(t *testing.T) int {
	text := os.Getenv("KINFERENCE_USAGE_REQUESTS")
	if text == "" {
		return 1000
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("KINFERENCE_USAGE_REQUESTS: %v", err)
	}
	return n
}

// usageTenants of the exactly-once test, each behind a path of its own.
var usageTenants = []string{"red", "green", "blue"}

// Requests go through two ingress processes while NATS is killed and started
// again, accounting is killed twice and one ingress once, with requests in its
// hands. Then the ledger has each request that the fleet saw once, with the
// fleet's own numbers; those that were cut off are marked.
func TestUsageIsCountedExactlyOnce(t *testing.T) {
	n := requests(t)
	bin := build(t, "services/ingress/cmd/ingress", "services/router/cmd/router", "services/accounting/cmd/accounting")
	server := filepath.Join(bin, "nats-server")
	if out, err := exec.Command("go", "build", "-o", server, "github.com/nats-io/nats-server/v2").CombinedOutput(); err != nil {
		t.Fatalf("build nats-server: %v\n%s", err, out)
	}

	known := &truth{used: map[string][]fleetsim.Used{}}
	e := &env{t: t, dir: t.TempDir(), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	t.Cleanup(e.client.CloseIdleConnections)
	for i := range 3 {
		w, err := fleetsim.Start(context.Background(), fleetsim.Config{
			Name: fmt.Sprintf("w%d", i), Profile: engine.L40SPlain16, TimeScale: 20, Seed: int64(i), Model: modelName, OnUsed: known.add,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Kill)
		e.workers = append(e.workers, w)
	}
	e.write("fleet.yaml", e.workerSet("")+usageResources())

	next := func() string { return testenv.FreeAddr(t) }
	nats, router, accounting := next(), next(), next()
	front := []string{next(), next()}
	data := t.TempDir()
	admin := func() []string { return []string{"--admin-listen", next(), "--drain-timeout", "5s"} }
	host, port, _ := strings.Cut(nats, ":")
	natsProcess := mortalProcess(t, "nats", server, "-a", host, "-p", port, "-js", "-sd", filepath.Join(data, "nats"))
	mortalProcess(t, "router", filepath.Join(bin, "router"), append(admin(), "--config", e.dir, "--listen", router, "--kvtracker-url", "http://127.0.0.1:1",
		"--admin-api-listen", "127.0.0.1:0", "--time-scale", "20")...)
	book := mortalProcess(t, "accounting", filepath.Join(bin, "accounting"), append(admin(), "--listen", accounting, "--nats-url", "nats://"+nats,
		"--ledger", filepath.Join(data, "ledger.db"))...)
	var ingress []*mortal
	for i, addr := range front {
		ingress = append(ingress, mortalProcess(t, "ingress "+strconv.Itoa(i), filepath.Join(bin, "ingress"), append(admin(), "--listen", addr, "--router-url", "http://"+router,
			"--nats-url", "nats://"+nats, "--usage-dir", filepath.Join(data, "spool"+strconv.Itoa(i)))...))
	}
	for _, addr := range front {
		e.eventually("ingress serves", func() bool {
			resp, err := e.client.Post("http://"+addr+"/red/v1/chat/completions", "application/json", strings.NewReader(req{text: "ping", max: 1}.body()))
			if err != nil {
				return false
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			return resp.StatusCode == http.StatusOK
		})
	}

	// What goes wrong, one after the other, by how many requests were sent at least.
	began := time.Now()
	var sent atomic.Int64
	over := make(chan struct{})
	go func() {
		defer close(over)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		pause := func(d time.Duration) { <-time.After(d) }
		for _, fault := range []struct {
			share float64
			f     func()
		}{
			{.15, func() { natsProcess.end(syscall.SIGKILL); pause(2 * time.Second); natsProcess.start() }},
			{.35, func() { book.end(syscall.SIGKILL); pause(time.Second); book.start() }},
			{.55, func() { ingress[1].end(syscall.SIGKILL); pause(500 * time.Millisecond); ingress[1].start() }},
			{.80, func() { book.end(syscall.SIGKILL); book.start() }},
		} {
			for float64(sent.Load()) < fault.share*float64(n) {
				<-tick.C
			}
			fault.f()
		}
	}()

	ok := new(atomic.Int64)
	var clients sync.WaitGroup
	for c := range 24 {
		clients.Go(func() {
			random := rand.New(rand.NewPCG(uint64(c), 7))
			for {
				i := sent.Add(1)
				select {
				case <-over:
					if i > int64(n) {
						return
					}
				default: // as long as something is to go wrong
				}
				if e.use(front[random.IntN(2)], int(i), random) {
					ok.Add(1)
				}
			}
		})
	}
	clients.Wait()
	took := time.Since(began)

	// All that is in the spools and on the stream gets there.
	ctx, closeRPC := context.WithCancel(context.Background())
	defer closeRPC()
	ledger := rpc.Client(ctx, "http://"+accounting, accountingv1connect.NewAccountingServiceClient)
	var events []*usagev1.Usage
	var sums []*accountingv1.Row
	e.eventually("the ledger has all", func() bool {
		got, err := export(ctx, ledger)
		events = got
		known.mu.Lock()
		want := len(known.used)
		known.mu.Unlock()
		if err != nil || len(events) < want {
			return false
		}
		answer, err := ledger.QueryUsage(ctx, &accountingv1.QueryUsageRequest{GroupBy: []accountingv1.Group{accountingv1.Group_GROUP_TENANT}})
		if err != nil || answer.Lag == nil || answer.GetLag() > 0 {
			return false
		}
		sums = answer.GetRows()
		return true
	})
	result := compare(t, known, events)
	t.Logf("%d requests at least, %d answered in full, in %s: %d events for %d requests that the fleet saw; %s", n, ok.Load(), took.Round(time.Millisecond), len(events), len(known.used), result)
	if ok.Load() < int64(n)/2 {
		t.Errorf("only %d of %d were answered", ok.Load(), n)
	}
	total := uint64(0)
	for _, row := range sums {
		total += row.GetSums().GetRequests()
		want := result.ledger[row.GetTenant()]
		if s := row.GetSums(); s.GetInput() != want.input || s.GetOutput() != want.output || s.GetCachedInput() != want.cached {
			t.Errorf("%s: the sums have %d, %d, %d tokens, the events %v", row.GetTenant(), s.GetInput(), s.GetCachedInput(), s.GetOutput(), want)
		}
	}
	if total != uint64(len(events)) {
		t.Errorf("the sums have %d requests, the events %d", total, len(events))
	}
}

// use sends one request; true if it was answered to its end. Some clients leave.
func (e *env) use(addr string, i int, random *rand.Rand) bool {
	tenant := usageTenants[random.IntN(len(usageTenants))]
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	leaves := random.IntN(10) == 0
	r := req{text: words(i%40, 20+random.IntN(200)), max: 1 + random.IntN(60), stream: leaves || random.IntN(3) > 0, extra: `,"ignore_eos":true`}
	if leaves {
		r.max = 400
	}
	hr, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr+"/"+tenant+"/v1/chat/completions", strings.NewReader(r.body()))
	if err != nil {
		return false
	}
	hr.Header.Set("Content-Type", "application/json")
	hr.Header.Set("X-Request-Id", fmt.Sprintf("%s-%d", tenant, i))
	resp, err := e.client.Do(hr)
	if err != nil {
		return false // that ingress is dead
	}
	defer resp.Body.Close()
	if leaves {
		_, _ = io.CopyN(io.Discard, resp.Body, 2000)
		return false
	}
	raw, err := io.ReadAll(resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK && (!r.stream || strings.Contains(string(raw), "[DONE]"))
}

// usageResources are tenants, each with a path of its own.
func usageResources() string {
	var b strings.Builder
	for _, name := range usageTenants {
		fmt.Fprintf(&b, `---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: %[1]s, namespace: test }
spec: { costCenter: cc-%[1]s }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: GatewayBackend
metadata: { name: %[1]s, namespace: test }
spec: { pathPrefix: /%[1]s, poolRef: { name: default }, authentication: { anonymous: { tenant: %[1]s } } }
`, name)
	}
	return b.String()
}

func export(ctx context.Context, ledger accountingv1connect.AccountingServiceClient) (events []*usagev1.Usage, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	stream, err := ledger.ExportUsage(ctx, &accountingv1.ExportUsageRequest{Filter: &accountingv1.Filter{From: timestamppb.New(time.Now().Add(-24 * time.Hour))}})
	if err != nil {
		return nil, err
	}
	for stream.Receive() {
		events = append(events, stream.Msg().GetUsage()...)
	}
	return events, errors.Join(stream.Err(), stream.Close())
}

// tokenSums are tokens of a tenant.
type tokenSums struct{ requests, input, cached, output uint64 }

// comparison is what the ledger and the fleet say.
type comparison struct {
	ledger                      map[string]tokenSums // by tenant, all events
	exact                       map[string]tokenSums // by tenant, those that ended by themselves, in the ledger and in truth
	canceled, failed, recovered int
	cutLedger, cutTruth         uint64 // output tokens of those that were cut off
}

func (c comparison) String() string {
	return fmt.Sprintf("equal to the token: %v; %d canceled, %d failed, %d recovered, which generated %d tokens of which %d are in the ledger",
		c.exact, c.canceled, c.failed, c.recovered, c.cutTruth, c.cutLedger)
}

// compare compares the events with the truth, request by request.
func compare(t *testing.T, known *truth, events []*usagev1.Usage) comparison {
	t.Helper()
	known.mu.Lock()
	defer known.mu.Unlock()
	out := comparison{ledger: map[string]tokenSums{}, exact: map[string]tokenSums{}}
	seen := map[string]int{}
	for _, u := range events {
		id := u.GetRequestId()
		tenant := ""
		if len(u.GetTenants()) > 0 {
			tenant = u.GetTenants()[0]
		}
		if want, _, _ := strings.Cut(id, "-"); !strings.HasPrefix(id, "req-") && tenant != "test/"+want {
			t.Errorf("%s is counted for %q", id, tenant)
		}
		seen[id]++
		tokens := u.GetTokens()
		sums := out.ledger[tenant]
		sums.requests, sums.input, sums.cached, sums.output = sums.requests+1, sums.input+uint64(tokens.GetInput()), sums.cached+uint64(tokens.GetCachedInput()), sums.output+uint64(tokens.GetOutput())
		out.ledger[tenant] = sums
		used := known.used[id]
		if u.GetRecovered() {
			out.recovered++
		}
		if len(used) == 0 {
			// Written down, and dead before the engine had it.
			if !u.GetRecovered() && u.GetOutcome() == usagev1.Outcome_OUTCOME_OK {
				t.Errorf("%s: no engine had it: %v", id, u)
			}
			continue
		}
		if len(used) > 1 {
			t.Errorf("%s: %d engines had it", id, len(used))
		}
		w := used[0]
		if u.GetOutcome() == usagev1.Outcome_OUTCOME_OK {
			if int(tokens.GetInput()) != w.Prompt || int(tokens.GetCachedInput()) != w.Cached || int(tokens.GetOutput()) != w.Output ||
				tokens.GetInputEstimated() || tokens.GetCachedInputEstimated() || tokens.GetOutputEstimated() {
				t.Errorf("%s: the ledger has %v, the engine %+v", id, tokens, w)
			}
			sums := out.exact[tenant]
			out.exact[tenant] = tokenSums{sums.requests + 1, sums.input + uint64(w.Prompt), sums.cached + uint64(w.Cached), sums.output + uint64(w.Output)}
			continue
		}
		switch u.GetOutcome() {
		case usagev1.Outcome_OUTCOME_CANCELED:
			out.canceled++
		default:
			out.failed++
		}
		if int(tokens.GetInput()) != w.Prompt || int(tokens.GetOutput()) > w.Output {
			t.Errorf("%s was cut off: the ledger has %v, the engine %+v", id, tokens, w)
		}
		out.cutLedger, out.cutTruth = out.cutLedger+uint64(tokens.GetOutput()), out.cutTruth+uint64(w.Output)
	}
	lost, doubled := 0, 0
	for id := range known.used {
		switch seen[id] {
		case 0:
			lost++
		case 1:
		default:
			doubled++
		}
	}
	if lost > 0 || doubled > 0 {
		t.Errorf("%d requests are lost, %d are doubled", lost, doubled)
	}
	return out
}
