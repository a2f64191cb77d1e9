package credential

import (
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/provider"
	"github.com/kinference/kinference/internal/provider/fake"
)

// The Pod's identity becomes a token, which is replaced before its end, by the
// identity token that is in the file then, and used until its end if that fails.
func TestFederatedIdentity(t *testing.T) {
	for _, test := range []struct {
		name   string
		issuer *fake.Issuer
		env    map[string]string
		get    func(*Tokens, *fake.Issuer) (provider.Credentials, error)
	}{
		{"Azure", fake.NewEntra("tenant-1", "client-1"), map[string]string{"AZURE_CLIENT_ID": "client-1", "AZURE_TENANT_ID": "tenant-1", "AZURE_FEDERATED_TOKEN_FILE": "FILE", "AZURE_AUTHORITY_HOST": "ISSUER/"},
			func(s *Tokens, i *fake.Issuer) (provider.Credentials, error) {
				return s.Azure(context.Background(), i.Client().Transport, "https://mine.openai.azure.com")
			}},
		{"Databricks", fake.NewFederation("client-1"), map[string]string{"DATABRICKS_CLIENT_ID": "client-1", "DATABRICKS_OIDC_TOKEN_FILEPATH": "FILE"},
			func(s *Tokens, i *fake.Issuer) (provider.Credentials, error) {
				return s.DatabricksIdentity(context.Background(), i.Client().Transport, i.URL+"/serving-endpoints")
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			issuer := test.issuer
			defer issuer.Close()
			at := time.Unix(1_000_000, 0)
			s := &Tokens{Now: func() time.Time { return at }, AnyHost: test.name == "Databricks"} // its issuer is the workspace itself
			get := func() string {
				c, err := test.get(s, issuer)
				if err != nil {
					return err.Error()
				}
				return c.Bearer
			}
			if got := get(); !strings.Contains(got, "no identity") {
				t.Errorf("without an identity: %s", got)
			}
			file := filepath.Join(t.TempDir(), "token")
			for name, value := range test.env {
				t.Setenv(name, strings.NewReplacer("FILE", file, "ISSUER", issuer.URL).Replace(value))
			}
			if got := get(); !strings.Contains(got, "read identity token") {
				t.Errorf("without its file: %s", got)
			}
			at = at.Add(again)
			write(t, file, "identity-1\n")
			issuer.Set("identity-1", 3600, 0)
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					if got := get(); got != "token-1" {
						t.Error(got)
					}
				})
			}
			all.Wait()

			// The platform has rotated the file, and the token is near its end.
			write(t, file, "identity-2")
			issuer.Set("identity-2", 600, 0)
			if got := get(); got != "token-1" {
				t.Error("replaced too early: " + got)
			}
			at = at.Add(56 * time.Minute)
			if got := get(); got != "token-2" {
				t.Error("near the end: " + got)
			}
			// That one holds for ten minutes, of which it is used eight.
			at = at.Add(7 * time.Minute)
			if got := get(); got != "token-2" {
				t.Error("replaced too early: " + got)
			}
			issuer.Set("identity-2", 600, 503)
			at = at.Add(90 * time.Second)
			for range 3 {
				if got := get(); got != "token-2" {
					t.Error("while the issuer is away: " + got)
				}
			}
			if n, _ := issuer.Asked(); n != 3 {
				t.Errorf("asked %d times, want 3", n)
			}
			at = at.Add(2 * time.Minute)
			for range 3 {
				if got := get(); !strings.Contains(got, "503") || strings.Contains(got, fake.Account) {
					t.Error("after the end: " + got)
				}
			}
			if n, refused := issuer.Asked(); n != 4 || len(refused) > 0 {
				t.Errorf("asked %d times, want 4; refused %v", n, refused)
			}
			// Another identity than the one that is let in.
			issuer.Set("somebody else", 600, 0)
			at = at.Add(again)
			if got := get(); !strings.Contains(got, "status 401") {
				t.Error(got)
			}
			issuer.Set("identity-2", 600, 0)
			at = at.Add(again)
			if got := get(); got != "token-6" {
				t.Error("back again: " + got)
			}
		})
	}
}

// The Pod's identity goes to the clouds that it is for, and nowhere else, whatever an
// InferenceProvider says.
func TestIdentityStaysAway(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, "identity")
	for _, name := range []string{"AZURE_FEDERATED_TOKEN_FILE", "DATABRICKS_OIDC_TOKEN_FILEPATH"} {
		t.Setenv(name, file)
	}
	t.Setenv("AZURE_CLIENT_ID", "c")
	t.Setenv("AZURE_TENANT_ID", "t")
	asked := ""
	via := transport(func(r *http.Request) (*http.Response, error) {
		asked = r.URL.String()
		return nil, http.ErrServerClosed
	})
	for _, endpoint := range []string{
		"https://evil.example", "https://openai.azure.com.evil.example", "https://evilopenai.azure.com.example", "http://mine.openai.azure.com", "https://x@mine.openai.azure.com",
		"https://openai.azure.com", "https://127.0.0.1", "http://127.0.0.1", "://", "", "https://evil.example/.azuredatabricks.net", "https://evil.example#.cloud.databricks.com",
	} {
		s := &Tokens{}
		_, azure := s.Azure(t.Context(), via, endpoint)
		_, databricks := s.DatabricksIdentity(t.Context(), via, endpoint)
		if azure == nil || databricks == nil || asked != "" {
			t.Errorf("%q: asked %q", endpoint, asked)
		}
	}
	s := &Tokens{}
	if _, err := s.Azure(t.Context(), via, "https://Mine.OpenAI.Azure.com/openai/v1"); err == nil || asked != "https://login.microsoftonline.com/t/oauth2/v2.0/token" {
		t.Errorf("asked %q", asked)
	}
	if _, err := s.DatabricksIdentity(t.Context(), via, "https://adb-1.2.azuredatabricks.net/serving-endpoints"); err == nil || asked != "https://adb-1.2.azuredatabricks.net/oidc/v1/token" {
		t.Errorf("asked %q", asked)
	}
}

type transport func(*http.Request) (*http.Response, error)

func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// What is no token is an error, which tells nothing of what was answered.
func TestNoToken(t *testing.T) {
	for _, body := range []string{
		``, `{}`, `[]`, `{"access_token":"secret-x","token_type":"mac","expires_in":3600}`, `{"access_token":"secret-x","token_type":"Bearer"}`,
		`{"access_token":"secret-x","token_type":"Bearer","expires_in":-1}`, `{"access_token":"secret-x","token_type":"Bearer","expires_in":"soon"}`, strings.Repeat("secret-x", maxFile),
	} {
		via := transport(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: http.NoBody, Header: http.Header{}, Request: r}, nil
		})
		if body != "" {
			via = func(r *http.Request) (*http.Response, error) { return answer(body), nil }
		}
		s := &Tokens{}
		if c, err := s.Databricks(t.Context(), via, "https://x.cloud.databricks.com", provider.Credentials{ClientID: "i", ClientSecret: "s"}); err == nil || strings.Contains(err.Error(), "secret-x") {
			t.Errorf("%.60s: %v %v", body, c, err)
		}
	}
}

func answer(body string) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}}
}
