package vllm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/internal/vllm"
	"github.com/kinference/kinference/test/interop/vllm/rig"
)

// The differential tests send the same requests to a real engine and to a
// simulated worker of the same shape, and compare everything that a control
// plane can see: answers, events, cached tokens and metrics. Output is forced to
// one token (allowed_token_ids), so that blocks of generated tokens are the same
// on both sides too.
//
// What differs on purpose is listed in internal/fleetsim/README.md.

// forcedID is the token " word", which all forced output is made of.
const forcedID = 3409

// twins are a real engine and a simulated worker of the same shape.
type twins struct {
	real, sim twin
	engine    *rig.Engine
	worker    *fleetsim.Worker
	block     int // tokens per block: a hybrid engine chooses its own size
}

// twin is one of the two as its clients see it.
type twin struct {
	name   string
	url    string
	events string
	replay string
	key    string // API key
	client *http.Client
}

// twinShape is what twins have in common.
type twinShape struct {
	model   string // "": qwen
	blocks  int    // that hold tokens: the engine has one more, its null block
	length  int
	batched int
	seqs    int
	key     string
	loras   map[string]string
	args    []string               // of the engine, besides
	config  func(*fleetsim.Config) // changes the worker's configuration likewise
	profile func(*engine.Profile)
}

const diffBlock = 32

