package tag_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kinference/kinference/internal/policy"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/tag"
)

type client func(context.Context, *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error)

func (c client) Classify(ctx context.Context, r *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
	return c(ctx, r)
}

const (
	yes     = classifierv1.State_STATE_TRUE
	no      = classifierv1.State_STATE_FALSE
	unknown = classifierv1.State_STATE_UNKNOWN
)

func given(name string, s classifierv1.State, causes ...string) *classifierv1.Tag {
	return &classifierv1.Tag{Name: name, State: s, Unknown: causes}
}

var full = []*classifierv1.Coverage{{Detector: "pii", Bytes: 4, Of: 4, Complete: true}}

// short is a prompt of four bytes.
var short = tag.Prompt{Parts: []*classifierv1.Part{{Text: []byte("text")}}, Bytes: 4, Whole: true}

func ask(resp *classifierv1.ClassifyResponse, err error, p tag.Prompt, read ...string) tag.Result {
	a := tag.New(tag.Settings{Timeout: time.Second, Concurrency: 1, Client: client(func(context.Context, *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
		return resp, err
	})})
	return a.Ask(context.Background(), &p, "ns", read)
}

func TestResolve(t *testing.T) {
	why := func(tag string, causes ...string) *routerv1.UnknownTag {
		return &routerv1.UnknownTag{Tag: tag, Causes: causes}
	}
	half := []*classifierv1.Coverage{{Detector: "pii", Bytes: 2, Of: 4, Causes: []string{"oversize"}}, full[0]}
	cut := short
	cut.Whole = false
	for _, c := range []struct {
		name     string
		prompt   tag.Prompt
		tags     []*classifierv1.Tag
		coverage []*classifierv1.Coverage
		read     []string
		want     tag.Result
	}{
		{"whole", short, []*classifierv1.Tag{given("pii-email", yes), given("pii-card", no), given("injection", no), given("own", yes), given("other", yes)}, full,
			[]string{"pii-*", "pii-card", "injection", "own"}, tag.Result{Present: []string{"pii-email", "own"}, Complete: true, Absent: []string{"pii-card", "injection"}, Outcome: "whole"}},
		{"unsure of some", short, []*classifierv1.Tag{given("language-de", unknown, "unsure"), given("language-en", unknown, "unsure"), given("complexity-low", unknown, "unsure"), given("complexity-high", no)}, full,
			[]string{"complexity-*"}, tag.Result{Complete: true, Unknown: []*routerv1.UnknownTag{why("complexity-low", "unsure"), why("language-*", "unsure")}, Outcome: "whole"}},
		{"half read by one", short, []*classifierv1.Tag{given("pii-email", unknown, "oversize"), given("pii-card", unknown, "oversize"), given("injection", no)}, half,
			[]string{"pii-card", "injection"}, tag.Result{Absent: []string{"injection"}, Unknown: []*routerv1.UnknownTag{why("pii-*", "oversize")}, Outcome: "partial"}},
		{"not all was sent", cut, []*classifierv1.Tag{given("pii-email", yes), given("pii-card", no)}, full,
			[]string{"pii-card"}, tag.Result{Present: []string{"pii-email"}, Unknown: []*routerv1.UnknownTag{why("pii-card", "oversize")}, Outcome: "partial"}},
		{"not looked for", short, []*classifierv1.Tag{given("pii-email", no)}, full,
			[]string{"pii-*", "pii-falcon", "osprey"}, tag.Result{Complete: true, Unknown: []*routerv1.UnknownTag{why("pii-falcon", "not_looked_for"), why("osprey", "not_looked_for")}, Outcome: "whole"}},
		{"text in place of names and codes", short, []*classifierv1.Tag{given("pii-4111111111111111", yes), given("pii-email", unknown, "my mail is x")}, full,
			nil, tag.Result{Complete: true, Unknown: []*routerv1.UnknownTag{why("pii-email", "other")}, Outcome: "whole"}},
		{"contradicting", short, []*classifierv1.Tag{given("pii-email", no), given("pii-email", unknown, "panic"), given("code", no, "panic"), given("injection", 7)}, full,
			[]string{"pii-email", "code", "injection"}, tag.Result{Complete: true, Unknown: []*routerv1.UnknownTag{why("code", "panic"), why("injection", "other"), why("pii-email", "panic")}, Outcome: "whole"}},
	} {
		got := ask(&classifierv1.ClassifyResponse{Bytes: 4, Tags: c.tags, Coverage: c.coverage}, nil, c.prompt, c.read...)
		less := cmpopts.SortSlices(func(a, b *routerv1.UnknownTag) bool { return a.GetTag() < b.GetTag() })
		if diff := cmp.Diff(c.want, got, cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(routerv1.UnknownTag{}), less); diff != "" {
			t.Errorf("%s: want -, got +:\n%s", c.name, diff)
		}
	}
}

