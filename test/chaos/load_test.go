package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/model"
)

const (
	// personal is in each prompt with personal data, beside a card's number.
	personal   = "marker-of-what-must-stay"
	dayLimit   = 1_000_000_000
	tightBurst = 2 // seconds
)

// kind of requests, in so many of ten.
type kind struct {
	path, pool string
	share      int
}

// kinds: plain ones, counted in a daily budget that never refuses; those of a path
// that may lead to a provider, two of three with personal data; and those of a
// limit that lets half of them through and denies when it cannot be checked.
var kinds = []kind{{"chat", "own", 6}, {"pii", "mixed", 3}, {"tight", "own", 1}}

// tight is that limit, in tokens a second.
func (c *cluster) tight() int { return max(1, c.rate/10) * tokensEach / 2 }

// tokensEach is what a request under the tight limit uses, about.
const tokensEach = 60

// balancer is what stands before the ingresses: it asks each for readiness and
// sends requests in turn to those that are ready. It never repeats one.
type balancer struct {
	c       *cluster
	clients []*http.Client

	mu      sync.Mutex
	ready   []bool
	removed []bool
	next    int
}

// Looks of the balancer, and misses in a row after which an ingress is left out.
const (
	balancerLooks  = 200 * time.Millisecond
	balancerMisses = 2
)

func newBalancer(c *cluster) *balancer {
	n := len(c.ingress)
	b := &balancer{c: c, ready: make([]bool, n), removed: make([]bool, n)}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for i, p := range c.ingress {
		b.clients = append(b.clients, &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 256}})
		all.Go(func() {
			tick := time.NewTicker(balancerLooks)
			defer tick.Stop()
			client := &http.Client{Timeout: 500 * time.Millisecond}
			defer client.CloseIdleConnections()
			for misses := 0; ; {
				resp, err := client.Get("http://" + p.addr + ":9990/readyz")
				ok := err == nil && resp.StatusCode == http.StatusOK
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				if misses++; ok {
					misses = 0
				}
				b.mu.Lock()
				b.ready[i] = misses < balancerMisses && (ok || b.ready[i])
				b.mu.Unlock()
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	c.t.Cleanup(func() {
		cancel()
		all.Wait()
		for _, client := range b.clients {
			client.CloseIdleConnections()
		}
	})
	return b
}

// pick returns the next ingress that is ready; any if none is.
func (b *balancer) pick() (*http.Client, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range b.ready {
		b.next = (b.next + 1) % len(b.ready)
		if b.ready[b.next] && !b.removed[b.next] {
			break
		}
	}
	return b.clients[b.next], "http://" + b.c.ingress[b.next].addr + ":8080"
}

// remove leaves an ingress out, as Kubernetes does with a Pod that is to end, until
// it is put back.
func (b *balancer) remove(p *process, out bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.removed[slices.Index(b.c.ingress, p)] = out
}

// result is how a request ended.
type result struct {
	id, path   string
	kind       string // ok, limited, denied, or how it failed
	began, end time.Time
	personal   bool
	detail     string
}

func (r *result) failed() bool { return r.kind != "ok" && r.kind != "limited" && r.kind != "denied" }

// session is a steady load from start to stop.
type session struct {
	c      *cluster
	name   string
	began  time.Time
	cancel context.CancelFunc
	load   sync.WaitGroup
	sent   atomic.Int64

	mu      sync.Mutex
	results []result
}

// start begins to send rate requests a second, whether or not they are answered.
func (c *cluster) start() *session {
	ctx, cancel := context.WithCancel(context.Background())
	c.session++
	s := &session{c: c, name: fmt.Sprintf("s%d", c.session), began: time.Now(), cancel: cancel}
	s.load.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			for due := int(time.Since(s.began).Seconds() * float64(c.rate)); i < due; i++ {
				n := i
				s.load.Go(func() {
					r := c.send(s.name, n)
					s.mu.Lock()
					defer s.mu.Unlock()
					s.results = append(s.results, r)
				})
				s.sent.Add(1)
			}
		}
	})
	return s
}

