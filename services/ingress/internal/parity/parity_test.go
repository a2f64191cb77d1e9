package parity_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/openai"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
	"github.com/kinference/kinference/services/ingress/internal/parity"
	"github.com/kinference/kinference/services/ingress/internal/prompt"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	agrees  = routerv1.ParityState_PARITY_STATE_AGREES
	differs = routerv1.ParityState_PARITY_STATE_DIFFERS
)

// answer is how a worker's ids compare with ours: of plain text and of chats.
type answer struct {
	text, chat prompt.Comparison
	err        error
}

var (
	good      = answer{text: prompt.Same, chat: prompt.Same}
	otherChat = answer{text: prompt.Same, chat: prompt.Differs}
	otherIDs  = answer{text: prompt.Differs, chat: prompt.Differs}
	mute      = answer{}
	textOnly  = answer{text: prompt.Same}
	away      = answer{err: errors.New("connection refused")}
)

// fleet is what the checker sees of the world.
type fleet struct {
	*parity.Checker
	t testing.TB

	mu      sync.Mutex
	answers map[string]answer // by URL
	hang    map[string]bool
	asked   map[string]int // questions by URL
	checks  map[string]int // by kind and result
	report  *routerv1.ParityReport
	reports int
	log     bytes.Buffer
	version uint64
}

func (f *fleet) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.Write(p)
}

// logged is how many lines of the log have a text.
func (f *fleet) logged(text string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return strings.Count(f.log.String(), text)
}

func (f *fleet) compare(ctx context.Context, r *openai.Request, _ *catalog.Profile, url string) (prompt.Comparison, error) {
	f.mu.Lock()
	f.asked[url]++
	a, hang := f.answers[url], f.hang[url]
	f.mu.Unlock()
	if hang {
		<-ctx.Done()
		return prompt.Silent, ctx.Err()
	}
	if r.Route == openai.RouteCompletions {
		return a.text, a.err
	}
	return a.chat, a.err
}

// questions is how often a URL was asked, sent how many reports were.
func (f *fleet) questions(url string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[url]
}

func (f *fleet) sent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reports
}

func (f *fleet) set(url string, a answer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answers[url] = a
}

// newFleet runs a checker in a synctest bubble.
func newFleet(t *testing.T) *fleet {
	f := &fleet{t: t, answers: map[string]answer{}, hang: map[string]bool{}, asked: map[string]int{}, checks: map[string]int{}}
	f.Checker = parity.New(parity.Settings{
		Compare: f.compare, Loaded: func(path string) bool { return path != "broken" }, Name: "i", Every: 10 * time.Minute,
		Log: slog.New(slog.NewTextHandler(f, nil)),
		Report: func(_ context.Context, r *routerv1.ParityReport) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.report, f.reports = r, f.reports+1
			return nil
		},
		Checked: func(_, kind, result string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.checks[kind+" "+result]++
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); f.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return f
}

// catalogOf has one set ns/s with the profiles base and lora, and these workers:
// uid, or uid@epoch.
func (f *fleet) catalogOf(workers ...string) *catalog.View {
	f.version++
	c := &routerv1.Catalog{Version: f.version, Epochs: map[string]string{}, Profiles: []*routerv1.Profile{
		{Id: "lora", WorkerSet: "ns/s", TokenizerPath: "/m", Lora: "x"},
		{Id: "base", WorkerSet: "ns/s", TokenizerPath: "/m"},
		{Id: "none", WorkerSet: "ns/none"},
		{Id: "broken", WorkerSet: "ns/broken", TokenizerPath: "broken"},
	}}
	for _, w := range workers {
		uid, epoch, _ := strings.Cut(w, "@")
		c.Workers = append(c.Workers, &routerv1.Worker{Uid: uid, WorkerSet: "ns/s", Url: uid})
		if epoch != "" {
			c.Epochs[uid] = epoch
		}
	}
	return catalog.New(c)
}

// see gives the checker a catalog and lets it settle.
func (f *fleet) see(workers ...string) *catalog.View {
	v := f.catalogOf(workers...)
	f.Watch(v)
	f.settle()
	return v
}

func (f *fleet) settle() {
	time.Sleep(time.Second)
	synctest.Wait()
}

// verdicts are those of the last report in words.
func (f *fleet) verdicts() map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]string{}
	for _, v := range f.report.GetVerdicts() {
		out[v.GetProfile()+"|"+v.GetWorker()] = strings.TrimPrefix(v.GetState().String(), "PARITY_STATE_") + " " + strings.TrimPrefix(v.GetCause().String(), "PARITY_CAUSE_")
		if v.GetCheckedUnixNanos() == 0 {
			f.t.Errorf("a verdict without its time: %v", v)
		}
	}
	return out
}

func (f *fleet) state(id string) string {
	for _, s := range f.States() {
		if s.Profile == id {
			return s.Cause
		}
	}
	return ""
}

func profileOf(v *catalog.View, id string) *catalog.Profile {
	for _, p := range v.Profiles {
		if p.ID == id {
			return p
		}
	}
	return nil
}

