package ingress_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
)

// conversation is a chat body whose content has about n bytes, with a last
// turn that differs from one i to the next.
func conversation(n, i int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"model":"chat","stream":true,"max_tokens":64,"messages":[{"role":"system","content":"You are a helpful assistant of a platform team."}`)
	text, _ := json.Marshal(strings.Repeat("When a node drains, its pods get a signal and thirty seconds to finish. ", 8))
	for turn := 0; b.Len() < n; turn++ {
		fmt.Fprintf(&b, `,{"role":%q,"content":%s}`, [...]string{"user", "assistant"}[turn%2], text)
	}
	fmt.Fprintf(&b, `,{"role":"user","content":"Question %d: what about the streams?"}]}`, i)
	return b.Bytes()
}

// document is a chat body with a question about one long text, as kinbench's overhead
// has them: about n bytes, of which the last 100 words or so differ.
func document(n, i int) []byte {
	var b strings.Builder
	rng := rand.New(rand.NewPCG(1, 2))
	for b.Len() < n {
		model.Text(&b, rng, 1000)
	}
	text, _ := json.Marshal(b.String()[:n])
	b.Reset()
	model.Text(&b, rand.New(rand.NewPCG(3, uint64(i))), 100)
	question, _ := json.Marshal(b.String())
	return fmt.Appendf(nil, `{"model":"chat","stream":true,"max_tokens":64,"messages":[{"role":"system","content":%s},{"role":"user","content":%s}]}`, text, question)
}

// BenchmarkPipeline is what a request costs before the router is asked: parse,
// render, tokenise with a warm conversation prefix, hash.
//
//	go test -run '^$' -bench Pipeline -benchtime 300ms ./services/ingress
func BenchmarkPipeline(b *testing.B) {
	for _, tt := range []struct {
		name string
		size int
		body func(n, i int) []byte
	}{
		{"8KiB", 8 << 10, conversation},
		{"32KiB", 32 << 10, conversation},
		{"220KiB", 220 << 10, conversation},
		{"400KB/document", 400_000, document},
	} {
		b.Run(tt.name, func(b *testing.B) {
			view := catalog.New(&routerv1.Catalog{
				Models:   []*routerv1.Model{{Name: "chat", Profiles: []string{"p"}}},
				Profiles: []*routerv1.Profile{{Id: "p", TokenizerPath: modelDir(b), BlockSize: 16}},
			})
			m := prompt.New(prompt.Settings{CacheBytes: 64 << 20, WorkerTime: time.Second, Retry: time.Minute, Log: slog.New(slog.DiscardHandler)})
			m.Prepare(view)
			profiles := view.Model("chat").Profiles
			var r openai.Request
			n, cached, i := 0, 0, 0
			bodies := make([][]byte, 64)
			for i := range bodies {
				bodies[i] = tt.body(tt.size, i)
			}
			b.ReportAllocs()
			for b.Loop() {
				if e := r.Parse(openai.RouteChat, bodies[i%len(bodies)], 0); e != nil {
					b.Fatal(e)
				}
				p := m.Make(context.Background(), &r, profiles)
				if p[0].Mode != prompt.Local {
					b.Fatal(p[0].Mode)
				}
				n, cached, i = p[0].Tokens, p[0].Cached, i+1
			}
			b.ReportMetric(float64(n), "tokens")
			b.ReportMetric(float64(cached), "cached")
		})
	}
}

// BenchmarkFirstEvent is the time to a stream's first event with a worker that
// answers at once: alone, behind a plain reverse proxy, and behind ingress
// with its router. The difference to the worker alone is the added latency.
//
//	go test -run '^$' -bench FirstEvent -benchtime 500ms ./services/ingress
func BenchmarkFirstEvent(b *testing.B) {
	w := newWorker(b, "w", answers(roleChunk()+textChunk("a")+doneEvent)) // with usage the parity check would compare it
	target, _ := url.Parse(w.url)
	plain := httputil.NewSingleHostReverseProxy(target)
	plain.FlushInterval = -1
	front := httptest.NewServer(plain)
	b.Cleanup(front.Close)
	e := start(b, func(_ *ingress.Config, c *routerv1.Catalog) {
		c.Profiles[0].TokenizerPath, c.Profiles[0].MaxModelLen, c.Models[1].MaxModelLen = modelDir(b), 1<<20, 1<<20
	}).ready()
	e.router.routes(w)
	for _, tt := range []struct {
		name, url string
		size      int
	}{
		{"1KB/worker", w.url, 1 << 10},
		{"1KB/reverse_proxy", front.URL, 1 << 10},
		{"1KB/ingress", e.url, 1 << 10},
		{"400KB/worker", w.url, 400 << 10},
		{"400KB/reverse_proxy", front.URL, 400 << 10},
		{"400KB/ingress", e.url, 400 << 10},
		{"400KB/ingress/document", e.url, 400 << 10},
	} {
		body := conversation(tt.size, 0)
		if strings.HasSuffix(tt.name, "/document") {
			body = document(tt.size, 0)
		}
		b.Run(tt.name, func(b *testing.B) {
			first := make([]byte, 1)
			var sum time.Duration
			n := 0
			b.ReportAllocs()
			for b.Loop() {
				began := time.Now()
				resp, err := e.client.Post(tt.url+chatPath, "application/json", bytes.NewReader(body))
				if err != nil || resp.StatusCode != http.StatusOK {
					b.Fatal(resp, err)
				}
				if _, err := io.ReadFull(resp.Body, first); err != nil {
					b.Fatal(err)
				}
				sum += time.Since(began)
				n++
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			b.ReportMetric(float64(sum.Microseconds())/float64(n), "us/first")
		})
	}
}