// newTwins starts both.
func newTwins(t *testing.T, s twinShape) *twins {
	t.Helper()
	env := rig.Require(t)
	if s.model == "" {
		s.model = "qwen"
	}
	o := rig.Options{
		Name: "real", Model: s.model, Blocks: s.blocks + 1, BlockSize: diffBlock, MaxModelLen: s.length, LoRAs: s.loras,
		Args: append([]string{"--max-num-batched-tokens", strconv.Itoa(s.batched), "--max-num-seqs", strconv.Itoa(s.seqs)}, s.args...),
	}
	if s.key != "" {
		o.Env = []string{"VLLM_API_KEY=" + s.key}
	}
	dir := env.Model(s.model)
	tok, err := tokens.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	template, err := chat.Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	cfg := fleetsim.Config{
		Name: "sim", Model: s.model, Tokenizer: tok, Template: template, Version: vllm.V0_32, APIKey: s.key, DevMode: true, VocabSize: 151936,
		HashAlgorithm: vllm.SHA256, HashSeed: vllm.DefaultSeed,
		// Iterations about as short as a tiny model's.
		Profile: engine.Profile{
			Name: "tiny", Blocks: s.blocks, MaxBatchedTokens: s.batched, MaxSeqs: s.seqs, MaxModelLen: s.length,
			W: 2e-3, A: 1e-7, Ovh: 1e-4,
		},
	}
	cfg.LoRAs = slices.Sorted(maps.Keys(s.loras))
	if s.config != nil {
		s.config(&cfg)
	}
	if s.profile != nil {
		s.profile(&cfg.Profile)
	}
	p := &twins{engine: rig.Start(t, env, o)[0]}
	p.real = twin{name: "real", url: p.engine.URL(), events: p.engine.Events(), replay: p.engine.Replay(), key: s.key, client: twinClient(t)}
	if p.block, err = strconv.Atoi(p.real.metrics(t).labels(cacheConfig)["block_size"]); err != nil {
		t.Fatal(err)
	}
	cfg.Profile.BlockSize = p.block
	if p.worker, err = fleetsim.Start(context.Background(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.worker.Kill)
	p.sim = twin{name: "sim", url: p.worker.URL(), events: p.worker.EventsAddr(0), replay: p.worker.ReplayAddr(0), key: s.key, client: twinClient(t)}
	return p
}

func twinClient(t *testing.T) *http.Client {
	// The engine closes idle connections after 5 s.
	tr := &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Second}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// diffCall is one HTTP request of a script.
type diffCall struct {
	method string // "": POST with a body, else GET
	path   string
	header map[string]string
	body   string
	noKey  bool
}

type diffReply struct {
	status int
	header http.Header
	body   string
	err    error
}

// do sends a request and reads the whole answer.
func (s *twin) do(t *testing.T, c diffCall) diffReply {
	t.Helper()
	r := s.ask(t.Context(), c)
	if r.err != nil {
		t.Fatalf("%s: %s %s: %v", s.name, c.method, c.path, r.err)
	}
	return r
}

// ask is do for goroutines.
func (s *twin) ask(ctx context.Context, c diffCall) diffReply {
	resp, err := s.send(ctx, c)
	if err != nil {
		return diffReply{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return diffReply{resp.StatusCode, resp.Header, string(body), err}
}

// send sends a request; the caller reads the answer.
func (s *twin) send(ctx context.Context, c diffCall) (*http.Response, error) {
	method := c.method
	if method == "" {
		method = http.MethodGet
		if c.body != "" {
			method = http.MethodPost
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, s.url+c.path, strings.NewReader(c.body))
	if err != nil {
		return nil, err
	}
	if c.body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if s.key != "" && !c.noKey {
		req.Header.Set("Authorization", "Bearer "+s.key)
	}
	for k, v := range c.header {
		if req.Header.Set(k, v); v == "" {
			req.Header.Del(k)
		}
	}
	return s.client.Do(req)
}

// each calls f for both sides.
func (p *twins) each(f func(s *twin)) {
	f(&p.real)
	f(&p.sim)
}

// tally is what usage says of one answer.
type tally struct{ Prompt, Output, Cached int }

// tallyOf reads the usage of an answer, stream or not.
func tallyOf(t *testing.T, r diffReply) (u tally) {
	t.Helper()
	if r.err != nil || r.status != http.StatusOK {
		t.Fatalf("%v, status %d: %.500s", r.err, r.status, r.body)
	}
	for _, data := range datasOf(r) {
		var body struct {
			Usage *struct {
				Prompt  int `json:"prompt_tokens"`
				Output  int `json:"completion_tokens"`
				Details struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(data), &body); err == nil && body.Usage != nil {
			u = tally{body.Usage.Prompt, body.Usage.Output, body.Usage.Details.Cached}
		}
	}
	return u
}

// datasOf lists the data of the events of a stream, or the one body.
func datasOf(r diffReply) []string {
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		return []string{r.body}
	}
	var out []string
	for block := range strings.SplitSeq(r.body, "\n\n") {
		if data, ok := strings.CutPrefix(block, "data: "); ok {
			out = append(out, data)
		} else if block != "" {
			out = append(out, "!"+block) // no SSE data: shows up in the comparison
		}
	}
	return out
}

// diffPrompt is a completion request over token ids whose output is forced.
type diffPrompt struct {
	ids    []int
	output int
	lora   string
	salt   string
	more   string // further members of the body
}

func (p diffPrompt) call() diffCall {
	body := fmt.Sprintf(`{"prompt":%s,"max_tokens":%d,"ignore_eos":true,"allowed_token_ids":[%d]`, idList(p.ids), p.output, forcedID)
	if p.lora != "" {
		body += fmt.Sprintf(`,"model":%q`, p.lora)
	}
	if p.salt != "" {
		body += fmt.Sprintf(`,"cache_salt":%q`, p.salt)
	}
	return diffCall{path: "/v1/completions", body: body + p.more + "}"}
}

func idList(ids []int) string {
	b, _ := json.Marshal(ids)
	return string(b)
}

// idSpan is n token ids from first on.
func idSpan(first, n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = first + i
	}
	return ids
}

// forced is n times the forced token, as output leaves it in the cache.
func forced(n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = forcedID
	}
	return ids
}

// wait polls cond until it holds.
func wait(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(time.Minute); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// oneLine is a value as JSON.
func oneLine(v any) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err.Error()
	}
	return strings.TrimSpace(b.String())
}
