package ingress_test

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/rpc"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress"
)

// classifier finds what a test says in each prompt, over real Connect.
type classifier struct {
	classifierv1connect.UnimplementedClassifierServiceHandler

	mu    sync.Mutex
	asked []*classifierv1.ClassifyRequest
	tags  []*classifierv1.Tag
	meet  func() // called in each call
}

func (c *classifier) Classify(_ context.Context, r *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
	c.mu.Lock()
	c.asked = append(c.asked, r)
	meet := c.meet
	c.mu.Unlock()
	if meet != nil {
		meet()
	}
	n := 0
	for _, p := range r.GetParts() {
		n += len(p.GetText())
	}
	return &classifierv1.ClassifyResponse{Bytes: uint64(n), Tags: c.tags, Coverage: []*classifierv1.Coverage{{Detector: "pii", Bytes: uint64(n), Of: uint64(n), Complete: true}}}, nil
}

func newClassifier(t testing.TB, tags ...*classifierv1.Tag) (c *classifier, url string) {
	t.Helper()
	c = &classifier{tags: tags}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = rpc.Serve(ctx, l, rpc.Mount[classifierv1connect.ClassifierServiceHandler](ctx, c, classifierv1connect.NewClassifierServiceHandler))
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return c, "http://" + l.Addr().String()
}

func tags() []*classifierv1.Tag {
	return []*classifierv1.Tag{
		{Name: "pii-detected", State: classifierv1.State_STATE_TRUE}, {Name: "injection", State: classifierv1.State_STATE_FALSE},
		{Name: "complexity-low", State: classifierv1.State_STATE_UNKNOWN, Unknown: []string{"unsure"}},
	}
}

