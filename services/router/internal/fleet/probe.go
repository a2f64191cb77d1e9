package fleet

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
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
	// probeRarely is how many rounds make one while the tracker says that
	// all are ready, and only context lengths are to be learned.
	probeRarely  = 15
	maxModelBody = 1 << 20
)

// Watch sets the endpoints to probe and forgets the others.
func (t *Table) Watch(endpoints []Endpoint) {
	t.mu.Lock()
	t.endpoints = endpoints
	known := map[string]bool{}
	for _, e := range endpoints {
		known[e.UID] = true
	}
	maps.DeleteFunc(t.probed, func(uid string, _ probed) bool { return !known[uid] })
	maps.DeleteFunc(t.suspects, func(uid string, _ time.Time) bool { return !known[uid] })
	t.mu.Unlock()
	notify(t.kick)
}

// Probe asks the endpoints for their health and models each interval until
// ctx is done.
func (t *Table) Probe(ctx context.Context, interval time.Duration) error {
	client := &http.Client{
		Timeout:       probeTimeout,
		Transport:     &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for round := 0; ; round++ {
		select {
		case <-ctx.Done():
			return nil
		case <-t.kick:
		case <-tick.C:
			if round%probeRarely != 0 && t.settled(time.Now()) {
				continue
			}
		}
		t.mu.RLock()
		endpoints := t.endpoints
		t.mu.RUnlock()
		var g errgroup.Group
		g.SetLimit(probeParallel)
		for _, e := range endpoints {
			g.Go(func() error {
				t.answered(e.UID, probe(ctx, client, e.URL))
				return nil
			})
		}
		_ = g.Wait()
	}
}

// answered enters the answer of one endpoint.
func (t *Table) answered(uid string, p probed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	still := false
	for _, e := range t.endpoints {
		still = still || e.UID == uid
	}
	if !still {
		return
	}
	old, known := t.probed[uid]
	if p.maxLen == nil { // it may be known from before
		p.maxLen = old.maxLen
	}
	t.probed[uid] = p
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
