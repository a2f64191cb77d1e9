package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/testenv"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

// machine runs the engine of each Pod of the namespace test, as kubelet would:
// it starts one where a Pod is to run, lets it finish its requests when the Pod
// is being deleted, and says so by the annotation that kwok goes by.
type machine struct {
	*kubeCluster
	config fleetsim.Config

	mu      sync.Mutex
	engines map[string]*running // by uid of the Pod
	orphans map[string]bool     // Pods that went without waiting for their engines, by uid
	failing int                 // starts that failed in a row
	fault   error
}

type running struct {
	worker *fleetsim.Worker
	name   string
	ending bool
}

// pod is what the machine reads of one.
type pod struct {
	Metadata struct {
		Name, UID         string
		DeletionTimestamp string
	}
	Status struct {
		Phase, PodIP string
		Conditions   []struct{ Type, Status string }
	}
}

func (p *pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" && c.Status == "True" {
			return p.Metadata.DeletionTimestamp == ""
		}
	}
	return false
}

const podsPath = "/api/v1/namespaces/test/pods"

func (c *kubeCluster) pods() ([]pod, error) {
	code, body, err := c.api.Call(http.MethodGet, podsPath, "", nil)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("list Pods: %d %s", code, body)
	}
	var list struct{ Items []pod }
	if err == nil {
		err = json.Unmarshal(body, &list)
	}
	return list.Items, err
}

// say sets the annotation of a Pod's engine. A Pod that is gone is no fault.
func (c *kubeCluster) say(name, engine string) error {
	patch := `{"metadata":{"annotations":{"kinference.test/engine":"` + engine + `"}}}`
	code, body, err := c.api.Call(http.MethodPatch, podsPath+"/"+name, "application/merge-patch+json", []byte(patch))
	if err == nil && code != http.StatusOK && code != http.StatusNotFound {
		err = fmt.Errorf("annotate %s: %d %s", name, code, body)
	}
	return err
}

// run looks at the Pods until ctx is done, and kills what still runs then.
func (m *machine) run(ctx context.Context) {
	var wg sync.WaitGroup
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			wg.Wait()
			for _, r := range m.engines {
				r.worker.Kill()
			}
			return
		case <-tick.C:
		}
		pods, err := m.pods()
		if err != nil {
			m.failed(err)
			continue
		}
		m.reap(pods)
		for _, p := range pods {
			m.mu.Lock()
			r := m.engines[p.Metadata.UID]
			m.mu.Unlock()
			switch {
			case r == nil && p.Status.Phase == "Running" && p.Metadata.DeletionTimestamp == "":
				m.start(&p)
			case r != nil && p.Metadata.DeletionTimestamp != "" && !r.ending:
				r.ending = true
				wg.Go(func() {
					r.worker.Stop()
					m.failed(m.say(r.name, "ended"))
				})
			}
		}
	}
}

