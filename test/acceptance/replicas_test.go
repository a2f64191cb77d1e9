package acceptance

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

// replica is a router in a process of its own.
type replica struct {
	*exec.Cmd
	log   *syncBuffer
	ended bool
}

func (c *kubeCluster) replica(bin, name string) *replica {
	c.t.Helper()
	r := &replica{log: &syncBuffer{}, Cmd: exec.Command(filepath.Join(bin, "router"), "--kubernetes", "--kubeconfig", c.api.Kubeconfig,
		"--identity", name, "--listen", testenv.FreeAddr(c.t), "--admin-listen", testenv.FreeAddr(c.t), "--admin-api-listen", "")}
	r.Stderr = r.log
	if err := r.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if !r.ended {
			r.end(c.t, syscall.SIGKILL)
		}
		if c.t.Failed() {
			c.t.Logf("replica %s:\n%s", name, r.log.tail(4<<10))
		}
	})
	return r
}

// end sends a signal and waits for the end.
func (r *replica) end(t *testing.T, signal syscall.Signal) {
	t.Helper()
	r.ended = true
	if err := r.Process.Signal(signal); err != nil {
		t.Error(err)
	}
	_ = r.Wait() // by the signal
}

// Routers run as several processes. Programmed is true only when every one of
// them runs the generation; the statuses are written on when the one that writes
// them ends, is killed, or stands still.
func TestRouterReplicas(t *testing.T) {
	bin := build(t, "services/router/cmd/router")
	c := startAPI(t)
	generation := 0
	// apply makes a new generation.
	apply := func() {
		t.Helper()
		generation++
		c.kubectl(fmt.Sprintf(`apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: vllm, namespace: test }
spec: { selector: { matchLabels: { app: vllm } }, models: [ { name: m%d } ] }
`, generation), "apply", "-f", "-")
	}
	is := func(want string) {
		t.Helper()
		want = fmt.Sprintf("%d %s", generation, want)
		got := ""
		c.eventually(want, func() bool {
			got = c.status("kws/vllm", `{range .status.conditions[?(@.type=="Programmed")]}{.observedGeneration} {.status} {.message}{end}`)
			return strings.HasPrefix(got, want)
		})
	}
	leads := func(name string) {
		t.Helper()
		c.eventually(name+" leads", func() bool {
			out, err := c.api.Kubectl(t, "", "-n", "kinference", "get", "lease", "kinference-router", "-o", "jsonpath={.spec.holderIdentity}")
			return err == nil && out == name
		})
	}
	known := func(name string, there bool) {
		t.Helper()
		c.eventually("lease of "+name, func() bool {
			_, err := c.api.Kubectl(t, "", "-n", "kinference", "get", "lease", "kinference-router-"+name)
			return (err == nil) == there
		})
	}

	a := c.replica(bin, "a")
	leads("a")
	apply()
	is("True")
	b := c.replica(bin, "b")
	known("b", true)
	apply()
	is("True every router replica serves this generation")

	// One stands still: it does not run the new generation, and it is named.
	if err := b.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	apply()
	is("False router replica b does not serve this generation yet")
	if err := b.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	is("True")

	// The leader is told to end.
	start := time.Now()
	a.end(t, syscall.SIGTERM)
	known("a", false)
	leads("b")
	t.Logf("the other one leads %v after the leader was told to end", time.Since(start).Round(time.Millisecond))
	apply()
	is("True")

	// The leader is killed: its Lease has to run out, and nobody claims for it.
	c.replica(bin, "c")
	known("c", true)
	start = time.Now()
	b.end(t, syscall.SIGKILL)
	apply()
	leads("c")
	t.Logf("the other one leads %v after the leader was killed", time.Since(start).Round(time.Millisecond))
	is("False router replica b does not serve this generation yet")
	c.replica(bin, "b") // as kubelet would start it again
	is("True every router replica serves this generation")
}

// A second router that has seen none of the requests finds what they left in the
// caches: every replica has the engines' own events to go by.
func TestReplicasSeeTheSameCaches(t *testing.T) {
	bin := build(t, "services/router/cmd/router", "services/ingress/cmd/ingress")
	e := start(t, settings{workers: 3})
	const prompts = 8
	for i := range prompts {
		if a := e.chat(req{text: words(100*i, 800), max: 1}); a.status != http.StatusOK {
			t.Fatal(a.status, a.body)
		}
	}
	router, ingress := testenv.FreeAddr(t), testenv.FreeAddr(t)
	run(t, filepath.Join(bin, "router"), "--config", e.dir, "--listen", router, "--admin-listen", testenv.FreeAddr(t), "--admin-api-listen", "",
		"--kvtracker-url", e.stack.KVTrackerURL(), "--time-scale", "50", "--drain-timeout", "2s")
	run(t, filepath.Join(bin, "ingress"), "--listen", ingress, "--admin-listen", testenv.FreeAddr(t), "--router-url", "http://"+router, "--drain-timeout", "2s")
	second := func(i int) (out struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}, ok bool) {
		resp, err := e.client.Post("http://"+ingress+"/v1/chat/completions", "application/json", strings.NewReader(req{text: words(100*i, 800), max: 1}.body()))
		if err != nil {
			return out, false
		}
		defer resp.Body.Close()
		return out, resp.StatusCode == http.StatusOK && json.NewDecoder(resp.Body).Decode(&out) == nil
	}
	fresh := 1000
	e.eventually("the second pair follows the engines", func() bool {
		fresh++
		e.chat(req{text: words(100*fresh, 800), max: 1})
		a, ok := second(fresh)
		return ok && a.Usage.Details.Cached > 0
	})
	for i := range prompts {
		if a, ok := second(i); !ok || a.Usage.Details.Cached < a.Usage.Prompt/2 {
			t.Errorf("prompt %d: %v, %d of %d tokens were cached where it went", i, ok, a.Usage.Details.Cached, a.Usage.Prompt)
		}
	}
}
