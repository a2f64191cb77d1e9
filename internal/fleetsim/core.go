package fleetsim

import (
	"context"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

// core runs one rank's engine in scaled wall time. One goroutine runs the
// iterations; each ends at its exact scaled instant, and the next starts then,
// however late the goroutine woke up. Methods are safe for concurrent use.
type core struct {
	clock  clock
	alarm  *alarm
	events *eventServer // nil: events are off
	done   chan struct{}

	mu       sync.Mutex
	cond     sync.Cond // work, or a change of closed or paused
	eng      *engine.Engine
	next     float64 // when the next iteration starts
	idle     bool
	closed   bool
	paused   bool
	stepping bool
	live     map[string]*engine.Request
	gauges   engine.Stats // as of the last iteration, which is what vLLM shows
	hist     histograms
}

// histograms are those of vLLM's metrics, in simulated seconds and in tokens.
type histograms struct {
	ttft, interToken, perToken, e2e, queue, inference, prefill, decode *vllm.Histogram
	promptTokens, outputTokens, computed, iteration                    *vllm.Histogram
}

func newHistograms(maxModelLen int) histograms {
	latency := func() *vllm.Histogram { return vllm.NewHistogram(vllm.BucketsLatency) }
	tokens := func() *vllm.Histogram { return vllm.NewHistogram(vllm.BucketsTokens(maxModelLen)) }
	return histograms{
		ttft: vllm.NewHistogram(vllm.BucketsTTFT), interToken: vllm.NewHistogram(vllm.BucketsITL), perToken: vllm.NewHistogram(vllm.BucketsITL),
		e2e: latency(), queue: latency(), inference: latency(), prefill: latency(), decode: latency(),
		promptTokens: tokens(), outputTokens: tokens(), computed: tokens(), iteration: vllm.NewHistogram(vllm.BucketsIteration),
	}
}

func (h *histograms) clone() histograms {
	return histograms{
		h.ttft.Clone(), h.interToken.Clone(), h.perToken.Clone(), h.e2e.Clone(), h.queue.Clone(), h.inference.Clone(), h.prefill.Clone(), h.decode.Clone(),
		h.promptTokens.Clone(), h.outputTokens.Clone(), h.computed.Clone(), h.iteration.Clone(),
	}
}

func startCore(eng *engine.Engine, c clock, events *eventServer) *core {
	k := &core{clock: c, alarm: newAlarm(), events: events, done: make(chan struct{}), eng: eng, idle: true,
		live: make(map[string]*engine.Request), hist: newHistograms(eng.Profile().MaxLen())}
	k.cond.L = &k.mu
	go k.run()
	return k
}

// close stops the engine in the middle of whatever it does.
func (k *core) close() {
	k.mu.Lock()
	k.closed = true
	k.cond.Broadcast()
	k.mu.Unlock()
	k.alarm.close()
	<-k.done
}

func (k *core) run() {
	defer close(k.done)
	for {
		end, ok := k.begin()
		if !ok || !k.alarm.wait(k.clock.until(end)) {
			return
		}
		k.end(end)
	}
}

// begin waits for work and starts an iteration; ok is false after close.
func (k *core) begin() (end float64, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		if k.closed {
			return 0, false
		}
		if !k.paused {
			if end, ok := k.eng.Begin(k.next); ok {
				k.stepping = true
				return end, true
			}
		}
		k.idle = true
		k.cond.Wait()
	}
}

func (k *core) end(end float64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return
	}
	k.stepping = false
	st := k.eng.End()
	// Events leave before the tokens do: who has seen an answer can rely on the
	// events of its prompt being on their way.
	if k.events != nil {
		k.events.publish(st.Events)
	}
	iteration := 0 // as vLLM counts it: what was computed of a prompt, when its first token is there
	for _, x := range st.Tokens {
		k.observe(x, end)
		if iteration++; x.First {
			iteration += len(x.R.Tokens) - x.R.Cached
		}
		if x.Last {
			delete(k.live, x.R.ID)
		}
		x.R.Tag.(*stream).push(x.Token, x.Last, x.R.Reason)
	}
	if iteration > 0 {
		k.hist.iteration.Observe(float64(iteration))
	}
	k.gauges = k.eng.Stats()
	k.next = max(end, k.clock.now()-maxLag.Seconds()*k.clock.scale)
}

