package ingress_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/testenv"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// metered are the functions that are there for usage only.
const metered = `ingress/internal/(usage|meter)\.|internal/bus\.|nats-io/|\(\*attempt\)\.count|\(\*stream\)\.(progress|usage|settle)|\(\*exchange\)\.(startUsage|finishUsage|measure|askForUsage|describe)|\(\*metrics\)\.used`

// BenchmarkMeteringCost is the share of ingress' CPU that metering takes with
// 1,000 streams at once: what a profile of the process finds in the functions that
// are there for usage, and the time to read and cut out the usage that we let
// engines put on each chunk, which is measured apart.
//
// A round has about 200 samples of the process, of which few are metering's: ten rounds
// make the figure one of 2,000. -artifacts keeps the profiles.
//
//	go test -run '^$' -bench MeteringCost -benchtime 10x -artifacts ./services/ingress
func BenchmarkMeteringCost(b *testing.B) {
	const streams, gap, chunks = 1000, 50 * time.Millisecond, 160
	bin := filepath.Join(b.TempDir(), "ingress")
	build := exec.Command("go", "build", "-o", bin, "./cmd/ingress")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("build: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	routerURL := "http://" + l.Addr().String()
	e := start(b, func(c *ingress.Config, _ *routerv1.Catalog) { c.RouterURL = routerURL })
	e.serveRouter(l)
	e.ready()
	content := with(textChunk("and some words"), running(1200, 40))
	e.router.routes(newWorker(b, "w", func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(gap)
		defer tick.Stop()
		for range chunks {
			_, _ = io.WriteString(w, content)
			_ = http.NewResponseController(w).Flush()
			<-tick.C
		}
		_, _ = io.WriteString(w, usageChunk+doneEvent)
	}))

	public, admin := testenv.FreeAddr(b), testenv.FreeAddr(b)
	cmd := exec.Command(bin, "--listen", public, "--admin-listen", admin, "--router-url", routerURL, "--nats-url", testenv.NATS(b), "--usage-dir", b.TempDir(), "--pprof", "--log-level", "error")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Process.Signal(syscall.SIGTERM); _ = cmd.Wait() })
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: streams}}
	b.Cleanup(client.CloseIdleConnections)
	once := func() error {
		resp, err := client.Post("http://"+public+chatPath, "application/json", strings.NewReader(chatRequest(true, "")))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		n, err := io.Copy(io.Discard, resp.Body)
		if err == nil && (resp.StatusCode != http.StatusOK || n < chunks*100) {
			err = fmt.Errorf("%s and %d bytes", resp.Status, n)
		}
		return err
	}
	for begun := time.Now(); once() != nil; { // it starts
		if time.Since(begun) > patience {
			b.Fatal("ingress does not serve")
		}
	}
	var extra, all float64
	var profiles []string
	costs := chunkCosts(content, textChunk("and some words"))
	each := costs[0] - costs[1]
	for b.Loop() {
		var tasks sync.WaitGroup
		for range streams {
			tasks.Go(func() {
				if err := once(); err != nil {
					b.Error(err)
				}
			})
		}
		before := processTime(b, cmd.Process.Pid)
		seconds := int(chunks*gap/time.Second) + 1
		resp, err := client.Get(fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", admin, seconds))
		if err != nil {
			b.Fatal(err)
		}
		profile := filepath.Join(b.ArtifactDir(), fmt.Sprintf("cpu%d", len(profiles)))
		raw, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			b.Fatalf("profile: %s, %v", resp.Status, err)
		}
		if err := os.WriteFile(profile, raw, 0o600); err != nil {
			b.Fatal(err)
		}
		total := processTime(b, cmd.Process.Pid) - before
		tasks.Wait()
		profiles = append(profiles, profile)
		extra += 100 * float64(streams*chunks) * each.Seconds()
		all += total.Seconds()
	}
	found := focused(b, bin, profiles)
	b.ReportMetric(found, "%profile")
	b.ReportMetric(extra/all, "%chunks")
	b.ReportMetric(found+extra/all, "%metering")
	b.ReportMetric(all/float64(b.N), "cpu-s/round")
	b.ReportMetric(float64(each.Nanoseconds()), "ns/chunk")
}

// processTime is the CPU time of a process so far.
func processTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Skipf("NOT MEASURED: no /proc: %v", err)
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	ticks := 0
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond // USER_HZ is 100 on every Linux
}

// focused is the share of all samples of some profiles in the functions of metered.
func focused(b *testing.B, bin string, profiles []string) float64 {
	b.Helper()
	args := append([]string{"tool", "pprof", "-top", "-cum", "-nodecount", "100000", "-nodefraction", "0", "-focus", metered, bin}, profiles...)
	out, err := exec.Command("go", args...).CombinedOutput()
	if err != nil {
		b.Fatalf("pprof: %v\n%s", err, out)
	}
	b.Logf("%s", out[:min(len(out), 6000)])
	m := regexp.MustCompile(`Showing nodes accounting for [^,]+, ([0-9.]+)% of`).FindSubmatch(out)
	if m == nil {
		return 0 // nothing of it was seen
	}
	share, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		b.Fatal(err)
	}
	return share
}

// chunkCosts are the times to look into two chunks, each at its best, since others
// use the machine as well.
func chunkCosts(a, b string) (costs [2]time.Duration) {
	const n = 1000
	c := openai.Chunk{LazyUsage: true}
	costs = [2]time.Duration{time.Hour, time.Hour}
	for range 200 {
		for i, event := range [2]string{a, b} {
			text := []byte(strings.TrimSuffix(strings.TrimPrefix(event, "data: "), "\n\n"))
			began := time.Now()
			for range n {
				_ = c.Parse(text)
			}
			costs[i] = min(costs[i], time.Since(began)/n)
		}
	}
	return costs
}