// What is no answer makes all tags unknown, and PII is then assumed.
func TestNoAnswer(t *testing.T) {
	ok := []*classifierv1.Tag{given("pii-detected", no)}
	for _, c := range []struct {
		name, cause string
		resp        *classifierv1.ClassifyResponse
		err         error
	}{
		{"empty", "garbled", &classifierv1.ClassifyResponse{}, nil},
		{"nothing", "garbled", nil, nil},
		{"other length", "garbled", &classifierv1.ClassifyResponse{Bytes: 5, Tags: ok, Coverage: full}, nil},
		{"no coverage", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Tags: ok}, nil},
		{"coverage of another", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Tags: ok, Coverage: []*classifierv1.Coverage{{Bytes: 9, Of: 9, Complete: true}}}, nil},
		{"complete without having read", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Tags: ok, Coverage: []*classifierv1.Coverage{{Bytes: 1, Of: 4, Complete: true}}}, nil},
		{"no tags", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Coverage: full}, nil},
		{"too many tags", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Coverage: full, Tags: make([]*classifierv1.Tag, 1000)}, nil},
		{"name without end", "garbled", &classifierv1.ClassifyResponse{Bytes: 4, Coverage: full, Tags: append(ok, given("pii-"+strings.Repeat("x", 61), yes))}, nil},
		{"away", "unavailable", nil, connect.NewError(connect.CodeUnavailable, errors.New("x"))},
		{"failing", "garbled", nil, connect.NewError(connect.CodeInternal, errors.New("x"))},
		{"late", "timeout", nil, connect.NewError(connect.CodeDeadlineExceeded, errors.New("x"))},
	} {
		got := ask(c.resp, c.err, short, "pii-detected")
		if got.Outcome != c.cause || got.Complete || len(got.Absent) != 0 || len(got.Unknown) != 1 || got.Unknown[0].Tag != "*" {
			t.Errorf("%s: got %+v, want %s", c.name, got, c.cause)
		}
		b := policy.Bar{All: []string{"pii-detected"}, Assumed: []string{"pii-detected"}}
		if !b.Holds(policy.Tags{Present: got.Present, Complete: got.Complete, Absent: got.Absent}) {
			t.Errorf("%s: PII is not assumed", c.name)
		}
	}
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stalled := client(func(ctx context.Context, _ *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		a := tag.New(tag.Settings{Client: stalled, Timeout: 50 * time.Millisecond, Concurrency: 2})
		long := tag.Prompt{Bytes: 400 << 10, Whole: true}
		for _, c := range []struct {
			p    tag.Prompt
			want time.Duration
		}{{short, 50 * time.Millisecond}, {long, 130 * time.Millisecond}} {
			start := time.Now()
			if r := a.Ask(t.Context(), &c.p, "", nil); r.Outcome != "timeout" || time.Since(start) != c.want {
				t.Errorf("%s after %v, want after %v", r.Outcome, time.Since(start), c.want)
			}
		}
		// More callers than may ask: those without a turn give up in time, too.
		var wg sync.WaitGroup
		outcomes := make(chan string, 3)
		for _, p := range []*tag.Prompt{&long, &long, &short} {
			wg.Go(func() { outcomes <- a.Ask(t.Context(), p, "", nil).Outcome })
			synctest.Wait()
		}
		wg.Wait()
		close(outcomes)
		var all []string
		for o := range outcomes {
			all = append(all, o)
		}
		if s := strings.Join(all, " "); strings.Count(s, "timeout") != 2 || strings.Count(s, "busy") != 1 {
			t.Errorf("got %s", s)
		}
	})
}

