package admin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/rpc"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/services/router/internal/access"
	"github.com/kinference/kinference/services/router/internal/decisions"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// router is a Router with one worker.
type router struct{}

func (router) Catalog() *adminv1.GetCatalogResponse {
	return &adminv1.GetCatalogResponse{Version: 7, Tenants: []*adminv1.Tenant{{Name: "n/t"}}}
}

func (router) InspectIndex(_ context.Context, r *adminv1.InspectIndexRequest) (*adminv1.InspectIndexResponse, error) {
	return &adminv1.InspectIndexResponse{Index: &kvtrackerv1.InspectResponse{Blocks: uint64(r.GetTop())}}, nil
}

func (router) Status() *adminv1.StatusResponse {
	return &adminv1.StatusResponse{
		CatalogVersion: 7, Workers: []*adminv1.WorkerStatus{{Worker: "a/0", WorkerSet: "n/a"}, {Worker: "b/0", WorkerSet: "n/b"}},
		Providers: []*adminv1.ProviderStatus{{Provider: "n/p"}},
	}
}

func (router) Evaluate(_ context.Context, r *adminv1.EvaluateRequest) (*adminv1.Decision, error) {
	if r.Model == "" {
		return nil, rpc.Error(connect.CodeNotFound, "the model does not exist", 0)
	}
	return &adminv1.Decision{Model: r.Model}, nil
}

// keys are Keys of which none can be revoked.
type keys struct{}

func (keys) ListKeys(*adminv1.ListKeysRequest) (*adminv1.ListKeysResponse, error) {
	return &adminv1.ListKeysResponse{}, nil
}

func (keys) CreateKey(context.Context, *adminv1.CreateKeyRequest) (*adminv1.CreateKeyResponse, error) {
	return &adminv1.CreateKeyResponse{Key: "kin-planted"}, nil
}

func (keys) RevokeKey(context.Context, *adminv1.RevokeKeyRequest) (*adminv1.RevokeKeyResponse, error) {
	return nil, ErrNoTenant
}

// api serves settings on loopback until the test ends.
func api(t *testing.T, s Settings) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, s) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr().String()
}

func client(t *testing.T, url, token string) adminv1connect.AdminServiceClient {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	return rpc.Client(ctx, url, adminv1connect.NewAdminServiceClient, rpc.Bearer(token))
}

// tokens is a file with one token for each role, named as the role.
func tokens(t *testing.T) *access.Tokens {
	t.Helper()
	file := filepath.Join(t.TempDir(), "tokens")
	var b strings.Builder
	for _, role := range []string{"read", "operate"} {
		fmt.Fprintf(&b, "%s-user %s %x\n", role, role, sha256.Sum256([]byte(role+"-token")))
	}
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := access.NewTokens(file, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// calls are all calls of the API, each with what it needs.
func calls(ctx context.Context) map[string]func(c adminv1connect.AdminServiceClient) error {
	return map[string]func(c adminv1connect.AdminServiceClient) error{
		"GetCatalog": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.GetCatalog(ctx, &adminv1.GetCatalogRequest{})
			return err
		},
		"Status": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.Status(ctx, &adminv1.StatusRequest{})
			return err
		},
		"ListWorkers": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.ListWorkers(ctx, &adminv1.ListWorkersRequest{})
			return err
		},
		"Explain": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.Explain(ctx, &adminv1.ExplainRequest{RequestId: "r"})
			return err
		},
		"Evaluate": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.Evaluate(ctx, &adminv1.EvaluateRequest{Model: "m"})
			return err
		},
		"InspectIndex": func(c adminv1connect.AdminServiceClient) error {
			answer, err := c.InspectIndex(ctx, &adminv1.InspectIndexRequest{Top: 3})
			if err == nil && answer.GetIndex().GetBlocks() != 3 {
				return errors.New("the answer is not kvtracker's")
			}
			return err
		},
		"ListKeys": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.ListKeys(ctx, &adminv1.ListKeysRequest{})
			return err
		},
		"CreateKey": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.CreateKey(ctx, &adminv1.CreateKeyRequest{})
			return err
		},
		"RevokeKey": func(c adminv1connect.AdminServiceClient) error {
			_, err := c.RevokeKey(ctx, &adminv1.RevokeKeyRequest{})
			return err
		},
		"WatchDecisions": func(c adminv1connect.AdminServiceClient) error {
			s, err := c.WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{Recent: 1, OnlyRecent: true})
			if err != nil {
				return err
			}
			defer s.Close()
			for s.Receive() {
			}
			return s.Err()
		},
	}
}