func TestProbe(t *testing.T) {
	tests := []struct {
		name       string
		workers    map[string]answer
		distrusted string // cause, "none"
		proven     []string
		verdicts   map[string]string
	}{
		{"all agree", map[string]answer{"a": good, "b": good}, "none", []string{"a", "b"}, map[string]string{"|a": "AGREES UNSPECIFIED", "|b": "AGREES UNSPECIFIED"}},
		{"other template", map[string]answer{"a": otherChat}, "template", nil,
			map[string]string{"|a": "DIFFERS TEMPLATE", "base|a": "DIFFERS TEMPLATE", "lora|a": "DIFFERS TEMPLATE"}},
		{"other tokenizer", map[string]answer{"a": otherIDs}, "tokenizer", nil,
			map[string]string{"|a": "DIFFERS TOKENIZER", "base|a": "DIFFERS TOKENIZER", "lora|a": "DIFFERS TOKENIZER"}},
		{"no worker tells", map[string]answer{"a": mute}, "none", nil, map[string]string{}},
		{"nobody answers", map[string]answer{"a": away}, "none", nil, map[string]string{}},
		{"no word on chats: ids are not passed on", map[string]answer{"a": textOnly}, "none", nil, map[string]string{"|a": "AGREES UNSPECIFIED"}},
		{"one of three differs", map[string]answer{"a": good, "b": otherChat, "c": good}, "none", []string{"a", "c"},
			map[string]string{"|a": "AGREES UNSPECIFIED", "|b": "DIFFERS TEMPLATE", "|c": "AGREES UNSPECIFIED"}},
		{"half of them differ", map[string]answer{"a": good, "b": otherChat}, "template", nil,
			map[string]string{"|a": "AGREES UNSPECIFIED", "|b": "DIFFERS TEMPLATE", "base|b": "DIFFERS TEMPLATE", "lora|b": "DIFFERS TEMPLATE"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t)
				f.answers = tt.workers
				var uids []string
				for uid := range tt.workers {
					uids = append(uids, uid)
				}
				v := f.see(uids...)
				var proven []string
				for _, uid := range []string{"a", "b", "c", "stranger"} {
					if f.Proven(profileOf(v, "base"), uid) {
						proven = append(proven, uid)
					}
				}
				if diff := cmp.Diff(tt.proven, proven); diff != "" {
					t.Errorf("proven: %s", diff)
				}
				if diff := cmp.Diff(tt.verdicts, f.verdicts()); diff != "" {
					t.Errorf("verdicts: %s", diff)
				}
				for _, id := range []string{"base", "lora"} {
					if got := f.state(id); got != tt.distrusted {
						t.Errorf("%s is distrusted for %q, want %q", id, got, tt.distrusted)
					}
					if got := f.Distrusts(profileOf(v, id)); got != (tt.distrusted != "none") {
						t.Errorf("%s distrusted: %v", id, got)
					}
				}
				if len(f.States()) != 2 {
					t.Errorf("profiles without a tokenizer are checked: %v", f.States())
				}
			})
		})
	}
}

// A verdict is logged once, stays while the engine cannot be asked, and is over
// when the engine agrees; what is asked again is asked at its time.
func TestHealing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", otherChat)
		v := f.see("a@1")
		base := profileOf(v, "base")
		for range 5 { // the catalog changes for other reasons
			f.see("a@1")
		}
		if n := f.logged("asking them instead"); n != 1 || f.logged("cause=template") != 1 {
			t.Errorf("logged %d times", n)
		}
		asked := f.questions("a")
		f.set("a", away)
		time.Sleep(12 * time.Minute)
		synctest.Wait()
		if f.questions("a") == asked || !f.Distrusts(base) {
			t.Errorf("%d questions more, distrusted %v", f.questions("a")-asked, f.Distrusts(base))
		}
		f.set("a", good)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if f.Distrusts(base) || !f.Proven(base, "a") || f.logged("again") != 1 {
			t.Error("the profile does not heal")
		}
		asked = f.questions("a")
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		if f.questions("a") != asked {
			t.Error("asked again too soon")
		}
	})
}

// Another engine process is another engine: it is asked before it gets ids. The
// first word on a process names the one that was asked.
func TestEngineRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", good)
		base := profileOf(f.see("a"), "base")
		asked := f.questions("a")
		f.see("a@1")
		f.see("a")
		f.see("a@1")
		if f.questions("a") != asked || !f.Proven(base, "a") {
			t.Error("the first word on the process counts as a restart")
		}
		f.set("a", away)
		f.see("a@2")
		if f.Proven(base, "a") {
			t.Error("a new process gets ids without having been asked")
		}
		f.set("a", otherChat)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if !f.Distrusts(base) {
			t.Error("the new process was not asked")
		}
		f.see()
		if f.Distrusts(base) || len(f.verdicts()) != 0 {
			t.Errorf("a worker that left still counts: %v", f.verdicts())
		}
	})
}

