package chaos

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// fault is one thing that goes wrong with one process.
type fault struct {
	target string
	how    string
	hold   time.Duration // how long the process is away
}

const (
	killed      = "killed"
	paused      = "paused"
	restarted   = "restarted"
	partitioned = "cut off"
)

var targets = []string{"ingress", "router", "kvtracker", "relay", "limiter", "classifier", "accounting", "NATS leader", "NATS follower", "Redis primary"}

// faults are all of them, or those of the short form.
func faults(full bool) (out []fault) {
	if !full {
		return []fault{
			{"router", killed, time.Second}, {"ingress", restarted, 0}, {"limiter", paused, 2 * time.Second},
			{"classifier", partitioned, 2 * time.Second}, {"NATS leader", killed, 2 * time.Second}, {"Redis primary", killed, 3 * time.Second},
		}
	}
	for _, target := range targets {
		out = append(out, fault{target, killed, 2 * time.Second}, fault{target, paused, 5 * time.Second}, fault{target, restarted, 0}, fault{target, partitioned, 5 * time.Second})
	}
	return append(out, fault{"worker", killed, 2 * time.Second})
}

// process finds the one to hit: of several that which does the work.
func (c *cluster) process(target string) *process {
	c.t.Helper()
	switch target {
	case "NATS leader":
		p, _ := c.leader("USAGE")
		return p
	case "NATS follower":
		_, p := c.leader("USAGE")
		return p
	case "Redis primary":
		return c.primary()
	case "relay":
		return c.relay[0]
	case "accounting":
		return c.accounting[0]
	case "ingress":
		return c.ingress[0]
	}
	list := map[string][]*process{"router": c.router, "kvtracker": c.kvtracker, "limiter": c.limiter, "classifier": c.classifier}[target]
	var before [2]float64
	for i, p := range list {
		before[i] = c.calls(p)
	}
	pause(500 * time.Millisecond)
	best, most := list[0], -1.0
	for i, p := range list {
		if n := c.calls(p) - before[i]; n > most {
			best, most = p, n
		}
	}
	return best
}

// calls is how many RPCs a process has answered.
func (c *cluster) calls(p *process) (sum float64) {
	resp, err := c.probe.Get("http://" + p.addr + ":9990/metrics")
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0
	}
	for line := range strings.Lines(string(raw)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(name, "rpc_server_") && strings.Contains(name, "duration") && strings.Contains(name, "_count{") {
			v, _ := strconv.ParseFloat(value[strings.LastIndex(value, " ")+1:], 64)
			sum += v
		}
	}
	return sum
}

// drain is how long an ingress that is to end is out of the balancer before it gets
// its signal: the charts' preStopSeconds, which are more.
const drain = time.Second

// inflict does what a fault says and returns when the process is there again.
func (c *cluster) inflict(f fault) {
	if f.target == "worker" {
		c.fleet[0].Kill()
		pause(f.hold)
		if err := c.fleet[0].Restart(); err != nil {
			c.t.Errorf("start the worker again: %v", err)
		}
		return
	}
	p := c.process(f.target)
	switch f.how {
	case killed:
		p.end(syscall.SIGKILL)
		pause(f.hold)
		p.start()
	case paused:
		p.signal(syscall.SIGSTOP)
		pause(f.hold)
		p.signal(syscall.SIGCONT)
	case restarted:
		c.restart(p)
	case partitioned:
		p.cut()
		pause(f.hold)
		p.heal()
	default:
		c.t.Fatal("no such fault: " + f.how)
	}
	if !eventually(time.Minute, p.well) {
		c.t.Errorf("%s %s: not well a minute later", p.name, f.how)
	}
}

// restart ends a process as Kubernetes does and starts it again.
func (c *cluster) restart(p *process) {
	if strings.HasPrefix(p.name, "ingress") {
		c.balancer.remove(p, true)
		pause(drain)
	}
	p.end(syscall.SIGTERM)
	p.start()
	if !eventually(time.Minute, p.well) {
		c.t.Errorf("%s is not ready a minute after its restart", p.name)
	}
	if strings.HasPrefix(p.name, "ingress") {
		c.balancer.remove(p, false)
	}
}

func (f fault) String() string {
	if f.hold > 0 {
		return fmt.Sprintf("%s %s for %v", f.target, f.how, f.hold)
	}
	return f.target + " " + f.how
}