// Whoever adds a call must say what it needs.
func TestEveryCallNeedsSomething(t *testing.T) {
	methods := adminv1.File_kinference_admin_v1_admin_proto.Services().ByName("AdminService").Methods()
	for i := range methods.Len() {
		name := string(methods.Get(i).Name())
		need := needs["/kinference.admin.v1.AdminService/"+name]
		if need.Resource == "" || need.Verb == "" {
			t.Errorf("%s needs nothing", name)
		}
		if calls(t.Context())[name] == nil {
			t.Errorf("%s is not tested", name)
		}
	}
}

func TestRoles(t *testing.T) {
	log := decisions.New(4)
	log.Add(&decisions.Record{RequestID: "r"})
	var audit lines
	var mu sync.Mutex
	reasons := map[string]int{}
	refused := func(reason string) {
		mu.Lock()
		defer mu.Unlock()
		reasons[reason]++
	}
	url := api(t, Settings{Router: router{}, Decisions: log, Keys: keys{}, Access: access.Sources{tokens(t)}, Audit: NewAudit(&audit), Refused: refused})
	want := map[string]int{}
	for name, call := range calls(t.Context()) {
		need := needs["/kinference.admin.v1.AdminService/"+name]
		good := connect.Code(0)
		if name == "RevokeKey" {
			good = connect.CodeNotFound
		}
		if need.Role() == access.Operate {
			want[name+" read-user denied"]++
			want[name+" operate-user "+map[connect.Code]string{0: "ok", connect.CodeNotFound: "not_found"}[good]]++
		}
		for token, want := range map[string]connect.Code{
			"": connect.CodeUnauthenticated, "wrong": connect.CodeUnauthenticated, "read": connect.CodeUnauthenticated,
			"read-token": map[access.Role]connect.Code{access.Read: 0, access.Operate: connect.CodePermissionDenied}[need.Role()], "operate-token": good,
		} {
			err := call(client(t, url, token))
			if got := codeOf(err); got != want {
				t.Errorf("%s with %q: %v, want %v", name, token, err, want)
			}
		}
	}
	mu.Lock()
	if reasons["unauthenticated"] != 3*len(needs) || reasons["denied"] != len(want)/2 || len(reasons) != 2 {
		t.Errorf("refused: %v", reasons)
	}
	mu.Unlock()
	// Changes and refusals are audited, reading is not; nothing of what calls hold.
	got := map[string]int{}
	for raw := range strings.Lines(audit.String()) {
		var l struct{ Who, Procedure, Outcome string }
		if err := json.Unmarshal([]byte(raw), &l); err != nil {
			t.Fatal(err)
		}
		got[path.Base(l.Procedure)+" "+l.Who+" "+l.Outcome]++
	}
	if fmt.Sprint(got) != fmt.Sprint(want) || strings.Contains(audit.String(), "planted") || strings.Contains(audit.String(), "token") {
		t.Errorf("audit: %v, want %v\n%s", got, want, audit.String())
	}
}

// codeOf is 0 for none.
func codeOf(err error) connect.Code {
	if err == nil {
		return 0
	}
	return connect.CodeOf(err)
}

