package fleet

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// Endpoint is the HTTP server of a worker.
type Endpoint struct {
	UID, URL string
}

const (
	probeTimeout  = 2 * time.Second
	probeParallel = 32
	// probeRarely is every how many intervals all endpoints are asked: of those
	// that the tracker calls ready only context lengths are to be learned.
	probeRarely  = 15
	maxModelBody = 1 << 20
)

// Watch sets the endpoints to probe and forgets the others, also those that
// have another address now.
func (t *Table) Watch(endpoints []Endpoint) {
	t.mu.Lock()
	before := map[string]string{}
	for _, e := range t.endpoints {
		before[e.UID] = e.URL
	}
	t.endpoints = endpoints
	known := map[string]bool{}
	for _, e := range endpoints {
		known[e.UID] = before[e.UID] == e.URL
	}
	maps.DeleteFunc(t.probed, func(uid string, _ probed) bool { return !known[uid] })
	maps.DeleteFunc(t.suspects, func(uid string, _ time.Time) bool { return !known[uid] })
	// A Pod that ends never comes back, not at another address either.
	maps.DeleteFunc(t.ended, func(uid string, _ bool) bool { _, ok := known[uid]; return !ok })
	t.mu.Unlock()
	notify(t.kick)
}

// Probe asks the endpoints of which the tracker says nothing good for their
// health and models, each interval and when there is news, until ctx is done.
func (t *Table) Probe(ctx context.Context, interval time.Duration) error {
	client := &http.Client{
		Timeout:       probeTimeout,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for round := 0; ; {
		var endpoints []Endpoint
		select {
		case <-ctx.Done():
			return nil
		case <-t.kick:
			endpoints = t.due(time.Now(), interval/10)
		case <-tick.C:
			if round%probeRarely == 0 {
				endpoints = t.all()
			} else {
				endpoints = t.due(time.Now(), 0)
			}
			round++
		}
		var g errgroup.Group
		g.SetLimit(probeParallel)
		for _, e := range endpoints {
			g.Go(func() error {
				t.answered(e, probe(ctx, client, e.URL))
				return nil
			})
		}
		_ = g.Wait()
	}
}

func (t *Table) all() []Endpoint {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.endpoints
}

// answered enters the answer of one endpoint.
func (t *Table) answered(e Endpoint, p probed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !slices.Contains(t.endpoints, e) { // it left meanwhile
		return
	}
	old, known := t.probed[e.UID]
	if p.maxLen == nil { // it may be known from before
		p.maxLen = old.maxLen
	}
	t.probed[e.UID] = p
	if !maps.Equal(old.maxLen, p.maxLen) {
		notify(t.learned)
	}
	if !known || old.ok != p.ok || !maps.Equal(old.maxLen, p.maxLen) {
		notify(t.changed)
	}
}

// probe asks one endpoint. vLLM's /health fails when the engine is dead while
// /v1/models still answers, so the former decides; servers without it pass.
func probe(ctx context.Context, client *http.Client, base string) probed {
	p := probed{at: time.Now()}
	status, _ := fetch(ctx, client, base+"/health")
	if p.ok = status == http.StatusOK || status == http.StatusNotFound; !p.ok {
		return p
	}
	status, body := fetch(ctx, client, base+"/v1/models")
	if status != http.StatusOK { // a key may be asked for: the length stays unknown
		p.ok = status > 0 && status < 500
		return p
	}
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil {
		return p
	}
	p.maxLen = make(map[string]int, min(len(list.Data), 1024))
	for _, m := range list.Data[:min(len(list.Data), 1024)] {
		if m.MaxModelLen > 0 {
			p.maxLen[m.ID] = m.MaxModelLen
		}
	}
	return p
}

func fetch(ctx context.Context, client *http.Client, url string) (status int, body []byte) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, nil
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(io.LimitReader(resp.Body, maxModelBody))
	if err != nil {
		return 0, nil
	}
	return resp.StatusCode, body
}
