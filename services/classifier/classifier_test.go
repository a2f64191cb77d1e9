package classifier_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
	"github.com/kinference/kinference/services/classifier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a service under test.
type running struct {
	classifierv1connect.ClassifierServiceClient
	url   string
	shell *daemon.Shell
	log   *bytes.Buffer
}

func start(t *testing.T, c classifier.Config) *running {
	t.Helper()
	r := &running{log: &bytes.Buffer{}}
	sh, err := daemon.NewShell(t.Context(), daemon.Settings{Output: r.log, DrainTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	c.Listener = testenv.Listen(t)
	ctx, stop := context.WithCancel(sh.Context(context.Background(), "classifier"))
	done := make(chan error, 1)
	go func() { done <- (&classifier.Service{Config: c}).Run(ctx) }()
	r.url, r.shell = "http://"+c.Listener.Addr().String(), sh
	clientCtx, hangUp := context.WithCancel(context.Background())
	r.ClassifierServiceClient = rpc.Client(clientCtx, r.url, classifierv1connect.NewClassifierServiceClient)
	t.Cleanup(func() {
		hangUp()
		stop()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		sh.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return r
}

func user(text string) *classifierv1.ClassifyRequest {
	return &classifierv1.ClassifyRequest{Parts: []*classifierv1.Part{{Role: classifierv1.Role_ROLE_USER, Text: []byte(text)}}}
}

func state(r *classifierv1.ClassifyResponse, tag string) classifierv1.State {
	for _, t := range r.GetTags() {
		if t.Name == tag {
			return t.State
		}
	}
	return classifierv1.State_STATE_UNSPECIFIED
}

func TestClassify(t *testing.T) {
	s := start(t, classifier.Config{Timeout: 10 * time.Second})
	res, err := s.Classify(t.Context(), user("Mail me at jo.doe@mailbox.test.org please"))
	if err != nil {
		t.Fatal(err)
	}
	if got := state(res, "pii-email"); got != classifierv1.State_STATE_TRUE {
		t.Errorf("pii-email: got %v, want true", got)
	}
	if got := state(res, "pii-card"); got != classifierv1.State_STATE_FALSE {
		t.Errorf("pii-card: got %v, want false", got)
	}
	if res.Versions.GetWeights() == "" {
		t.Error("no hash of the weights")
	}
	img := user("what is this?")
	img.Parts = append(img.Parts, &classifierv1.Part{Role: classifierv1.Role_ROLE_USER, Media: classifierv1.Media_MEDIA_IMAGE})
	batch, err := s.ClassifyBatch(t.Context(), &classifierv1.ClassifyBatchRequest{Requests: []*classifierv1.ClassifyRequest{user("hello there"), img}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []classifierv1.State{classifierv1.State_STATE_FALSE, classifierv1.State_STATE_UNKNOWN} {
		if got := state(batch.Responses[i], "pii-detected"); got != want {
			t.Errorf("batch %d: pii-detected: got %v, want %v", i, got, want)
		}
	}
	_, err = s.Classify(t.Context(), &classifierv1.ClassifyRequest{Options: &classifierv1.Options{Profile: "lax"}})
	if connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("unknown profile: got %v, want invalid_argument", err)
	}
}

func TestStreamTellsEarly(t *testing.T) {
	s := start(t, classifier.Config{Timeout: 10 * time.Second})
	st, err := s.ClassifyStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	piece := func(text string, continues bool) {
		t.Helper()
		if err := st.Send(&classifierv1.ClassifyStreamRequest{Part: &classifierv1.Part{Role: classifierv1.Role_ROLE_USER, Text: []byte(text)}, Continues: continues}); err != nil {
			t.Fatal(err)
		}
	}
	piece("My card is 4111 1111 1111 1111. "+strings.Repeat("And so the story goes on and on. ", 9000), false)
	first, err := st.Receive()
	if err != nil {
		t.Fatal(err)
	}
	if first.Final || state(first.Response, "pii-detected") != classifierv1.State_STATE_TRUE {
		t.Errorf("first answer: got %v, want pii-detected before the end", first)
	}
	piece("The rest. ", true)
	if err := st.CloseRequest(); err != nil {
		t.Fatal(err)
	}
	last, err := st.Receive()
	if err != nil {
		t.Fatal(err)
	}
	if !last.Final || state(last.Response, "pii-card") != classifierv1.State_STATE_TRUE {
		t.Errorf("last answer: got final %v, pii-card %v", last.Final, state(last.Response, "pii-card"))
	}
	if _, err := st.Receive(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: got %v, want EOF", err)
	}
	if err := st.CloseResponse(); err != nil {
		t.Error(err)
	}
}

func TestOverloadIsRefused(t *testing.T) {
	s := start(t, classifier.Config{Concurrency: 1, Timeout: 30 * time.Second, CacheBytes: -1})
	long := user(strings.Repeat("The quick brown fox jumps over the lazy dog. ", 200_000))
	results := make(chan error, 8)
	for range cap(results) {
		go func() {
			_, err := s.Classify(t.Context(), long)
			results <- err
		}()
	}
	refused := 0
	for range cap(results) {
		err := <-results
		if connect.CodeOf(err) == connect.CodeResourceExhausted {
			refused++
			if d, ok := rpc.RetryAfter(err); !ok || d <= 0 {
				t.Errorf("refusal without a delay: %v", err)
			}
		} else if err != nil {
			t.Errorf("call: %v", err)
		}
	}
	if refused == 0 || refused == cap(results) {
		t.Errorf("refused %d of %d calls on one slot, want some", refused, cap(results))
	}
}

// A call that runs out of time answers, and calls unknown what it has not read.
func TestDeadlineIsUnknown(t *testing.T) {
	s := start(t, classifier.Config{Timeout: time.Nanosecond})
	res, err := s.Classify(t.Context(), user("hello"))
	if err != nil {
		t.Fatal(err)
	}
	if got := state(res, "pii-detected"); got != classifierv1.State_STATE_UNKNOWN {
		t.Errorf("pii-detected: got %v, want unknown", got)
	}
}

// Nothing that the service says holds text of a prompt.
func TestPrivacy(t *testing.T) {
	s := start(t, classifier.Config{Timeout: 10 * time.Second})
	planted := []string{"zaphod.prefect@galaxy-mail.org", "4111 1111 1111 1111", "Slartibartfast Dentarthurdent", "GB82 WEST 1234 5698 7654 32", "+44 20 7946 0958", "hunter2Secret99", "42 Magrathea Street"}
	var all bytes.Buffer
	for _, p := range planted {
		res, err := s.Classify(t.Context(), user("My password: "+p+" and my name is "+p))
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(res.String())
		_, err = s.Classify(t.Context(), &classifierv1.ClassifyRequest{Options: &classifierv1.Options{Profile: p}})
		if err == nil {
			t.Error("a profile of planted text is none")
		} else {
			all.WriteString(err.Error())
		}
		// Bodies that are no message.
		for _, body := range []string{p, `{"parts": "` + p + `"}`, `{"parts": [{"role": "` + p + `"}]}`} {
			resp, err := http.Post(s.url+classifierv1connect.ClassifierServiceClassifyProcedure, "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := all.ReadFrom(resp.Body); err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	rec := &recorder{header: http.Header{}}
	s.shell.Admin().ServeHTTP(rec, req)
	if !strings.Contains(rec.body.String(), "kinference_classifier_prompts") {
		t.Error("metrics lack kinference_classifier_prompts")
	}
	all.Write(rec.body.Bytes())
	all.Write(s.log.Bytes())
	for _, p := range planted {
		if strings.Contains(all.String(), p) {
			t.Errorf("planted text shows up: %q", p)
		}
	}
}

type recorder struct {
	header http.Header
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header         { return r.header }
func (r *recorder) WriteHeader(int)             {}
func (r *recorder) Write(b []byte) (int, error) { return r.body.Write(b) }

const policy = `apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePolicy
metadata: { name: projects, namespace: team }
spec:
  customTags:
    - { name: falcon, any: [ { keywords: [ WORD ], wholeWord: true } ] }
    - { name: word-in-text, any: [ { when: 'part.role == "user" && part.text.contains("WORD") && !tags.code.found' } ] }
`

func TestCustomTagsAreReloaded(t *testing.T) {
	dir := t.TempDir()
	write := func(word string) {
		if err := os.WriteFile(filepath.Join(dir, "p.yaml"), []byte(strings.ReplaceAll(policy, "WORD", word)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("peregrine")
	s := start(t, classifier.Config{ConfigDir: dir, Timeout: 10 * time.Second})
	until := func(tag, text string, want classifierv1.State) {
		t.Helper()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		give := time.After(time.Minute)
		for {
			req := user(text)
			req.Options = &classifierv1.Options{Namespace: "team"}
			res, err := s.Classify(t.Context(), req)
			if err == nil && state(res, tag) == want {
				return
			}
			select {
			case <-tick.C:
			case <-give:
				t.Fatalf("%s in %q: got %v (%v), want %v", tag, text, state(res, tag), err, want)
			}
		}
	}
	until("falcon", "about the Peregrine project", classifierv1.State_STATE_TRUE)
	until("falcon", "about peregrines", classifierv1.State_STATE_FALSE)
	until("word-in-text", "about peregrines", classifierv1.State_STATE_TRUE)
	until("word-in-text", "about ospreys", classifierv1.State_STATE_FALSE)
	until("word-in-text", "about peregrines"+strings.Repeat(" and more", 1000), classifierv1.State_STATE_UNKNOWN) // too long a text to tell
	write("osprey")
	until("falcon", "about the osprey project", classifierv1.State_STATE_TRUE)
	until("falcon", "about the Peregrine project", classifierv1.State_STATE_FALSE)
	until("word-in-text", "about ospreys", classifierv1.State_STATE_TRUE)
}

func TestBadSettings(t *testing.T) {
	for name, c := range map[string]classifier.Config{"profile": {Profile: "lax"}, "negative": {MaxBytes: -1}, "two sources": {ConfigDir: "a", RouterURL: "http://b"}, "calibration": {CalibrationFile: "missing.json"}} {
		if err := (&classifier.Service{Config: c}).Run(t.Context()); err == nil {
			t.Errorf("%s: Run took it", name)
		}
	}
}