func TestOverloaded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := time.Now().Add(20 * time.Millisecond)
		a := tag.New(tag.Settings{Timeout: 50 * time.Millisecond, Concurrency: 8, Client: client(func(context.Context, *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
			if time.Now().Before(free) {
				return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("busy"))
			}
			return &classifierv1.ClassifyResponse{Bytes: 4, Tags: []*classifierv1.Tag{given("code", no)}, Coverage: full}, nil
		})})
		if r := a.Ask(t.Context(), &short, "", nil); r.Outcome != "whole" {
			t.Errorf("room in time: %s", r.Outcome)
		}
		free = time.Now().Add(time.Hour)
		for range 10 {
			start := time.Now()
			if r := a.Ask(t.Context(), &short, "", nil); r.Outcome != "overloaded" || time.Since(start) > 50*time.Millisecond {
				t.Errorf("no room: %s after %v", r.Outcome, time.Since(start))
			}
		}
		if a.State() != tag.Closed {
			t.Error("the breaker opened for one that answers")
		}
	})
}

func TestBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		up, calls := false, 0
		a := tag.New(tag.Settings{Timeout: 50 * time.Millisecond, Concurrency: 8, Client: client(func(context.Context, *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
			calls++
			if !up {
				return nil, connect.NewError(connect.CodeUnavailable, errors.New("away"))
			}
			return &classifierv1.ClassifyResponse{Bytes: 4, Tags: []*classifierv1.Tag{given("code", no)}, Coverage: full}, nil
		})})
		outcome := func() string { return a.Ask(t.Context(), &short, "", nil).Outcome }
		for range 5 {
			if o := outcome(); o != "unavailable" {
				t.Fatal(o)
			}
		}
		if o := outcome(); o != "breaker_open" || a.State() != tag.Open || calls != 5 {
			t.Errorf("%s, state %v, %d calls", o, a.State(), calls)
		}
		time.Sleep(time.Second) //nolint:forbidigo // of a bubble
		if o := outcome(); a.State() != tag.Open || o != "unavailable" || calls != 6 {
			t.Errorf("first try: %s, state %v, %d calls", o, a.State(), calls)
		}
		time.Sleep(time.Second) //nolint:forbidigo // of a bubble
		if o := outcome(); o != "breaker_open" {
			t.Errorf("it does not wait longer: %s", o)
		}
		up = true
		time.Sleep(time.Second) //nolint:forbidigo // of a bubble
		if a.State() != tag.HalfOpen {
			t.Errorf("state %v", a.State())
		}
		if o := outcome(); o != "whole" || a.State() != tag.Closed {
			t.Errorf("back: %s, state %v", o, a.State())
		}
	})
}

// A client that leaves says nothing of the classifier.
func TestClientLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := tag.New(tag.Settings{Timeout: 50 * time.Millisecond, Concurrency: 8, Client: client(func(ctx context.Context, _ *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})})
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			if r := a.Ask(ctx, &short, "", nil); r.Outcome != "canceled" {
				t.Errorf("got %s", r.Outcome)
			}
			cancel()
		}
		if a.State() != tag.Closed {
			t.Error("the breaker opened")
		}
	})
}
