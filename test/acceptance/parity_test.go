package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/fleetsim/model"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

const (
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
)

// profileStatus is the status of the fleet's one profile.
func (e *env) profileStatus() *adminv1.ProfileStatus {
	e.t.Helper()
	s, err := e.admin.Status(e.t.Context(), &adminv1.StatusRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	if len(s.GetProfiles()) != 1 {
		e.t.Fatalf("status has %d profiles", len(s.GetProfiles()))
	}
	return s.GetProfiles()[0]
}

// changedModel is a folder with the simulated model, a file of it changed.
func changedModel(t *testing.T, file string, change func(string) string) string {
	t.Helper()
	dir := t.TempDir()
	if err := model.CopyTo(dir); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	changed := change(string(text))
	if changed == string(text) {
		t.Fatalf("%s is another one than this test knows", file)
	}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(changed), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// withModel is the resource of the fleet with another model folder.
func (e *env) withModel(dir string) string {
	right, err := model.Dir()
	if err != nil {
		e.t.Fatal(err)
	}
	return strings.Replace(e.workerSet(""), fmt.Sprintf("tokenizer: { path: %q }", right), fmt.Sprintf("tokenizer: { path: %q, passTokenIds: true }", dir), 1)
}

// A model folder that is not that of the engines is found out and named, whether
// its template differs or its tokenizer; the engines are asked instead, so every
// hit is predicted all the same, and no answer changes. With the right folder it
// is over (Infera 92 and 143, production-stack 1045).
func TestWrongModelFolder(t *testing.T) {
	e := start(t, settings{workers: 2})
	e.eventually("the tokenizer is proven", func() bool {
		p := e.profileStatus()
		return p.GetTokens() == agrees && p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_LOCAL && p.GetWorkersAgree() == 2
	})
	ask := req{text: words(1, 1500), max: 4, extra: `,"seed":1`}
	want := e.chat(ask).text
	for _, tt := range []struct {
		cause routerv1.ParityCause
		dir   string
	}{
		{routerv1.ParityCause_PARITY_CAUSE_TEMPLATE, changedModel(t, "chat_template.jinja", func(s string) string {
			return strings.Replace(s, `<|im_start|>user\n'`, `<|im_start|> user\n'`, 1)
		})},
		{routerv1.ParityCause_PARITY_CAUSE_TOKENIZER, changedModel(t, "tokenizer.json", halfOfTheMerges)},
	} {
		e.write("fleet.yaml", e.withModel(tt.dir))
		e.eventually(tt.cause.String()+" is named", func() bool {
			p := e.profileStatus()
			return p.GetTokens() == differs && p.GetTokensCause() == tt.cause && p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED && p.GetWorkersDiffer() == 2
		})
		e.eventually("hits are predicted to the token", func() bool {
			a := e.chat(ask)
			if a.status != http.StatusOK || a.text != want {
				t.Fatalf("answer %d %q, want %q", a.status, a.text, want)
			}
			c := candidate(e.explain(a), strings.TrimPrefix(e.explain(a).Chosen, "test.sim"))
			return a.usage.Details.Cached > 1400 && int(c.MatchedTokens) == a.usage.Details.Cached && int(c.PromptTokens) == a.usage.Prompt
		})
		name := strings.ToLower(strings.TrimPrefix(tt.cause.String(), "PARITY_CAUSE_"))
		if m := e.metrics(); !strings.Contains(m, `kinference_ingress_parity_distrusted{cause="`+name+`"`) || !strings.Contains(m, `mode="render"`) {
			t.Errorf("%s is not in the metrics", name)
		}
		if !strings.Contains(e.log.String(), `asking them instead`) {
			t.Errorf("%s is not in the log", name)
		}
	}
	e.write("fleet.yaml", e.workerSet(""))
	e.eventually("the right folder is used", func() bool {
		p := e.profileStatus()
		return p.GetTokens() == agrees && p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_LOCAL
	})
}

func halfOfTheMerges(text string) string {
	var all map[string]any
	if json.Unmarshal([]byte(text), &all) != nil {
		return text
	}
	bpe := all["model"].(map[string]any)
	merges := bpe["merges"].([]any)
	bpe["merges"] = merges[:len(merges)/2]
	out, err := json.Marshal(all)
	if err != nil {
		return text
	}
	return string(out)
}

// One worker has blocks of another size than the others: it is named, and still
// gets the conversations that it has the cache of (Infera 73).
func TestWorkerWithAnotherBlockSize(t *testing.T) {
	e := start(t, settings{workers: 3, worker: func(i int, c *fleetsim.Config) {
		if i == 2 {
			c.Profile.BlockSize, c.Profile.Blocks = 32, c.Profile.Blocks/2
		}
	}})
	e.eventually("it is named", func() bool {
		p := e.profileStatus()
		return p.GetBlockSize() == 16 && p.GetCached() == differs && p.GetCachedCause() == routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE &&
			len(p.GetCachedDiffers()) == 1 && strings.HasSuffix(p.GetCachedDiffers()[0], ".w2/0")
	})
	e.eventually("it gets the next turn of what it has", func() bool {
		text := words(int(e.workers[0].Now()), 600)
		first, next := e.chat(req{text: text, max: 1}), e.chat(req{text: text + " and more", max: 1})
		return strings.HasSuffix(e.explain(first).Chosen, ".w2/0") && strings.HasSuffix(e.explain(next).Chosen, ".w2/0") && next.usage.Details.Cached >= 500
	})
	if m := e.metrics(); !strings.Contains(m, `kinference_router_parity_differs{cause="block_size"`) {
		t.Error("not in the metrics")
	}
}

// turns asks for some prompts again and again until cond holds; no prompt comes
// again so soon that its former request is still remembered as on its way.
func (e *env) turns(what string, cond func() bool) {
	e.t.Helper()
	i := 0
	e.eventually(what, func() bool {
		i++
		e.chat(req{text: words(5000+i%40, 400), max: 1})
		return cond()
	})
}

// Engines that have caches and tell no events of them: the resources do not name
// any, or name an address where there are none. Either is found out and named,
// and what was routed is remembered instead.
func TestEventsAreMissing(t *testing.T) {
	e := start(t, settings{workers: 1})
	for i, events := range []string{"", `, kvEvents: "tcp://127.0.0.1:1"`} {
		w, err := fleetsim.Start(context.Background(), fleetsim.Config{
			Name: fmt.Sprint("mute", i), Profile: engine.L40SPlain16, TimeScale: 50, Model: modelName, EventsPort: fleetsim.Off,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.Kill)
		e.workers = []*fleetsim.Worker{w}
		e.write("fleet.yaml", strings.Replace(e.workerSet(""), w.Addr()+`"`, w.Addr()+`"`+events, 1))
		e.eventually("the worker serves", func() bool {
			a := e.chat(req{text: "x", max: 1})
			return a.status == http.StatusOK && candidate(e.explain(a), "."+w.Name()+"/0") != nil
		})
		e.turns("missing events are named", func() bool {
			p := e.profileStatus()
			return p.GetCached() == differs && p.GetCachedCause() == routerv1.ParityCause_PARITY_CAUSE_EVENTS
		})
		text := words(900+i, 1000)
		e.eventually("the next turn is expected to hit", func() bool {
			e.chat(req{text: text, max: 1})
			c := candidate(e.explain(e.chat(req{text: text + " more", max: 1})), "."+w.Name()+"/0")
			return c != nil && c.MatchedTokens >= 700
		})
	}
}

// Caches that are too small for what is asked and that are emptied now and then
// are no reason to distrust the index.
func TestNoiseIsNoDivergence(t *testing.T) {
	e := start(t, settings{workers: 2, worker: func(_ int, c *fleetsim.Config) { c.Profile.Blocks = 600 }})
	for i := range 400 {
		which := 6000 + i%3 // asked for often, and evicted by the others
		if i%4 == 0 {
			which = 6100 + i*7%45
		}
		e.chat(req{text: words(which, 400), max: 1})
		if i%40 == 20 {
			e.workers[i/40%2].WipeCache()
		}
		if i%20 == 0 {
			if p := e.profileStatus(); p.GetCached() == differs || p.GetTokens() == differs {
				t.Fatalf("after %d requests: %v", i, p)
			}
		}
	}
	p := e.profileStatus()
	if n := p.GetCachedCounts(); p.GetCached() != agrees || n.GetAgree() < 20 {
		t.Errorf("status %v", p)
	}
	t.Logf("counts: %v", p.GetCachedCounts())
}
