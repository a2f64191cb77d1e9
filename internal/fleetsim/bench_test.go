package fleetsim_test

import (
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

// What a worker itself costs per request of a 20,000-token chat, when the
// engine takes no time: it adds to every latency that wall-clock runs measure.
//
//	go test -run xxx -bench ChatRequest ./fleetsim
func BenchmarkChatRequest(b *testing.B) {
	w := start(b, fleetsim.Config{Profile: engine.L40SQwen27B, TimeScale: 1e7})
	var text strings.Builder
	model.Text(&text, rand.New(rand.NewPCG(1, 2)), 20_000)
	body := `{"messages":[{"role":"user","content":"` + text.String() + `"}],"max_tokens":1,"stream":true}`
	c := client(b)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		resp, err := c.Post(w.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			b.Fatal(resp.Status, err)
		}
		resp.Body.Close()
	}
}

// What streaming costs per token.
func BenchmarkStreamToken(b *testing.B) {
	w := start(b, fleetsim.Config{Profile: engine.L40SQwen27B, TimeScale: 1e7})
	c := client(b)
	b.ReportAllocs()
	for b.Loop() {
		resp, err := c.Post(w.URL()+"/v1/chat/completions", "application/json", strings.NewReader(`{"messages":[{"role":"user","content":"hi"}],"max_tokens":1000,"stream":true}`))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			b.Fatal(err)
		}
		resp.Body.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/token")
}
