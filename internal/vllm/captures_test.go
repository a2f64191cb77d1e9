package vllm_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/vllm"
)

// testdata/captures/<release> holds what real engines sent, and beside it what
// they were asked. test/interop/vllm/capture.sh records it anew.
const captures = "testdata/captures"

// capturedReleases are those that must be there.
var capturedReleases = []string{"0.11.0", "0.23.0", "0.24.0", "0.32.0"}

// capture is one file of lines; the first line says where it comes from.
type capture struct {
	release, name string
	version       vllm.Version
	head          line
	lines         []line
}

// line is a line of a capture; only the fields of its kind are set.
type line struct {
	// The first line.
	VLLM, About, Topic string
	Flags              []string
	Env                map[string]string
	BlockSize          int `json:"block_size"`

	// A question, and what the engine counted.
	Step           string
	Prompt, Output []uint32
	LoRA, Salt     string
	Headers        map[string]string
	Usage          struct {
		Prompt  int `json:"prompt_tokens"`
		Output  int `json:"completion_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}

	// The frames of one message. From is where the replay was to start.
	Live, Replay [][]byte
	From         uint64

	// The answer to a reset of the cache, or any answer.
	Reset            int
	BatchesWhileIdle int `json:"batches_while_idle"`
	Name             string
	Status           int
	Type, Body       string

	// Folders of adapters by their names.
	Adapters map[string]string
}

// blocks is the size of the pool, from the engine's flags.
func (l *line) blocks(t *testing.T) int {
	t.Helper()
	i := slices.Index(l.Flags, "--num-gpu-blocks-override")
	if i < 0 {
		t.Fatal("the engine has no fixed number of blocks")
	}
	n, err := strconv.Atoi(l.Flags[i+1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// cached is the engine's own count of tokens that it did not compute.
func (l *line) cached() int { return l.Usage.Details.Cached }

// eachCapture runs f for all captures of that name, which all of the releases
// have unless the name has a star.
func eachCapture(t *testing.T, name string, f func(*testing.T, *capture)) {
	t.Helper()
	n := 0
	for _, release := range capturedReleases {
		paths, err := filepath.Glob(filepath.Join(captures, release, name))
		if err != nil {
			t.Fatal(err)
		}
		if len(paths) == 0 && !strings.Contains(name, "*") {
			t.Errorf("release %s has no %s", release, name)
		}
		for _, path := range paths {
			if c := load(t, path); c != nil {
				n++
				t.Run(release+"/"+c.name, func(t *testing.T) { f(t, c) })
			}
		}
	}
	if n == 0 {
		t.Errorf("no captures of %s", name)
	}
}

// load reads a capture of frames or bodies.
func load(t testing.TB, path string) *capture {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	c := &capture{release: filepath.Base(filepath.Dir(path)), name: strings.TrimSuffix(filepath.Base(path), ".jsonl")}
	for i, text := range bytes.Split(bytes.TrimSpace(raw), []byte("\n")) {
		var l line
		if err := json.Unmarshal(text, &l); err != nil {
			t.Fatalf("%s, line %d: %v", path, i+1, err)
		}
		if i == 0 {
			c.head = l
			continue
		}
		c.lines = append(c.lines, l)
	}
	var ok bool
	if c.version, ok = vllm.ParseVersion(c.head.VLLM); !ok || c.head.VLLM != c.release {
		t.Fatalf("%s is of version %q", path, c.head.VLLM)
	}
	return c
}

// decode reads a payload that must be understood in full.
func decode(t *testing.T, payload []byte) *vllm.Batch {
	t.Helper()
	var d vllm.Decoder
	var b vllm.Batch
	if err := d.Decode(payload, &b); err != nil {
		t.Fatal(err)
	}
	if b.Skipped > 0 {
		t.Errorf("%d events are not understood", b.Skipped)
	}
	return &b
}

// Every live message has the topic and the next sequence number, is understood,
// and our encoder writes the very bytes that the engine wrote.
func TestCapturedEvents(t *testing.T) {
	eachCapture(t, "*.jsonl", func(t *testing.T, c *capture) {
		next := map[int]uint64{}
		for _, l := range c.lines {
			if l.Live == nil {
				continue
			}
			topic, seq, payload, err := vllm.ParseEvent(l.Live)
			if err != nil || topic != c.head.Topic {
				t.Fatalf("topic %q, error %v", topic, err)
			}
			b := decode(t, payload)
			if first, seen := next[b.Rank]; seen && seq != first {
				t.Errorf("rank %d: sequence number %d after %d", b.Rank, seq, first-1)
			}
			next[b.Rank] = seq + 1
			if diff := cmp.Diff(vllm.EventFrames(topic, seq, payload), l.Live); diff != "" {
				t.Errorf("frames: ours (-) the engine's (+):\n%s", diff)
			}
			if _, digests := c.head.Env["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"]; digests {
				continue // the decoder keeps only the end of digests
			}
			if ours := vllm.AppendBatch(nil, b, c.version); !bytes.Equal(ours, payload) {
				t.Errorf("batch %d is written differently:\nours   %x\nengine %x", seq, ours, payload)
			}
		}
	})
}

// A replay repeats the live messages byte for byte, from where it was asked,
// and ends.
func TestCapturedReplay(t *testing.T) {
	eachCapture(t, "chat.jsonl", func(t *testing.T, c *capture) {
		live := map[uint64][]byte{}
		replays := map[uint64][]uint64{} // by start
		ended := map[uint64]bool{}
		for _, l := range c.lines {
			if l.Live != nil {
				_, seq, payload, _ := vllm.ParseEvent(l.Live)
				live[seq] = payload
			}
			if l.Replay == nil {
				continue
			}
			seq, payload, end, err := vllm.ParseReplay(l.Replay)
			if err != nil || ended[l.From] {
				t.Fatalf("after the end: %v, error %v", ended[l.From], err)
			}
			want := vllm.ReplayFrames(c.head.Topic, seq, payload, c.version)
			if end {
				want = vllm.ReplayEndFrames(c.version)
			}
			if diff := cmp.Diff(want, l.Replay, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("frames: ours (-) the engine's (+):\n%s", diff)
			}
			if ended[l.From] = end; end {
				continue
			}
			replays[l.From] = append(replays[l.From], seq)
			if !bytes.Equal(live[seq], payload) {
				t.Errorf("batch %d is another than the live one", seq)
			}
		}
		if len(ended) < 3 {
			t.Errorf("replays from %v only", ended)
		}
		for start, end := range ended {
			var want []uint64
			for seq := start; live[seq] != nil && seq <= slices.Max(replays[0]); seq++ {
				want = append(want, seq)
			}
			if !end || !cmp.Equal(replays[start], want) {
				t.Errorf("from %d: %v, end is %v, want %v", start, replays[start], end, want)
			}
		}
	})
}

// A new process starts at 0 again, and nothing says so.
func TestCapturedRestart(t *testing.T) {
	eachCapture(t, "restart.jsonl", func(t *testing.T, c *capture) {
		before := load(t, filepath.Join(captures, c.release, "chat.jsonl"))
		first, last := frames(before), frames(c)
		_, was, _, _ := vllm.ParseEvent(first[len(first)-1])
		_, seq, _, err := vllm.ParseEvent(last[0])
		if was == 0 || seq != 0 || err != nil {
			t.Errorf("sequence number %d, then %d, error %v", was, seq, err)
		}
		// The same question: the hash is the same if the seed is.
		_, _, a, _ := vllm.ParseEvent(first[0])
		_, _, b, _ := vllm.ParseEvent(last[0])
		same := decode(t, a).Events[0].Hashes[0] == decode(t, b).Events[0].Hashes[0]
		if _, known := c.seed(); same != known {
			t.Errorf("hashes are equal: %v", same)
		}
	})
}

func frames(c *capture) (out [][][]byte) {
	for _, l := range c.lines {
		if l.Live != nil {
			out = append(out, l.Live)
		}
	}
	return out
}

// addCaptures calls add with all captured lines, as seeds of a fuzzer.
func addCaptures(f *testing.F, add func(l *line)) {
	f.Helper()
	paths, err := filepath.Glob(filepath.Join(captures, "*", "*.jsonl"))
	if err != nil || len(paths) == 0 {
		f.Fatalf("no captures: %v", err)
	}
	for _, path := range paths {
		for _, l := range load(f, path).lines {
			add(&l)
		}
	}
}

// What the pages say is what was done.
func TestCapturedMetrics(t *testing.T) {
	for _, release := range capturedReleases {
		t.Run(release, func(t *testing.T) {
			dir := filepath.Join(captures, release)
			var done struct {
				Load struct{ Running, Waiting float64 }
				Idle struct {
					After  string
					Usages []json.RawMessage
				}
			}
			if err := json.Unmarshal(read(t, dir, "metrics.json"), &done); err != nil {
				t.Fatal(err)
			}
			usages := []line{load(t, filepath.Join(dir, done.Idle.After)).lines[0]}
			for _, u := range done.Idle.Usages {
				var l line
				if err := json.Unmarshal(u, &l.Usage); err != nil {
					t.Fatal(err)
				}
				usages = append(usages, l)
			}
			head := load(t, filepath.Join(dir, done.Idle.After)).head
			want := vllm.Metrics{BlockSize: head.BlockSize, NumBlocks: head.blocks(t)}
			for _, u := range usages {
				want.PromptTokens += float64(u.Usage.Prompt)
				want.PrefixQueries += float64(u.Usage.Prompt)
				want.OutputTokens += float64(u.Usage.Output)
				want.PrefixHits += float64(u.cached())
			}
			v, _ := vllm.ParseVersion(release)
			if v.AtLeast(vllm.V0_24) {
				want.KVCacheTokens = want.BlockSize * want.NumBlocks
			}
			idle := metrics(t, dir, "metrics-idle.txt")[0]
			if idle.Preemptions == 0 && usages[1].Usage.Prompt+usages[1].Usage.Output > 768/2 {
				t.Error("no preemptions, although two requests of 500 tokens do not fit into 768")
			}
			want.Preemptions = idle.Preemptions
			if diff := cmp.Diff(idle, want); diff != "" {
				t.Errorf("page (-) what was done (+):\n%s", diff)
			}
			load := metrics(t, dir, "metrics-load.txt")[0]
			if load.Running != done.Load.Running || load.Waiting != done.Load.Waiting || load.KVUsage <= 0 || load.KVUsage > 1 {
				t.Errorf("under load: %+v", load)
			}
		})
	}
}

func read(t testing.TB, dir, name string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func metrics(t *testing.T, dir, name string) map[int]vllm.Metrics {
	t.Helper()
	m, err := vllm.ParseMetrics(read(t, dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Each refusal is understood by our decoder, and so by the one of the proxy.
func TestCapturedErrors(t *testing.T) {
	eachCapture(t, "errors.jsonl", func(t *testing.T, c *capture) {
		for _, l := range c.lines {
			t.Run(l.Name, func(t *testing.T) {
				switch {
				case l.Name == "the engine dies in a stream":
					diesInStream(t, l)
					return
				case l.Name == "more output than fits" && l.Status == 200:
					outputIsCut(t, l)
					return
				case l.Name == "embedding of a text model" && l.Status == 200:
					l.Status = 400 // 0.11 says so in the body only
				case l.Status == 200:
					// Some templates take any role, and old engines ignore the rank.
					if l.Name != "unknown role" && l.Name != "rank out of range" {
						t.Errorf("is answered 200: %s", l.Body)
					}
					return
				}
				e, ok := vllm.ParseError([]byte(l.Body))
				if web := strings.HasPrefix(l.Body, `{"detail":`); web {
					if ok {
						t.Errorf("an answer of the web framework is taken for the engine's: %+v", e)
					}
					return
				}
				if !ok || e.Message == "" || e.Type == "" {
					t.Fatalf("%s is read as %+v, %v", l.Body, e, ok)
				}
				anthropic := strings.HasPrefix(l.Body, `{"type":"error"`)
				if want := l.Status; !anthropic && e.Code != want {
					t.Errorf("code %d, want %d", e.Code, want)
				}
				if anthropic {
					e.Code = l.Status
				}
				long := strings.HasPrefix(l.Name, "context too long") || l.Name == "more output than fits"
				// The Anthropic route of 0.23 answers 500 to what the others refuse.
				long = long && l.Status < 500
				if l.Name == "max_tokens beyond the context" {
					long = vllm.IsContextLength(e) // both wordings are right
				}
				if got := vllm.IsContextLength(e); got != long {
					t.Errorf("IsContextLength is %v for %q", got, e.Message)
				}
				out := openai.FromBody(l.Status, []byte(l.Body))
				if got := out.Code == openai.CodeContextLength; got != long || out.Status != l.Status {
					t.Errorf("for the client: %+v", out)
				}
				if out.Status < 500 && out.Message != e.Message {
					t.Errorf("the client reads %q, want %q", out.Message, e.Message)
				}
			})
		}
	})
}

// outputIsCut checks that a prompt of 630 tokens got the 10 that fit into the
// context, not the 100 that it asked for. Older engines refuse it.
func outputIsCut(t *testing.T, l line) {
	t.Helper()
	var chunk openai.Chunk
	if err := chunk.Parse([]byte(l.Body)); err != nil || chunk.Usage.Prompt != 630 || chunk.Usage.Output != 10 {
		t.Errorf("%v, error %v", chunk.Usage, err)
	}
}

// diesInStream checks a stream whose engine was killed: an error instead of an
// end.
func diesInStream(t *testing.T, l line) {
	t.Helper()
	r := openai.NewReader(strings.NewReader(l.Body), 1<<20)
	found := false
	for {
		event, err := r.Next()
		if err != nil || event.Done() {
			break
		}
		var chunk openai.Chunk
		if err := chunk.Parse(event.Data); err != nil {
			t.Fatal(err)
		}
		if chunk.Error.Given() {
			found = true
			e, ok := vllm.ParseError(event.Data)
			// 0.11 calls it a bad request.
			if !ok || e.Code < 400 || e.Message == "" {
				t.Errorf("%s is read as %+v, %v", event.Data, e, ok)
			}
		}
	}
	if !found {
		t.Errorf("no error in the stream: %s", l.Body)
	}
}

// Each answer that counts tokens is understood.
func TestCapturedUsage(t *testing.T) {
	eachCapture(t, "bodies.jsonl", func(t *testing.T, c *capture) {
		usages := map[string]openai.Usage{}
		for _, l := range c.lines {
			if l.Status != 200 {
				continue
			}
			total := openai.NoUsage
			take := func(text []byte) {
				var chunk openai.Chunk
				if err := chunk.Parse(text); err != nil {
					t.Fatalf("%s: %v", l.Name, err)
				}
				if chunk.HasUsage {
					total.Merge(chunk.Usage)
				}
			}
			switch {
			case strings.HasPrefix(l.Type, "text/event-stream"):
				r := openai.NewReader(strings.NewReader(l.Body), 1<<20)
				for {
					event, err := r.Next()
					if err != nil || event.Done() {
						break
					}
					take(event.Data)
				}
			case strings.HasPrefix(l.Type, "application/json"):
				take([]byte(l.Body))
			}
			usages[l.Name] = total
		}
		// 17 tokens are below a block: none is cached. Older engines say nothing then.
		cached := 0
		if !c.version.AtLeast(vllm.V0_24) {
			cached = openai.Unknown
		}
		for _, name := range []string{"chat", "chat stream with usage", "chat stream with usage in each chunk", "chat with token ids"} {
			if got, want := usages[name], (openai.Usage{Prompt: 17, Cached: cached, Output: 4, Reasoning: openai.Unknown}); got != want {
				t.Errorf("%s: %+v, want %+v", name, got, want)
			}
		}
		if got := usages["chat stream"]; got != openai.NoUsage {
			t.Errorf("a stream that was not asked for usage has %+v", got)
		}
		for _, name := range []string{"completion", "completion stream with usage"} {
			if got, want := usages[name], (openai.Usage{Prompt: 1, Cached: cached, Output: 2, Reasoning: openai.Unknown}); got != want {
				t.Errorf("%s: %+v, want %+v", name, got, want)
			}
		}
	})
}

// Each rank has its own counters on the one page.
func TestCapturedRanks(t *testing.T) {
	eachCapture(t, "ranks.jsonl*", func(t *testing.T, c *capture) {
		want := map[int]vllm.Metrics{}
		for _, l := range c.lines {
			if l.Step == "" {
				continue
			}
			rank, err := strconv.Atoi(l.Headers["X-data-parallel-rank"])
			if err != nil {
				t.Fatal(err)
			}
			m := want[rank]
			m.PromptTokens += float64(l.Usage.Prompt)
			m.PrefixQueries += float64(l.Usage.Prompt)
			m.OutputTokens += float64(l.Usage.Output)
			m.PrefixHits += float64(l.cached())
			m.BlockSize, m.NumBlocks, m.KVCacheTokens = 32, 60, 32*60
			want[rank] = m
		}
		got := metrics(t, filepath.Join(captures, c.release), "metrics-ranks.txt")
		if diff := cmp.Diff(got, want); len(want) != 2 || diff != "" {
			t.Errorf("page (-) what was done (+):\n%s", diff)
		}
	})
}

// With a key: the models and their adapters, and two refusals.
func TestCapturedKey(t *testing.T) {
	eachCapture(t, "bodies-key.jsonl", func(t *testing.T, c *capture) {
		for _, l := range c.lines {
			if l.Name != "models" {
				e, ok := vllm.ParseError([]byte(l.Body))
				if !ok || l.Status != 401 || l.Body != vllm.UnauthorizedBody || e.Code != 401 {
					t.Errorf("%s: %d %s is read as %+v, %v", l.Name, l.Status, l.Body, e, ok)
				}
				continue
			}
			var list struct {
				Data []struct {
					ID     string
					Parent string
				}
			}
			if err := json.Unmarshal([]byte(l.Body), &list); err != nil {
				t.Fatal(err)
			}
			parents := map[string]string{}
			for _, m := range list.Data {
				parents[m.ID] = m.Parent
			}
			want := map[string]string{"qwen": ""}
			if slices.Contains(c.head.Flags, "--enable-lora") {
				want["lora-a"], want["lora-b"] = "qwen", "qwen"
			}
			if diff := cmp.Diff(parents, want); diff != "" {
				t.Errorf("models (-) want (+):\n%s", diff)
			}
		}
		// The series about adapters names no engine and is none.
		if m := metrics(t, filepath.Join(captures, c.release), "metrics-lora.txt"); len(m) != 1 || m[0].NumBlocks != c.head.blocks(t) {
			t.Errorf("engines: %+v", m)
		}
	})
}

// An engine whose queue is full answers 503 and does not say when to come back.
func TestCapturedLimits(t *testing.T) {
	eachCapture(t, "limits.jsonl*", func(t *testing.T, c *capture) {
		for _, l := range c.lines {
			e, ok := vllm.ParseError([]byte(l.Body))
			if !ok || l.Status != 503 || e.Type != "Service Unavailable" || vllm.IsContextLength(e) {
				t.Errorf("%s: %d %s is read as %+v, %v", l.Name, l.Status, l.Body, e, ok)
			}
		}
	})
}
