package acceptance

import (
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/testenv"
)

// Of two replicas of kvtracker one is killed, comes back, and then the other one is: no decision
// is made without the index meanwhile.
func TestTrackerReplicas(t *testing.T) {
	bin := build(t, "services/ingress/cmd/ingress", "services/router/cmd/router", "services/kvtracker/cmd/kvtracker")
	nats := testenv.NATS(t)
	w, err := fleetsim.Start(t.Context(), fleetsim.Config{Name: "w0", TimeScale: 50, Model: modelName})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Kill)
	e := &env{t: t, dir: t.TempDir(), workers: []*fleetsim.Worker{w}, client: &http.Client{}}
	t.Cleanup(e.client.CloseIdleConnections)
	e.write("fleet.yaml", e.workerSet(""))

	next := func() string { return testenv.FreeAddr(t) }
	ingress, router, metrics, trackers := next(), next(), next(), []string{next(), next()}
	run(t, filepath.Join(bin, "ingress"), "--listen", ingress, "--router-url", "http://"+router, "--admin-listen", next(), "--drain-timeout", "2s")
	run(t, filepath.Join(bin, "kvtracker"), "--mode", "relay", "--nats-url", nats, "--router-url", "http://"+router, "--admin-listen", next(), "--drain-timeout", "2s")
	start := func(i int) (kill func()) {
		log := &syncBuffer{}
		cmd := exec.Command(filepath.Join(bin, "kvtracker"), "--nats-url", nats, "--listen", trackers[i], "--shard", fmt.Sprint(i), "--admin-listen", "127.0.0.1:0")
		cmd.Stderr = log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		killed := false
		kill = func() {
			if !killed {
				killed = true
				_ = cmd.Process.Kill()
				_ = cmd.Wait() // by the signal
			}
		}
		t.Cleanup(func() {
			if kill(); t.Failed() {
				t.Logf("kvtracker %d:\n%s", i, log.tail(4<<10))
			}
		})
		return kill
	}
	first, second := start(0), start(1)
	run(t, filepath.Join(bin, "router"), "--admin-api-listen", "", "--config", e.dir, "--listen", router, "--admin-listen", metrics, "--drain-timeout", "2s",
		"--kvtracker-url", "http://"+trackers[0]+",http://"+trackers[1], "--time-scale", "50", "--match-timeout", "10s")

	page := func() string {
		resp, err := e.client.Get("http://" + metrics + "/metrics")
		if err != nil {
			return ""
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return ""
		}
		return string(text)
	}
	blind := regexp.MustCompile(`(?m)^kinference_router_tracker_unavailable_total\{.*\} [1-9].*$`)
	both := regexp.MustCompile(`(?m)^kinference_router_trackers\{.*state="spare".*\} 1$`)
	n := 0
	ask := func() bool {
		n++
		resp, err := e.client.Post("http://"+ingress+"/v1/chat/completions", "application/json", strings.NewReader(req{text: words(n%5, 800)}.body()))
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return err == nil && resp.StatusCode == http.StatusOK
	}
	e.eventually("both trackers are followed", func() bool { return both.MatchString(page()) })
	e.eventually("the first answer", ask)
	seen := strings.Join(blind.FindAllString(page(), -1), "\n") // before the first catalog, perhaps
	for i, step := range []struct {
		name string
		kill func()
	}{{"the first tracker is killed", first}, {"the second one is killed", second}} {
		step.kill()
		for range 20 {
			if !ask() {
				t.Errorf("%s: a request fails", step.name)
			}
		}
		if got := strings.Join(blind.FindAllString(page(), -1), "\n"); got != seen {
			t.Errorf("%s: decisions were made without the index: %s", step.name, got)
		}
		if i == 0 {
			start(0)
			e.eventually("it is back", func() bool { return both.MatchString(page()) })
		}
	}
}