// Only prompts for models whose policies read tags are classified; the router is
// told what is there, what is not, and what is not known.
func TestClassified(t *testing.T) {
	c, url := newClassifier(t, tags()...)
	e := start(t, func(s *ingress.Config, cat *routerv1.Catalog) {
		s.ClassifierURL, s.ClassifyTimeout = url, patience
		cat.Models[1].ReadsTags, cat.Models[1].ReadTags, cat.Models[1].TagsNamespace = true, []string{"pii-detected", "injection", "falcon"}, "ns"
	}).ready()
	w := newWorker(t, "w", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"choices":[]}`)) })
	e.router.routes(w)
	if resp, body := e.post(chatPath, strings.Replace(chatRequest(false, ""), `"chat"`, `"base-model"`, 1)); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if len(c.asked) != 0 || len(e.router.routed()[0].GetAttributes().GetUnknownTags()) != 0 {
		t.Errorf("classified although nobody reads tags: %v", e.router.routed()[0].GetAttributes())
	}
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if len(c.asked) != 1 || c.asked[0].GetOptions().GetNamespace() != "ns" || !c.asked[0].GetOptions().GetOmitReasons() || string(c.asked[0].GetParts()[0].GetText()) != "Hello there" {
		t.Errorf("asked %v", c.asked)
	}
	a := e.router.routed()[1].GetAttributes()
	if diff := cmp.Diff([]string{"pii-detected"}, a.GetTags()); diff != "" || !a.GetClassified() {
		t.Errorf("classified: %v; present: want -, got +:\n%s", a.GetClassified(), diff)
	}
	if diff := cmp.Diff([]string{"injection"}, a.GetAbsentTags()); diff != "" {
		t.Errorf("absent: want -, got +:\n%s", diff)
	}
	var unknown []string
	for _, u := range a.GetUnknownTags() {
		unknown = append(unknown, u.GetTag()+" "+strings.Join(u.GetCauses(), " "))
	}
	if diff := cmp.Diff([]string{"complexity-low unsure", "falcon not_looked_for"}, unknown); diff != "" {
		t.Errorf("unknown: want -, got +:\n%s", diff)
	}
	if m := e.metrics(); !strings.Contains(m, `kinference_ingress_classify_duration_seconds_count{`) || !strings.Contains(m, `outcome="whole"`) || !strings.Contains(m, "kinference_ingress_classify_breaker") {
		t.Error("metrics do not tell of it")
	}
}

// What only a provider of the client's own API would get of a request is classified,
// too: a worker's chat body does not have it.
func TestOwnBodyIsClassified(t *testing.T) {
	c, url := newClassifier(t, tags()...)
	e := start(t, func(s *ingress.Config, cat *routerv1.Catalog) {
		s.ClassifierURL, s.ClassifyTimeout = url, patience
		cat.Models[1].ReadsTags = true
	}).ready()
	e.router.routes(newWorker(t, "w", refuses(200, whole)))
	for _, more := range []string{
		`"system":[{"type":"text","text":"x-anthropic-billing-header: jane@example.com"}],"messages":[{"role":"user","content":"Hello"}]`,
		`"messages":[{"role":"user","content":[{"type":"document","title":"jane@example.com","source":{"type":"text","data":"Hello"}}]}]`,
		`"tools":[{"name":"f","input_schema":{},"input_examples":[{"to":"jane@example.com"}]}],"messages":[{"role":"user","content":"Hello"}]`,
	} {
		if resp, body := e.post(messagesPath, `{"model":"chat","max_tokens":9,`+more+`}`); resp.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		if text := c.asked[len(c.asked)-1].String(); !strings.Contains(text, "Hello") || !strings.Contains(text, "jane@example.com") {
			t.Errorf("%s: asked about %s", more, text)
		}
	}
}

// The classifier works while a worker is asked for token ids: each waits for the
// other to have begun.
func TestClassifiesBeside(t *testing.T) {
	c, url := newClassifier(t, tags()...)
	tokenising, classifying := make(chan struct{}), make(chan struct{})
	begun := func(mine chan struct{}, other <-chan struct{}, once *sync.Once) {
		once.Do(func() { close(mine) })
		select {
		case <-other:
		case <-time.After(patience):
			t.Error("one waits for the other")
		}
	}
	var first, second sync.Once
	c.meet = func() { begun(classifying, tokenising, &first) }
	w := newWorker(t, "w", func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/completions") {
			begun(tokenising, classifying, &second)
		}
		_, _ = w.Write([]byte(`{"choices":[]}`))
	})
	e := start(t, func(s *ingress.Config, cat *routerv1.Catalog) {
		s.ClassifierURL, s.ClassifyTimeout = url, patience
		cat.Models[1].ReadsTags = true
		cat.Workers = []*routerv1.Worker{{Uid: "w", WorkerSet: "ns/set", Url: w.url, Ranks: 1}}
	}).ready()
	e.router.routes(w)
	if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != http.StatusOK {
		t.Fatalf("%d %s", resp.StatusCode, body)
	}
	if len(c.asked) != 1 {
		t.Errorf("asked %d times", len(c.asked))
	}
}

// A request that ends before its tags are there leaves nothing behind.
func TestEndsBeforeItsTags(t *testing.T) {
	hold := make(chan struct{})
	c, url := newClassifier(t, tags()...)
	c.meet = func() { <-hold }
	t.Cleanup(func() { close(hold) })
	e := start(t, func(s *ingress.Config, cat *routerv1.Catalog) {
		s.ClassifierURL, s.ClassifyTimeout = url, time.Hour
		cat.Models[1].ReadsTags = true
	}).ready()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if resp, err := e.begin(ctx, chatPath, chatRequest(false, "")); err == nil {
			resp.Body.Close()
		}
	}()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.After(patience); ; {
		c.mu.Lock()
		n := len(c.asked)
		c.mu.Unlock()
		if n > 0 {
			break
		}
		select {
		case <-deadline:
			t.Fatal("nobody asked")
		case <-tick.C:
		}
	}
	cancel()
	<-done
	for deadline := time.After(patience); !strings.Contains(e.metrics(), `outcome="canceled"`); {
		select {
		case <-deadline:
			t.Fatal("the call was not given up")
		case <-tick.C:
		}
	}
	if len(e.router.routed()) != 0 {
		t.Error("it was routed")
	}
}

// Limits that look at tags wait for them, also where no rule reads tags.
func TestLimitsReadTags(t *testing.T) {
	c, url := newClassifier(t, tags()...)
	e := startLimited(t, func(s *ingress.Config, cat *routerv1.Catalog) {
		s.ClassifierURL, s.ClassifyTimeout = url, patience
		cat.LimitPolicies = []*routerv1.LimitPolicy{{
			Name: "ns/p", Pools: []string{"ns/pool"}, Limits: []*routerv1.Limit{perMinute("pii", requestCount(1)), perMinute("simple", requestCount(0))},
			SpecJson: `{"limits":[{"name":"pii","matches":[{"tag":"pii-detected"}]},{"name":"simple","matches":[{"tag":"complexity-low"}]}]}`,
		}}
	})
	w := newWorker(t, "w", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(usageText(3, 0, 1))) })
	e.router.routes(w)
	for i, want := range []int{http.StatusOK, http.StatusTooManyRequests} {
		if resp, body := e.post(chatPath, chatRequest(false, "")); resp.StatusCode != want || strings.Contains(body, "pii-detected") {
			t.Errorf("request %d: %d %s", i, resp.StatusCode, body)
		}
	}
	if len(c.asked) != 2 {
		t.Errorf("asked %d times", len(c.asked))
	}
}
