package vllm_test

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// smallBuffer is how many batches the second engine of TestHistory can replay.
const smallBuffer = 20

// TestHistory puts everything that may fail between an engine and the index to
// failure, under load that makes the engines evict all the time, and compares
// the whole index with what a recorder beside us knows.
//
// Three engines: one that replays all that it published, one that replays the
// last smallBuffer batches, one without replay as old engines are.
func TestHistory(t *testing.T) {
	env := rig.Require(t)
	c := newChain(t, env,
		lean(rig.Options{Name: "full", Blocks: 300}),
		lean(rig.Options{Name: "short", Blocks: 300, BufferSteps: smallBuffer, LoRAs: map[string]string{"a": "qwen-lora-a", "b": "qwen-lora-b"}}),
		lean(rig.Options{Name: "none", Blocks: 300, NoReplay: true}))
	c.run(
		step{"load", c.stepLoad},
		step{"engines restart while the relay is down", c.stepEngineRestartUnseen},
		step{"relay restart", c.stepRelayRestart},
		step{"gap beyond the buffer", c.stepGap},
		step{"reset of idle engines", c.stepReset},
		step{"engine restart", c.stepEngineRestart},
		step{"relay down for a minute", c.stepRelayDown},
		step{"tracker restart", func() { c.stepServiceRestart("kvtracker") }},
		step{"NATS restart", func() { c.stepServiceRestart("nats") }},
		step{"lag", c.stepLag},
	)
}

// TestHistoryHybrid does some of it with models that have several groups of KV
// cache: only those of full attention are indexed, with their own block size.
func TestHistoryHybrid(t *testing.T) {
	env := rig.Require(t)
	c := newChain(t, env,
		lean(rig.Options{Name: "window", Model: "hybrid", Blocks: 600}),
		lean(rig.Options{Name: "mamba", Model: "hybrid-mamba", Blocks: 200}))
	c.run(
		step{"load", func() { c.stepAround("load", func() {}) }},
		step{"relay restart", func() { c.stepServiceRestart("relay") }},
		step{"engine restart", func() {
			c.stepAround("a restart", func() {
				c.engines[0].Restart()
			})
		}},
	)
}

// lean spares an engine one of its three processes: starting is what costs most.
func lean(o rig.Options) rig.Options {
	o.Args = append(o.Args, "--distributed-executor-backend", "uni")
	o.Env = append(o.Env, "VLLM_ENABLE_V1_MULTIPROCESSING=0")
	return o
}

type step struct {
	name string
	do   func()
}

func (c *chain) run(steps ...step) {
	c.t.Helper()
	for _, s := range steps {
		began := time.Now()
		c.t.Logf("--- %s", s.name)
		s.do()
		c.t.Logf("--- %s took %.1f s", s.name, time.Since(began).Seconds())
	}
}

// stepAround does something under load, and compares afterwards.
func (c *chain) stepAround(when string, do func()) {
	c.t.Helper()
	l := c.load(2, c.engines...)
	c.grow(25, c.engines...)
	do()
	c.grow(25, c.engines...)
	c.quiet(l)
	for _, e := range c.engines {
		c.check("after "+when, e)
		c.probe("after "+when, e, l.recent(e, 6))
		if p := c.stream(e); p.first != 0 && !e.NoReplay && e.BufferSteps == 0 {
			c.t.Errorf("%s is known from batch %d only", e.Name, p.first)
		}
	}
}

// full, short and none are the engines of TestHistory.
func (c *chain) full() *rig.Engine  { return c.engines[0] }
func (c *chain) short() *rig.Engine { return c.engines[1] }
func (c *chain) none() *rig.Engine  { return c.engines[2] }

// quiet ends a load and waits until the recorder has all of it.
func (c *chain) quiet(l *load) {
	c.t.Helper()
	if n := l.stop(); n == 0 {
		c.t.Fatal("no request of the load was answered")
	}
	for _, e := range c.engines {
		c.flush(e)
	}
}