func (k *core) observe(x engine.Emit, now float64) {
	r, s, h := x.R, x.R.Tag.(*stream), &k.hist
	if x.First {
		h.ttft.Observe(now - r.Arrived)
	} else {
		h.interToken.Observe(now - s.last)
	}
	s.last = now
	if !x.Last {
		return
	}
	h.e2e.Observe(now - r.Arrived)
	h.queue.Observe(r.Scheduled - r.Arrived)
	h.inference.Observe(now - r.Scheduled)
	h.prefill.Observe(r.FirstToken - r.Scheduled)
	h.decode.Observe(now - r.FirstToken)
	h.perToken.Observe((now - r.FirstToken) / float64(max(r.Generated-1, 1)))
	h.promptTokens.Observe(float64(len(r.Tokens)))
	h.outputTokens.Observe(float64(r.Generated))
	h.computed.Observe(float64(len(r.Tokens) - r.Cached))
}

// submit queues r, whose Tag is a *stream, as of the simulated time arrived.
// That is when its HTTP request came: reading and tokenising it takes real
// time, which would weigh as much more as simulated time is faster. An idle
// engine therefore starts as if that had taken none.
func (k *core) submit(arrived float64, r *engine.Request) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.eng.Submit(arrived, r); err != nil {
		return err
	}
	k.live[r.ID] = r
	if k.idle && !k.paused {
		k.idle = false
		k.next = max(k.next, arrived)
		k.cond.Broadcast()
	}
	return nil
}

// abort frees what r holds, if it is still in flight.
func (k *core) abort(r *engine.Request) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.live, r.ID)
	if k.eng.Abort(r.ID) && !k.stepping {
		k.gauges = k.eng.Stats()
	}
}

// abortAll ends all requests with the reason abort, which their clients see.
func (k *core) abortAll() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, r := range k.live {
		k.eng.Abort(id)
		r.Tag.(*stream).end(engine.Abort)
	}
	clear(k.live)
	if !k.stepping {
		k.gauges = k.eng.Stats()
	}
}

// load counts requests as they are now.
func (k *core) load() (running, waiting int) {
	st := k.state()
	return st.Running, st.Waiting
}

// adapters adds the names of adapters with running and waiting requests.
func (k *core) adapters(running, waiting map[string]bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.live {
		switch {
		case r.LoRA == "":
		case r.Scheduled > 0:
			running[r.LoRA] = true
		default:
			waiting[r.LoRA] = true
		}
	}
}

// reset empties the prefix cache. If blocks are in use it fails, or with force
// computes the requests that use them again.
func (k *core) reset(force bool) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if force {
		k.eng.PreemptAll()
	}
	return k.eng.ResetPrefixCache()
}

// pause keeps further iterations from starting, or lets them start again.
func (k *core) pause(paused bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.paused = paused
	if !paused {
		k.idle = false
		k.next = max(k.next, k.clock.now())
		k.cond.Broadcast()
	}
}

// drain waits until no request is in flight.
func (k *core) drain(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		if st := k.state(); st.Running+st.Waiting == 0 {
			return
		}
		<-tick.C
	}
}

func (k *core) setSpeed(speed float64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.eng.SetSpeed(speed)
}

// state returns the scheduler's figures as they are now.
func (k *core) state() engine.Stats {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.eng.Stats()
}

// shown returns what /metrics shows.
func (k *core) shown() (engine.Stats, histograms) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.gauges, k.hist.clone()
}

// stream carries one request's tokens from the engine to its HTTP handler. The
// engine never waits for the handler.
type stream struct {
	notify chan struct{} // capacity 1; shared by the streams of one HTTP request
	last   float64       // time of the last token; the core's

	mu     sync.Mutex
	tokens []uint32
	reason string // set with the last token
}

func (s *stream) push(token uint32, last bool, reason string) {
	s.mu.Lock()
	s.tokens = append(s.tokens, token)
	if last {
		s.reason = reason
	}
	s.mu.Unlock()
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

// end ends the stream without a further token.
func (s *stream) end(reason string) {
	s.mu.Lock()
	s.reason = reason
	s.mu.Unlock()
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

// take returns the tokens that came since the last take, and the reason if
// there will be no more.
func (s *stream) take() ([]uint32, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tokens
	s.tokens = nil
	return t, s.reason
}