// Plain HTTP clients get the same, and learn nothing of other paths.
func TestHTTP(t *testing.T) {
	url := api(t, Settings{Router: router{}, Decisions: decisions.New(1), Access: access.Sources{tokens(t)}})
	post := func(path, token string) (int, string) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		if token != "" {
			r.Header.Set("Authorization", token)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(raw)
	}
	defer http.DefaultClient.CloseIdleConnections()
	const status = "/kinference.admin.v1.AdminService/Status"
	for _, c := range []struct {
		path, token string
		code        int
		body        string
	}{
		{status, "Bearer read-token", 200, `"catalogVersion":"7"`},
		{status, "bearer read-token", 200, `"catalogVersion":"7"`},
		{status, "Basic read-token", 401, `"unauthenticated"`},
		{status, "read-token", 401, `"unauthenticated"`},
		{status, "", 401, `"unauthenticated"`},
		{"/", "", 401, ""},
		{"/", "Bearer read-token", 403, ""},
		{"/grpc.health.v1.Health/Check", "", 401, ""},
		{"/kinference.admin.v1.AdminService/Nothing", "Bearer read-token", 403, ""},
		{"/kinference.admin.v1.AdminService/Nothing", "Bearer operate-token", 404, ""},
	} {
		if code, body := post(c.path, c.token); code != c.code || !strings.Contains(body, c.body) {
			t.Errorf("%s with %q: %d %s", c.path, c.token, code, body)
		}
	}
}

// Without a source nobody is let in, and the answer says why.
func TestNobody(t *testing.T) {
	url := api(t, Settings{Router: router{}, Decisions: decisions.New(1)})
	_, err := client(t, url, "anything").Status(t.Context(), &adminv1.StatusRequest{})
	if connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "no admin tokens") {
		t.Error(err)
	}
}

// A call that changes something is written down with how it ended, one that is
// refused too; neither with what it holds.
func TestAudit(t *testing.T) {
	var audit lines
	s := Settings{Access: access.Sources{tokens(t)}, Audit: NewAudit(&audit)}
	h := guard(s, map[string]access.Permission{"/x/Good": {Resource: "keys", Verb: "create"}, "/x/Bad": {Resource: "keys", Verb: "delete"}, "/x/Get": {Resource: "keys", Verb: "get"}},
		http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/x/Bad" {
				note(r.Context(), rpc.Error(connect.CodeNotFound, "no such key", 0))
			}
		}))
	for _, c := range [][2]string{{"/x/Good", "operate-token"}, {"/x/Bad", "operate-token"}, {"/x/Get", "operate-token"}, {"/x/Good", "read-token"}, {"/x/Good", "nobody"}, {"/x/Get", "read-token"}} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://h"+c[0], strings.NewReader("content"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+c[1])
		h.ServeHTTP(discard{http.Header{}}, r)
	}
	type line struct{ Who, Source, Procedure, Resource, Verb, Outcome string }
	var got []line
	for raw := range strings.Lines(audit.String()) {
		var l line
		if err := json.Unmarshal([]byte(raw), &l); err != nil {
			t.Fatal(err)
		}
		got = append(got, l)
	}
	want := []line{
		{"operate-user", "file", "/x/Good", "keys", "create", "ok"}, {"operate-user", "file", "/x/Bad", "keys", "delete", "not_found"},
		{"read-user", "file", "/x/Good", "keys", "create", "denied"},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	if strings.Contains(audit.String(), "token") || strings.Contains(audit.String(), "content") {
		t.Errorf("audit holds what it must not: %s", audit.String())
	}
}

type discard struct{ h http.Header }

func (d discard) Header() http.Header         { return d.h }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}