// Workers that hang do not hold up others for long.
func TestHangingWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		var all []string
		for i := range 30 {
			name := fmt.Sprint("h", i)
			all, f.hang[name] = append(all, name), true
		}
		f.see(all...)
		time.Sleep(5 * time.Minute)
		f.set("new", good)
		v := f.see(append(all, "new")...)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if !f.Proven(profileOf(v, "base"), "new") {
			t.Error("a new worker waits for those that hang")
		}
	})
}

// Served requests tell what probes cannot: a few that are counted otherwise are
// enough, odd ones are not, and it is over when all agree for a while.
func TestCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", good)
		f.set("b", otherChat)
		f.set("c", good)
		v := f.see("a", "b", "c")
		base, lora := profileOf(v, "base"), profileOf(v, "lora")
		serve := func(worker string, n, off int) {
			for range n {
				f.Served("base", worker, 100, 100+off)
			}
		}
		serve("a", 10, 0)
		for range 5 { // 2 of any 20
			serve("a", 2, 1)
			serve("a", 18, 0)
		}
		serve("b", 50, 1) // whose probe says that it differs
		if f.Distrusts(base) {
			t.Fatal("odd counts are taken for a wrong tokenizer")
		}
		serve("c", 1, -1)
		serve("a", 2, 1)
		if !f.Distrusts(base) || f.Distrusts(lora) || f.state("base") != "count" || f.Proven(base, "a") || !f.Proven(lora, "a") {
			t.Errorf("base: %s, lora: %s", f.state("base"), f.state("lora"))
		}
		f.settle()
		if diff := cmp.Diff(map[string]string{"|a": "AGREES UNSPECIFIED", "|b": "DIFFERS TEMPLATE", "|c": "AGREES UNSPECIFIED", "base|": "DIFFERS COUNT"}, f.verdicts()); diff != "" {
			t.Error(diff)
		}
		if f.logged("engines count other numbers") != 1 || f.logged("cause=count") != 1 {
			t.Error("not logged once")
		}
		serve("a", 40, 0)
		if !f.Distrusts(base) {
			t.Error("believed again at once")
		}
		time.Sleep(10 * time.Minute)
		serve("a", 1, 1)
		serve("a", 19, 0)
		if !f.Distrusts(base) {
			t.Error("believed again although one of the last 20 differs")
		}
		serve("a", 1, 0)
		if f.Distrusts(base) || f.logged("the same numbers") != 1 {
			t.Error("not believed again")
		}
		f.Served("stranger", "a", 1, 2)
	})
}

// While counts differ because the template does, they are no second reason.
func TestProbeExplainsCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", away)
		v := f.see("a")
		for range 5 { // served before the first probe has an answer
			f.Served("base", "a", 100, 101)
		}
		f.set("a", otherChat)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if f.state("base") != "template" {
			t.Errorf("cause %s", f.state("base"))
		}
		f.set("a", good)
		f.see("a@1")
		f.see("a@2")
		if f.Distrusts(profileOf(v, "base")) {
			t.Errorf("distrusted for %s after the engine was mended", f.state("base"))
		}
	})
}

// Until it has asked a worker itself an ingress goes by the others' word.
func TestOtherIngresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", away)
		v := f.see("a")
		base := *profileOf(v, "base")
		base.Parity = differs
		if !f.Distrusts(&base) {
			t.Error("the others' word does not count")
		}
		f.set("a", good)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if f.Distrusts(&base) {
			t.Error("the others' word counts more than its own probe")
		}
		none := *profileOf(v, "none")
		if none.Parity = agrees; f.Distrusts(&none) {
			t.Error("a profile without tokenizer is distrusted")
		}
	})
}

// The router hears of it again and again, and after a failure soon.
func TestReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("a", good)
		f.see("a")
		n := f.sent()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if more := f.sent() - n; more < 9 || more > 12 {
			t.Errorf("%d reports in five minutes", more)
		}
	})
}

// Nothing grows with what was there once, and reports are bounded.
func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.set("", good)
		c := &routerv1.Catalog{}
		for i := range 3000 {
			set := fmt.Sprint("ns/", i)
			for j := range 8 {
				c.Profiles = append(c.Profiles, &routerv1.Profile{Id: fmt.Sprintf("p%d-%d", i, j), WorkerSet: set, TokenizerPath: "/m"})
			}
			c.Workers = append(c.Workers, &routerv1.Worker{Uid: fmt.Sprint(i), WorkerSet: set, Url: "all"})
		}
		f.set("all", otherIDs)
		f.Watch(catalog.New(c))
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := len(f.verdicts()); n != 20_000 || f.questions("all") != 3000 {
			t.Errorf("%d verdicts reported after %d questions", n, f.questions("all"))
		}
		for i := range 100_000 {
			f.Served(fmt.Sprint("unknown", i), "x", 1, 2)
		}
		f.see("a")
		if len(f.States()) != 2 || len(f.verdicts()) != 0 {
			t.Errorf("%d profiles are left, %d verdicts", len(f.States()), len(f.verdicts()))
		}
	})
}