// stop ends the load and waits for all answers.
func (s *session) stop() []result {
	s.cancel()
	s.load.Wait()
	return s.results
}

// calm waits until no request has failed or was denied for d.
func (s *session) calm(d, most time.Duration) bool {
	began := time.Now()
	return eventually(most, func() bool {
		if time.Since(began) < d {
			return false
		}
		since := time.Now().Add(-d)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, r := range slices.Backward(s.results) {
			if (r.failed() || r.kind == "denied") && r.end.After(since) {
				return false
			}
		}
		return true
	})
}

// send sends request n of a session.
func (c *cluster) send(name string, n int) (r result) {
	random := rand.New(rand.NewPCG(uint64(n), 11))
	path, k := pathOf(n)
	var text strings.Builder
	output := 16 + random.IntN(32)
	switch path {
	case "tight":
		model.Text(&text, random, 10)
		output = tokensEach - 40
	case "pii":
		if r.personal = k%2 == 0; r.personal {
			fmt.Fprintf(&text, "%s My card number is 4111 1111 1111 1111, is it valid?", personal)
		} else {
			text.WriteString("Please explain in simple words how bread is baked.")
		}
		model.Text(&text, random, 10)
	default: // a turn of one of fifty conversations
		model.Text(&text, rand.New(rand.NewPCG(uint64(n%50), 5)), 160)
		model.Text(&text, random, 20)
	}
	stream := n%4 != 0
	client, base := c.balancer.pick()
	r.id, r.path, r.began = fmt.Sprintf("%s-%d", name, n), path, time.Now()
	r.kind, r.detail = post(client, base+"/"+path+"/v1/chat/completions", r.id, stream,
		fmt.Sprintf(`{"model":%q,"max_tokens":%d,"ignore_eos":true,"stream":%v,"messages":[{"role":"user","content":%q}]}`, modelName, output, stream, text.String()))
	r.end = time.Now()
	return r
}

// post sends a request once and says how it ended.
func post(client *http.Client, url, id string, stream bool, body string) (kind, detail string) {
	req, err := http.NewRequest(http.MethodPost, url, io.NopCloser(strings.NewReader(body))) // which cannot be sent twice
	if err != nil {
		return "bad", err.Error()
	}
	req.ContentLength = int64(len(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	resp, err := client.Do(req)
	var slow interface{ Timeout() bool }
	switch {
	case errors.As(err, &slow) && slow.Timeout():
		return "no answer", err.Error()
	case err != nil && (strings.Contains(err.Error(), "refused") || strings.Contains(err.Error(), "dial")):
		return "not connected", err.Error()
	case err != nil:
		return "connection lost", err.Error()
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	text := string(raw)
	switch {
	case resp.StatusCode == http.StatusTooManyRequests:
		return "limited", ""
	case resp.StatusCode == http.StatusServiceUnavailable && strings.Contains(text, "Limits cannot be checked"):
		return "denied", ""
	case resp.StatusCode != http.StatusOK:
		return fmt.Sprint("status ", resp.StatusCode), text
	case stream && strings.Contains(text, `"error"`):
		return "error in stream", text[max(0, len(text)-300):]
	case err != nil || stream && !strings.Contains(text, "data: [DONE]"):
		return "cut off", fmt.Sprint(err)
	}
	return "ok", ""
}

// pathOf is the path of request n, and its number among ten of that path.
func pathOf(n int) (path string, k int) {
	k = n % 10
	for _, kind := range kinds {
		if k < kind.share {
			return kind.path, k
		}
		k -= kind.share
	}
	return "", 0
}

// number is n of a request's id.
func number(id string) int {
	_, text, _ := strings.Cut(id, "-")
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0
	}
	return n
}