// reap kills the engines of Pods that are gone. Besides those that were deleted
// without grace there are some on busy machines: kwok may delete one twice, by its
// name, and meet the next one of that name.
func (m *machine) reap(pods []pod) {
	there := map[string]bool{}
	for _, p := range pods {
		there[p.Metadata.UID] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid, r := range m.engines {
		if !there[uid] && !r.ending {
			r.ending, m.orphans[uid] = true, true
			r.worker.Kill()
		}
	}
}

func (m *machine) start(p *pod) {
	config := m.config
	config.Name, config.Listen = p.Metadata.Name, p.Status.PodIP+":"+m.config.Listen
	w, err := fleetsim.Start(context.Background(), config)
	if err != nil {
		if m.failing++; m.failing > 100 { // the one before may still be closing its ports
			m.failed(err)
		}
		return
	}
	m.failing = 0
	m.mu.Lock()
	m.engines[p.Metadata.UID] = &running{worker: w, name: p.Metadata.Name}
	m.mu.Unlock()
	m.failed(m.say(p.Metadata.Name, "up"))
}

func (m *machine) failed(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fault == nil {
		m.fault = err
	}
}

// crash ends the engine of a Pod in the middle of whatever it does.
func (m *machine) crash(uid string) {
	m.mu.Lock()
	r := m.engines[uid]
	m.mu.Unlock()
	m.eventually("it is busy", func() bool { return r.worker.InFlight() > 0 })
	r.worker.Kill()
}

// remove asks the API to delete a Pod and returns when it has agreed.
func (c *kubeCluster) remove(name string, grace int) time.Time {
	c.t.Helper()
	code, body, err := c.api.Call(http.MethodDelete, podsPath+"/"+name+"?gracePeriodSeconds="+strconv.Itoa(grace), "", nil)
	if err != nil || code/100 != 2 {
		c.t.Fatalf("delete %s: %d %s %v", name, code, body, err)
	}
	return time.Now()
}

// uids returns the uids of the Pods that are ready, by name.
func (c *kubeCluster) uids() map[string]string {
	c.t.Helper()
	pods, err := c.pods()
	if err != nil {
		c.t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range pods {
		if p.ready() {
			out[p.Metadata.Name] = p.Metadata.UID
		}
	}
	return out
}

// clients stream all the time until stop, which returns what they got.
func (c *kubeCluster) clients(n int) (stop func() []answer) {
	ctx, cancel := context.WithCancel(context.Background())
	var mu sync.Mutex
	var all []answer
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for j := 0; ctx.Err() == nil; j++ {
				a := c.post(context.Background(), "/v1/chat/completions", req{text: words(100*i+j%5, 60), max: 60, stream: true, extra: `,"ignore_eos":true`}.body())
				mu.Lock()
				all = append(all, a)
				mu.Unlock()
			}
		})
	}
	return func() []answer { cancel(); wg.Wait(); return all }
}

// whole tells whether a stream came to its end without an error.
func (a answer) whole() bool {
	return a.err == nil && a.status == http.StatusOK && len(a.events) > 1 && a.events[len(a.events)-1] == "[DONE]" && !strings.Contains(a.body, `"error"`)
}

// propagation is how long a router may take to hear of a change, on a machine with time
// for it, and mostPropagation on any.
const propagation, mostPropagation = 500 * time.Millisecond, 5 * time.Second