// grow waits until each engine has published n more batches.
func (c *chain) grow(n int, engines ...*rig.Engine) {
	c.t.Helper()
	for _, e := range engines {
		from := c.rec.total(e.Name)
		within(c.t, e.Name+" publishes", func() bool { return c.rec.total(e.Name) >= from+n })
	}
}

func (c *chain) stepLoad() {
	loads := map[*rig.Engine]*load{}
	for _, e := range c.engines {
		loads[e] = c.load(3, e)
	}
	// Each for as long as it needs: the one with adapters is slow.
	for _, e := range []*rig.Engine{c.full(), c.none(), c.short()} {
		c.grow(150, e)
		loads[e].stop()
		c.flush(e)
		c.check("after load", e)
	}
	for _, e := range c.engines {
		c.probe("after load", e, loads[e].recent(e, 12))
	}
	if p := c.stream(c.full()); p.first != 0 || p.reason != "start" {
		c.t.Errorf("the relay reads %s from batch %d, reason %q", c.full().Name, p.first, p.reason)
	}
}

// stepLag measures how long it takes from an engine's event to the index.
func (c *chain) stepLag() {
	c.t.Helper()
	measure := func(when string) {
		e, lags := c.full(), []time.Duration{}
		for range 100 {
			p := c.fresh(e.BlockSize + 1)
			sent := make(chan error, 1)
			go func() {
				_, err := ask(e, p, 1)
				sent <- err
			}()
			var seen time.Time
			within(c.t, "the block is in the index", func() bool {
				seen = time.Now()
				return c.predict(e, p) > 0
			})
			if err := <-sent; err != nil {
				c.t.Fatal(err)
			}
			var at float64
			within(c.t, "the recorder has it", func() bool {
				at = c.rec.storedAt(e.Name, p.tokens[:e.BlockSize])
				return at > 0
			})
			lags = append(lags, seen.Sub(time.UnixMicro(int64(at*1e6))))
		}
		c.t.Logf("from the engine's event to a hit, %s: %s (polled every 2 ms)", when, quantiles(lags))
	}
	measure("idle")
	c.mu.Lock()
	c.lags = nil
	c.mu.Unlock()
	l := c.load(2, c.engines...)
	measure("under load")
	c.quiet(l)
	c.mu.Lock()
	c.t.Logf("lag as the tracker reports it: %s", quantiles(c.lags))
	c.mu.Unlock()
}

// stepEngineRestartUnseen restarts engines that nobody watches, and has them
// publish more than they had published before.
func (c *chain) stepEngineRestartUnseen() {
	old := map[*rig.Engine][]prompt{}
	c.halt("relay")
	halted := time.Now()
	restarted := []*rig.Engine{c.full(), c.none()}
	before := map[*rig.Engine]int{}
	l := c.load(1, c.engines...)
	c.grow(10, c.engines...)
	for _, e := range restarted {
		old[e] = l.recent(e, 30)
		e.Kill()
		before[e] = c.rec.batches(e.Name)
	}
	for _, e := range restarted {
		e.Launch()
	}
	for _, e := range restarted {
		e.WaitReady()
	}
	// Past the numbers of the dead: a relay that went by them alone would go on
	// where it was.
	for _, e := range restarted {
		within(c.t, e.Name+" publishes", func() bool {
			life, dead := c.rec.life(e.Name)
			return dead == 1 && len(life) > before[e]
		})
	}
	l.stop()
	// The router stops believing an index that no relay has fed for half a minute;
	// engines that start faster than that may be mispredicted meanwhile.
	c.mispredicted("no relay sees that engines were restarted", old, time.Since(halted) < 30*time.Second)
	c.resume("relay")
	// From its first report on the router believes the index again.
	for range 3 {
		c.mispredicted("a relay is just starting", old, false)
	}
	l = c.load(2, c.engines...)
	c.grow(60, c.engines...)
	c.quiet(l)
	for _, e := range c.engines {
		c.check("after restarts that nobody saw", e)
		c.probe("after restarts that nobody saw", e, append(l.recent(e, 6), old[e][:min(6, len(old[e]))]...))
	}
	if p := c.stream(c.full()); p.first != 0 || p.reason != "restart" {
		c.t.Errorf("the new process of %s: %+v", c.full().Name, p)
	}
}