// lines is a buffer that may be written to while it is read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestListWorkers(t *testing.T) {
	url := api(t, Settings{Router: router{}, Decisions: decisions.New(1), Access: access.Sources{access.Secret("s")}})
	c := client(t, url, "s")
	all, err := c.ListWorkers(t.Context(), &adminv1.ListWorkersRequest{})
	if err != nil || len(all.Workers) != 2 || len(all.Providers) != 1 {
		t.Errorf("%v %v", all, err)
	}
	one, err := c.ListWorkers(t.Context(), &adminv1.ListWorkersRequest{WorkerSet: "n/b"})
	if err != nil || len(one.Workers) != 1 || one.Workers[0].Worker != "b/0" || len(one.Providers) != 0 {
		t.Errorf("%v %v", one, err)
	}
	if _, err := c.Explain(t.Context(), &adminv1.ExplainRequest{RequestId: "r"}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
	if _, err := c.Evaluate(t.Context(), &adminv1.EvaluateRequest{}); connect.CodeOf(err) != connect.CodeNotFound {
		t.Error(err)
	}
	if _, err := c.Evaluate(t.Context(), &adminv1.EvaluateRequest{Model: strings.Repeat("m", maxRequest)}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Error(err)
	}
}

// fickle lets in until it is told not to.
type fickle struct{ refuse atomic.Bool }

func (f *fickle) Lookup(_ context.Context, token string) (*access.Caller, error) {
	if f.refuse.Load() {
		return nil, nil
	}
	return access.Secret("s").Lookup(context.Background(), token)
}

// A stream ends when its token is taken back.
func TestStreamEndsWithItsRight(t *testing.T) {
	var source fickle
	url := api(t, Settings{Router: router{}, Decisions: decisions.New(8), Access: access.Sources{&source}, Recheck: 5 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := client(t, url, "s").WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	source.refuse.Store(true)
	if s.Receive() || connect.CodeOf(s.Err()) != connect.CodeUnauthenticated {
		t.Errorf("got %v", s.Err())
	}
}

// A stream has what is kept and then what comes; filters hold for both. A
// subscriber that does not read misses records and learns how many, and holds up
// nobody.
func TestWatchDecisions(t *testing.T) {
	log := decisions.New(8)
	url := api(t, Settings{Router: router{}, Decisions: log, Access: access.Sources{access.Secret("s")}})
	for i := range 10 {
		log.Add(&decisions.Record{RequestID: fmt.Sprint(i), Model: fmt.Sprint("m", i%2)})
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := client(t, url, "s").WatchDecisions(ctx, &adminv1.WatchDecisionsRequest{Model: "m1", Recent: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := func(ids ...string) {
		t.Helper()
		for _, id := range ids {
			if !s.Receive() || s.Msg().Decision.RequestId != id {
				t.Fatalf("got %v, %v, want %s", s.Msg(), s.Err(), id)
			}
		}
	}
	want("7", "9")
	log.Add(&decisions.Record{RequestID: "no", Model: "m0"})
	log.Add(&decisions.Record{RequestID: "new", Model: "m1"})
	want("new")

	// More than its buffer and those of the connection hold.
	const many = 60_000
	for i := range many {
		log.Add(&decisions.Record{RequestID: fmt.Sprint(i), Model: "m1", Reason: strings.Repeat("x", 100)})
	}
	log.Add(&decisions.Record{RequestID: "last", Model: "m1"})
	got, missed := uint64(0), uint64(0)
	for got+missed < many+1 {
		if !s.Receive() {
			t.Fatalf("after %d and %d missed: %v", got, missed, s.Err())
		}
		got, missed = got+1, missed+s.Msg().Missed
	}
	if missed == 0 {
		t.Errorf("nothing was missed of %d", many)
	}
}

// The ClusterRoles of the chart have all resources that calls need.
func TestChartGrantsWhatCallsNeed(t *testing.T) {
	raw, err := os.ReadFile("../../../../deploy/charts/router/templates/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	granted := map[string]bool{}
	for _, m := range regexp.MustCompile(`resources: \[ ([a-z, ]+) \]`).FindAllStringSubmatch(string(raw), -1) {
		for _, r := range strings.Split(m[1], ", ") {
			granted[r] = true
		}
	}
	for _, list := range []map[string]access.Permission{needs, accountingNeeds} {
		for call, p := range list {
			if !granted[p.Resource] {
				t.Errorf("%s needs %s, which no role of the chart has", call, p.Resource)
			}
		}
	}
}
