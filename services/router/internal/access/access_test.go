package access

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/kube/review"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	get    = Permission{"decisions", "get"}
	create = Permission{"keys", "create"}
)

func hash(token string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(token))) }

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestSecret(t *testing.T) {
	s := Sources{Secret("right")}
	if c, err := s.Check(t.Context(), "right", create); err != nil || c.Name != "local" {
		t.Error(c, err)
	}
	for _, wrong := range []string{"", "wrong", "righ", strings.Repeat("x", maxToken+1)} {
		if c, err := s.Check(t.Context(), wrong, get); !errors.Is(err, ErrUnknown) || c != nil {
			t.Error(c, err)
		}
	}
	if _, err := (Sources{Secret("")}).Check(t.Context(), "", get); !errors.Is(err, ErrUnknown) {
		t.Error("no secret lets in who has none")
	}
}

func TestTokens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	write(t, path, "# people\n\nalice operate "+hash("a")+"\n  bob\tread  sha256:"+strings.ToUpper(hash("b"))+" # until May\n"+
		"carol admin "+hash("c")+"\ndave read\neve! read "+hash("e")+"\nplain read secret-token-in-clear\n")
	var log bytes.Buffer
	tokens, err := NewTokens(path, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	s := Sources{tokens}
	for _, c := range []struct {
		token string
		p     Permission
		who   string
		err   error
	}{
		{"a", get, "alice", nil}, {"a", create, "alice", nil}, {"b", get, "bob", nil}, {"b", create, "bob", ErrDenied},
		{"c", get, "", ErrUnknown}, {"e", get, "", ErrUnknown}, {hash("a"), get, "", ErrUnknown}, {"secret-token-in-clear", get, "", ErrUnknown},
	} {
		got, err := s.Check(t.Context(), c.token, c.p)
		if !errors.Is(err, c.err) || (got == nil) != (c.who == "") || got != nil && got.Name != c.who {
			t.Errorf("%s %v: %v %v", c.token, c.p, got, err)
		}
	}
	if text := log.String(); strings.Count(text, "wrong and skipped") != 4 || strings.Contains(text, "secret-token") || !strings.Contains(text, "line=5") {
		t.Errorf("log: %s", text)
	}
	if _, err := NewTokens(path+"x", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file that is not there is fine")
	}
}

// The file is followed: what is taken out of it holds no more, and without it nobody
// is let in.
func TestTokensChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "tokens")
		write(t, path, "alice read "+hash("a")+"\n")
		tokens, err := NewTokens(path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- tokens.Run(ctx) }()
		check := func(token string, want error) {
			t.Helper()
			time.Sleep(2 * reread) // of the bubble's clock
			synctest.Wait()
			if _, err := (Sources{tokens}).Check(ctx, token, get); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", token, err, want)
			}
		}
		check("a", nil)
		write(t, path, "bob read "+hash("b")+"\n")
		check("a", ErrUnknown)
		check("b", nil)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		check("b", ErrUnknown)
		write(t, path, "bob read "+hash("b")+"\n")
		check("b", nil)
		write(t, path, strings.Repeat("x", maxFile+1))
		check("b", ErrUnknown)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// api is a Kubernetes API with one user, who may read decisions.
type api struct {
	mu      sync.Mutex
	away    bool
	revoked bool
	denied  bool
	reviews int
	rights  int
}

func (a *api) Authenticate(_ context.Context, token string) (*review.User, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reviews++
	switch {
	case a.away:
		return nil, errors.New("away")
	case token != "good" || a.revoked:
		return nil, nil
	}
	return &review.User{Name: "system:serviceaccount:ops:kinfctl", Groups: []string{"g"}}, nil
}

func (a *api) Allowed(_ context.Context, u *review.User, resource, verb string) (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rights++
	if a.away {
		return false, errors.New("away")
	}
	return !a.denied && u.Groups[0] == "g" && resource == "decisions" && verb == "get", nil
}

func (a *api) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

func TestKubernetes(t *testing.T) {
	a := &api{}
	k := NewKubernetes(a)
	now := time.Unix(1000, 0)
	k.clock = func() time.Time { return now }
	s := Sources{Secret("local"), k}
	check := func(token string, p Permission, want error) {
		t.Helper()
		if _, err := s.Check(t.Context(), token, p); !errors.Is(err, want) {
			t.Errorf("%s %v: %v, want %v", token, p, err, want)
		}
	}
	check("good", get, nil)
	check("good", create, ErrDenied)
	check("bad", get, ErrUnknown)
	check("local", create, nil)
	for range 10 { // answers are remembered
		check("good", get, nil)
		check("good", create, ErrDenied)
		check("bad", get, ErrUnknown)
	}
	if a.reviews != 2 || a.rights != 2 {
		t.Errorf("%d reviews, %d rights", a.reviews, a.rights)
	}
	// While the API is away what is remembered holds, for a while; then nobody is let in.
	a.set(func() { a.away = true })
	check("good", get, nil)
	check("new", get, ErrAway)
	now = now.Add(remembered + time.Second)
	check("good", get, ErrAway)
	check("local", get, nil)
	// What was taken away holds no more after that time.
	a.set(func() { a.away, a.denied = false, true })
	check("good", get, ErrDenied)
	a.set(func() { a.denied = false })
	now = now.Add(refused + time.Second)
	check("good", get, nil)
	a.set(func() { a.revoked = true })
	now = now.Add(remembered + time.Second)
	check("good", get, ErrUnknown)
}

func TestMemoryIsBounded(t *testing.T) {
	a := &api{}
	k := NewKubernetes(a)
	if c, err := k.Lookup(t.Context(), "good"); c == nil {
		t.Fatal(err)
	}
	for i := range 3 * maxRemembered {
		if _, err := k.Lookup(t.Context(), fmt.Sprint("bad", i)); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(k.unknown.all); n > maxRemembered {
		t.Errorf("%d tokens are remembered", n)
	}
	before := a.reviews
	if c, err := k.Lookup(t.Context(), "good"); c == nil || a.reviews != before {
		t.Errorf("wrong tokens crowd out a good one: %v", err)
	}
}

// slow answers when it is told to.
type slow struct{ begun, end chan struct{} }

func (s slow) Authenticate(ctx context.Context, _ string) (*review.User, error) {
	s.begun <- struct{}{}
	select {
	case <-s.end:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return nil, nil
}

func (slow) Allowed(context.Context, *review.User, string, string) (bool, error) { return true, nil }

// A flood of wrong tokens is no flood of the API, and nobody waits for ever.
func TestReviewsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := slow{make(chan struct{}, 100), make(chan struct{})}
		k := NewKubernetes(s)
		errs := make(chan error, 100)
		for i := range 50 {
			go func() {
				_, err := k.Lookup(t.Context(), fmt.Sprint(i))
				errs <- err
			}()
		}
		synctest.Wait()
		if n := len(s.begun); n != maxReviews {
			t.Errorf("%d reviews at a time", n)
		}
		for range 50 { // in the bubble time passes by itself
			if err := <-errs; !errors.Is(err, ErrAway) {
				t.Error(err)
			}
		}
	})
}