// stepRelayRestart restarts the relay alone while engines go on.
func (c *chain) stepRelayRestart() {
	epoch := c.stream(c.full()).epoch
	l := c.load(3, c.engines...)
	c.grow(20, c.engines...)
	c.halt("relay")
	c.grow(2*smallBuffer, c.engines...)
	c.resume("relay")
	c.grow(50, c.engines...)
	c.quiet(l)
	for _, e := range c.engines {
		c.check("after a restart of the relay", e)
		c.probe("after a restart of the relay", e, l.recent(e, 6))
	}
	if p := c.stream(c.full()); p.epoch != epoch || p.first != 0 {
		c.t.Errorf("replay did not fill the gap of %s: %+v", c.full().Name, p)
	}
}

// stepGap loses more batches than an engine can replay. Nothing comes behind
// them, so it is exact what the relay can know.
func (c *chain) stepGap() {
	l := c.load(2, c.engines...)
	c.halt("relay")
	c.grow(3*smallBuffer, c.engines...)
	c.quiet(l)
	c.resume("relay")
	// All that it has missed.
	c.check("after a gap", c.full())
	if p := c.stream(c.full()); p.first != 0 {
		c.t.Errorf("replay did not fill the gap of %s: %+v", c.full().Name, p)
	}
	// The last batches, and nothing that they do not tell of.
	oldest := uint64(c.rec.batches(c.short().Name) - smallBuffer)
	within(c.t, "the relay replays "+c.short().Name, func() bool { return c.stream(c.short()).first == oldest })
	c.check("after a gap beyond the buffer", c.short())
	// Nothing, until there is something to read.
	next := uint64(c.rec.batches(c.none().Name))
	within(c.t, "the relay clears "+c.none().Name, func() bool {
		s := c.state(c.none())
		return s.GetIndex().GetBlocks() == 0 && s.GetIndex().GetLive() && !s.GetIndex().GetComplete()
	})
	c.flush(c.none())
	c.check("after a gap without replay", c.none())
	if p := c.stream(c.none()); p.first != next {
		c.t.Errorf("%s is known from batch %d, want %d", c.none().Name, p.first, next)
	}
	for _, e := range []*rig.Engine{c.short(), c.none()} {
		c.probe("after a gap", e, l.recent(e, 10))
	}
	// As the cache turns over, what was missed goes out of it.
	for _, e := range []*rig.Engine{c.short(), c.none()} {
		for asked := 0; asked <= e.Blocks; asked += 20 {
			if _, err := ask(e, c.fresh(20*e.BlockSize), 1); err != nil {
				c.t.Fatal(err)
			}
		}
		c.flush(e)
		c.check("after the cache turned over", e)
		life, _ := c.rec.life(e.Name)
		truth, err := life.truth(map[kvhash.Hash]bool{})
		if err != nil {
			c.t.Fatal(err)
		}
		if n := truth.without(life.knowable(int(c.stream(e).first))); n > 0 {
			c.t.Errorf("%s: the index still lacks %d blocks of %d", e.Name, n, len(truth.hashes))
		}
	}
}