// Pods come and go under load: nothing goes to one that ends, nobody fails but
// those whose engine was killed under them, and catalog and status follow.
func TestPodsComeAndGo(t *testing.T) {
	const scale, size, rounds = 10, 4, 8
	c := startKube(t, scale)
	c.api.Nodes(t)
	ports := map[string]int{}
	for _, of := range []string{"http", "events", "replay"} {
		ports[of] = testenv.FreePort(t)
	}
	m := &machine{kubeCluster: c, engines: map[string]*running{}, orphans: map[string]bool{}, config: fleetsim.Config{
		Profile: engine.L40SPlain16, TimeScale: scale, Seed: 1, Model: modelName, Listen: strconv.Itoa(ports["http"]),
		EventsPort: ports["events"], ReplayPort: ports["replay"], ShutdownTimeout: 20 * time.Second,
	}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.run(ctx) }()
	defer func() {
		cancel()
		<-done
		if m.fault != nil {
			t.Error(m.fault)
		}
	}()
	dir, err := model.Dir()
	if err != nil {
		t.Fatal(err)
	}
	c.kubectl(fmt.Sprintf(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: vllm, namespace: test }
spec:
  selector: { matchLabels: { app: vllm } }
  models: [ { name: %q } ]
  tokenizer: { path: %q }
  port: %d
  kvEvents: { port: %d, replayPort: %d }
---
`, modelName, dir, ports["http"], ports["events"], ports["replay"])+testenv.StatefulSet("test", "vllm", "127.0.7", size), "apply", "-f", "-")
	counts := func(total, ready int) {
		t.Helper()
		want := fmt.Sprintf("%d/%d", ready, total)
		c.eventually("status says "+want+" workers", func() bool {
			return c.status("kws/vllm", "{.status.workers.ready}/{.status.workers.total}") == want
		})
	}
	counts(size, size)
	c.waitReady(size)
	if got := c.status("kws/vllm", programmed); got != "True" {
		t.Errorf("programmed: %q", got)
	}

	gone := map[string]time.Time{}       // by uid: when the API agreed to delete it
	killed := map[string]bool{}          // by uid
	unready := map[string][2]time.Time{} // by uid: when it was known not to be ready
	stop := c.clients(12)
	for round := range rounds {
		before := c.uids()
		// One of them is not ready for a while.
		out := fmt.Sprintf("vllm-%d", (round+1)%size)
		if err := c.say(out, "down"); err != nil {
			t.Fatal(err)
		}
		counts(size, size-1)
		from := time.Now()
		// Two end and are made anew under their names.
		names := []string{fmt.Sprintf("vllm-%d", round%size), fmt.Sprintf("vllm-%d", (round+2)%size)}
		for _, name := range names {
			gone[before[name]] = c.remove(name, 60)
		}
		c.eventually("they are back", func() bool {
			now := c.uids()
			return len(now) == size-1 && now[names[0]] != before[names[0]] && now[names[1]] != before[names[1]]
		})
		counts(size, size-1)
		unready[before[out]] = [2]time.Time{from, time.Now()}
		if err := c.say(out, "up"); err != nil {
			t.Fatal(err)
		}
		counts(size, size)
	}
	// One crashes, and its Pod goes with the machine.
	before := c.uids()
	killed[before["vllm-1"]] = true
	m.crash(before["vllm-1"])
	gone[before["vllm-1"]] = c.remove("vllm-1", 0)
	c.eventually("it is back", func() bool { now := c.uids(); return len(now) == size && now["vllm-1"] != before["vllm-1"] })
	counts(size, size)
	answers := stop()

	// None at all, and back.
	c.kubectl("", "-n", "test", "scale", "statefulset/vllm", "--replicas=0")
	counts(0, 0)
	if a := c.chat(req{text: "x"}); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("without any worker: %d %s", a.status, a.body)
	}
	c.kubectl("", "-n", "test", "scale", "statefulset/vllm", fmt.Sprintf("--replicas=%d", size))
	counts(size, size)
	c.eventually("it serves again", func() bool { return c.chat(req{text: "x"}).status == http.StatusOK })

	m.mu.Lock()
	orphans := maps.Clone(m.orphans)
	m.mu.Unlock()
	late, failures := time.Duration(0), 0
	for _, a := range answers {
		if a.id == "" {
			t.Errorf("no answer: %v", a.err)
			continue
		}
		d := c.explain(a)
		at, chosen := time.Unix(0, d.GetDecidedUnixNanos()), podOf(d.GetChosen())
		if since, ok := gone[chosen]; ok && at.After(since) {
			late = max(late, at.Sub(since))
		}
		if span, ok := unready[chosen]; ok && at.After(span[0].Add(propagation)) && at.Before(span[1]) {
			t.Errorf("sent to %s while it was not ready", d.GetChosen())
		}
		if !a.whole() {
			if failures++; !killed[podOf(servedBy(d))] && !orphans[podOf(servedBy(d))] {
				t.Errorf("%s failed at %q, decided %v: %d %v %.300s%s", a.id, servedBy(d), at, a.status, a.err, a.body[max(0, len(a.body)-300):], dropped(d))
			}
		}
	}
	if late > mostPropagation {
		t.Errorf("a request was sent to a Pod %v after it was deleted", late)
	} else if late > propagation {
		t.Logf("SLOW: %v instead of %v from the deletion of a Pod to the last request that is sent there", late, propagation)
	}
	if len(answers) < 50 || len(gone) != 2*rounds+1 {
		t.Errorf("%d requests, %d Pods deleted", len(answers), len(gone))
	}
	t.Logf("%d streams while %d Pods came and went, %d of them without grace; %d failed, with their engine; the last choice of one that ends was %v after its deletion",
		len(answers), len(gone), len(orphans), failures, late.Round(time.Millisecond))
}

// podOf is the uid of the Pod in the id of a worker.
func podOf(id string) string {
	uid, _, _ := strings.Cut(id[strings.LastIndexByte(id, '.')+1:], "/")
	return uid
}

// dropped says why each worker that a decision did not take was out.
func dropped(d *adminv1.Decision) (out string) {
	for _, c := range d.GetCandidates() {
		out += fmt.Sprintf("\n\t%s %s%s", c.GetWorker(), c.GetDropped(), c.GetUnfit())
	}
	return out
}

func servedBy(d *adminv1.Decision) string {
	if d.GetServedBy() != "" {
		return d.GetServedBy()
	}
	return d.GetChosen()
}
