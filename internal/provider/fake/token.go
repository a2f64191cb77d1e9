package fake

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
)

// SetToken lets in a short-lived token, at Azure and Databricks.
func (s *Server) SetToken(token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = token
}

// SetClient makes a workspace of Databricks give tokens to this client of a service
// principal at /oidc/v1/token. A change of the secret ends what was given before.
func (s *Server) SetClient(id, secret string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.client, s.token = [2]string{id, secret}, ""
}

// Given is how many tokens were given.
func (s *Server) Given() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.given
}

func (s *Server) isToken(r *http.Request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.token != "" && r.Header.Get("Authorization") == "Bearer "+s.token
}

// workspaceToken is the token endpoint of a workspace, for a client with a secret.
func (s *Server) workspaceToken(w http.ResponseWriter, r *http.Request) {
	id, secret, ok := r.BasicAuth()
	s.mu.Lock()
	defer s.mu.Unlock()
	why := ""
	switch {
	case r.Method != http.MethodPost || r.Header.Get("Content-Type") != "application/x-www-form-urlencoded":
		why = "invalid_request"
	case r.FormValue("grant_type") != "client_credentials":
		why = "unsupported_grant_type"
	case r.FormValue("scope") != "all-apis":
		why = "invalid_scope"
	case !ok || s.client[0] == "" || [2]string{id, secret} != s.client:
		why = "invalid_client"
	}
	if why != "" {
		s.refused = append(s.refused, "token: "+why)
		tokenError(w, why)
		return
	}
	s.given++
	s.token = fmt.Sprintf("workspace-token-%d", s.given)
	tokenAnswer(w, s.token, 3600)
}

func tokenAnswer(w http.ResponseWriter, token string, seconds int) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"access_token": token, "token_type": "Bearer", "expires_in": seconds})
}

func tokenError(w http.ResponseWriter, why string) {
	status := http.StatusBadRequest
	if why == "invalid_client" {
		status = http.StatusUnauthorized
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": why, "error_description": "of " + Account})
}

// Issuer gives tokens for a federated identity, as Microsoft Entra does for Azure,
// or as a workspace of Databricks. Make it with NewEntra or NewFederation, and close
// it.
type Issuer struct {
	*httptest.Server
	want map[string]string // the form
	path string

	mu      sync.Mutex
	subject string // the identity token that is let in
	life    int
	status  int
	asked   int
	refused []string
}

// NewEntra starts an Entra that knows of one tenant and one client in it.
func NewEntra(tenant, client string) *Issuer {
	return newIssuer("/"+tenant+"/oauth2/v2.0/token", map[string]string{
		"grant_type": "client_credentials", "client_id": client, "scope": "https://cognitiveservices.azure.com/.default",
		"client_assertion_type": "urn:ietf:params:oauth:client-assertion-type:jwt-bearer", "client_assertion": "",
	})
}

// NewFederation starts a workspace of Databricks whose service principal has a
// federation policy.
func NewFederation(client string) *Issuer {
	return newIssuer("/oidc/v1/token", map[string]string{
		"grant_type": "urn:ietf:params:oauth:grant-type:token-exchange", "client_id": client, "scope": "all-apis",
		"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "subject_token": "",
	})
}

func newIssuer(path string, want map[string]string) *Issuer {
	i := &Issuer{path: path, want: want, life: 3600}
	i.Server = httptest.NewTLSServer(http.HandlerFunc(i.serve))
	return i
}

// Set says which identity token is let in, how many seconds tokens hold, and with
// which status all are refused; 0: none.
func (i *Issuer) Set(subject string, life, status int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.subject, i.life, i.status = subject, life, status
}

// Asked is how often it was asked; Refused says what was wrong with questions.
func (i *Issuer) Asked() (n int, refused []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.asked, append([]string(nil), i.refused...)
}

func (i *Issuer) serve(w http.ResponseWriter, r *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.asked++
	why := ""
	switch {
	case i.status != 0:
		http.Error(w, Account, i.status)
		return
	case r.Method != http.MethodPost || r.URL.RequestURI() != i.path || r.ParseForm() != nil || len(r.PostForm) != len(i.want) || r.Header.Get("Authorization") != "":
		why = "invalid_request"
	}
	for name, value := range i.want {
		if got := r.PostForm.Get(name); why == "" && got != value && value != "" {
			why = "wrong " + name
		} else if why == "" && value == "" && (got == "" || got != i.subject) {
			why = "invalid_client"
		}
	}
	if why != "" {
		i.refused = append(i.refused, why)
		tokenError(w, why)
		return
	}
	tokenAnswer(w, fmt.Sprintf("token-%d", i.asked), i.life)
}