// stepEngineRestart kills an engine under load. From then on nothing that only
// the dead process held may be a hit, and nothing is predicted that the new one
// does not report.
func (c *chain) stepEngineRestart() {
	e := c.full()
	l := c.load(2, c.engines...)
	c.grow(80, c.engines...)
	old := l.recent(e, 25)
	l.stop()
	others := c.load(1, c.short(), c.none())
	hits := func() (n int) {
		for _, p := range old {
			if c.predict(e, p) > 0 {
				n++
			}
		}
		return n
	}
	if hits() == 0 {
		c.t.Fatal("nothing to lose")
	}
	epoch := c.stream(e).epoch
	e.Kill()
	killed := time.Now()
	within(c.t, "no hits of a dead engine", func() bool { return hits() == 0 })
	gone := time.Since(killed)
	e.Launch()
	looks := 0
	tick := time.NewTicker(50 * time.Millisecond) // it has work to do
	defer tick.Stop()
	within(c.t, e.Name+" is back", func() bool {
		<-tick.C
		if n := hits(); n > 0 {
			c.t.Errorf("%d hits of the dead engine are back", n)
		}
		looks++
		status, _, err := e.Get("/health")
		return err == nil && status == http.StatusOK
	})
	// Quick traffic: no pause between the health check and the first request. The
	// cache is large enough that nothing is evicted.
	asked, reused, blocks := 0, 0, 0
	for _, p := range slices.Concat(old[:8], old[:8]) {
		if blocks += 1 + len(p.tokens)/e.BlockSize; blocks > e.Blocks-50 {
			break
		}
		want := c.predict(e, p)
		got, err := ask(e, p, 1)
		if err != nil {
			c.t.Fatal(err)
		}
		if got < want {
			c.t.Errorf("request %d after the restart: %d tokens were predicted, %d reported", asked, want, got)
		}
		asked++
		if want > 0 {
			reused++
		}
	}
	c.t.Logf("engine killed: no hit of it after %v, none in %d looks until it was ready again; then predicted ≤ reported for %d requests, %d with hits",
		gone.Round(time.Millisecond), looks, asked, reused)
	others.stop()
	l = c.load(2, c.engines...)
	c.grow(80, c.engines...)
	c.quiet(l)
	for _, e := range c.engines {
		c.check("after a restart", e)
		c.probe("after a restart", e, l.recent(e, 6))
	}
	if p := c.stream(e); p.epoch == epoch || p.first != 0 || p.reason != "restart" {
		c.t.Errorf("the new process of %s: %+v", e.Name, p)
	}
}

// stepRelayDown leaves the engines alone for a minute under load.
func (c *chain) stepRelayDown() {
	epoch := c.stream(c.full()).epoch
	l := c.load(3, c.engines...)
	c.grow(10, c.engines...)
	c.halt("relay")
	from := c.rec.batches(c.full().Name)
	minute := time.NewTimer(time.Minute)
	<-minute.C
	missed := c.rec.batches(c.full().Name) - from
	began := time.Now()
	c.resume("relay")
	within(c.t, "the replay is applied", func() bool {
		return c.state(c.full()).GetIndex().GetLastSeq() >= int64(from+missed)-1 && c.state(c.full()).GetIndex().GetLive()
	})
	c.t.Logf("relay down for a minute: %d batches were missed, and in the index %v after its start", missed, time.Since(began).Round(time.Millisecond))
	c.grow(50, c.engines...)
	c.quiet(l)
	for _, e := range c.engines {
		c.check("after a minute without relay", e)
		c.probe("after a minute without relay", e, l.recent(e, 6))
	}
	if p := c.stream(c.full()); p.epoch != epoch || p.first != 0 {
		c.t.Errorf("replay did not fill the gap of %s: %+v", c.full().Name, p)
	}
}

// stepServiceRestart restarts a service under load; it is away for 25 batches.
func (c *chain) stepServiceRestart(name string) {
	c.t.Helper()
	c.stepAround("a restart of "+name, func() {
		c.halt(name)
		c.grow(25, c.engines...)
		c.resume(name)
	})
}

func (c *chain) halt(name string) {
	c.t.Helper()
	if err := c.front.Halt(name); err != nil {
		c.t.Fatal(err)
	}
}

func (c *chain) resume(name string) {
	c.t.Helper()
	if err := c.front.Resume(name); err != nil {
		c.t.Fatal(err)
	}
}
