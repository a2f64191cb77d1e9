package credential

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

// Tokens gets short-lived tokens by OAuth: from Microsoft Entra and Databricks for
// the identity of the Pod, which is a token in a file that the platform rotates, and
// from Databricks for a client with a secret. Its zero value is ready.
//
// A token is fetched again before its end. While that fails the old one is used until
// then. One that was had for a client secret that has changed is not used any more.
type Tokens struct {
	// Now is the clock; nil: the real one.
	Now func() time.Time
	// AnyHost lets the Pod's identity go to any host, for tests.
	AnyHost bool

	loans loans // by the hash of what is asked
}

const (
	// azureScope is what Azure OpenAI is used by.
	azureScope = "https://cognitiveservices.azure.com/.default"
	// azureAuthority is where Entra is, unless the environment names another.
	azureAuthority = "https://login.microsoftonline.com/"
	// databricksScope is all that the service principal may do.
	databricksScope = "all-apis"
	// tokenTime bounds one question.
	tokenTime = 10 * time.Second
	// maxLife is how long a token is used at most, whatever it says.
	maxLife = 24 * time.Hour
)

// The hosts of Azure and Databricks, in all their clouds. The Pod's identity and what
// is had for it go nowhere else: whoever may write an InferenceProvider must not get
// them sent to a server of their own.
var (
	azureHosts      = []string{".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com", ".openai.azure.us", ".cognitiveservices.azure.us", ".openai.azure.cn", ".cognitiveservices.azure.cn"}
	databricksHosts = []string{".cloud.databricks.com", ".azuredatabricks.net", ".gcp.databricks.com", ".cloud.databricks.us", ".databricks.azure.us", ".databricks.azure.cn"}
)

// Azure returns a token of Entra for the Pod's identity, for a provider at endpoint.
// The environment tells the rest, as Azure Workload Identity sets it.
func (t *Tokens) Azure(ctx context.Context, via http.RoundTripper, endpoint string) (provider.Credentials, error) {
	client, tenant, file := os.Getenv("AZURE_CLIENT_ID"), os.Getenv("AZURE_TENANT_ID"), os.Getenv("AZURE_FEDERATED_TOKEN_FILE")
	if client == "" || tenant == "" || file == "" {
		return provider.Credentials{}, errors.New("the Pod has no identity for Azure: AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_FEDERATED_TOKEN_FILE are not set")
	}
	if _, err := t.host(endpoint, azureHosts); err != nil {
		return provider.Credentials{}, err
	}
	authority := os.Getenv("AZURE_AUTHORITY_HOST")
	if authority == "" {
		authority = azureAuthority
	}
	q := question{url: strings.TrimRight(authority, "/") + "/" + url.PathEscape(tenant) + "/oauth2/v2.0/token", assertion: "client_assertion", file: file, form: url.Values{
		"grant_type": {"client_credentials"}, "scope": {azureScope}, "client_id": {client},
		"client_assertion_type": {"urn:ietf:params:oauth:client-assertion-type:jwt-bearer"},
	}}
	return t.get(ctx, via, &q)
}

// DatabricksIdentity returns a token of the workspace at endpoint for the Pod's
// identity, by a federation policy of the service principal that the environment
// names.
func (t *Tokens) DatabricksIdentity(ctx context.Context, via http.RoundTripper, endpoint string) (provider.Credentials, error) {
	client, file := os.Getenv("DATABRICKS_CLIENT_ID"), os.Getenv("DATABRICKS_OIDC_TOKEN_FILEPATH")
	if file == "" {
		return provider.Credentials{}, errors.New("the Pod has no identity for Databricks: DATABRICKS_OIDC_TOKEN_FILEPATH is not set")
	}
	host, err := t.host(endpoint, databricksHosts)
	if err != nil {
		return provider.Credentials{}, err
	}
	q := question{url: host + "/oidc/v1/token", assertion: "subject_token", file: file, form: url.Values{
		"grant_type": {"urn:ietf:params:oauth:grant-type:token-exchange"}, "scope": {databricksScope},
		"subject_token_type": {"urn:ietf:params:oauth:token-type:jwt"},
	}}
	if client != "" { // without one the policy is of the whole account
		q.form.Set("client_id", client)
	}
	return t.get(ctx, via, &q)
}

// Databricks returns a token of the workspace at endpoint for the client of a Secret.
func (t *Tokens) Databricks(ctx context.Context, via http.RoundTripper, endpoint string, c provider.Credentials) (provider.Credentials, error) {
	host, err := t.host(endpoint, nil)
	if err != nil {
		return provider.Credentials{}, err
	}
	q := question{url: host + "/oidc/v1/token", user: c.ClientID, password: c.ClientSecret, form: url.Values{"grant_type": {"client_credentials"}, "scope": {databricksScope}}}
	return t.get(ctx, via, &q)
}

// host is scheme and host of an endpoint, which must be one of hosts if there are
// any.
func (t *Tokens) host(endpoint string, hosts []string) (string, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.User != nil || u.Scheme != "https" && !t.AnyHost && !loopback(u.Hostname()) {
		return "", errors.New("the endpoint is no https URL")
	}
	for _, suffix := range hosts {
		if strings.HasSuffix(strings.ToLower(u.Hostname()), suffix) {
			hosts = nil
			break
		}
	}
	if len(hosts) > 0 && !t.AnyHost {
		return "", errors.New("the Pod's identity is not sent to this host")
	}
	return u.Scheme + "://" + u.Host, nil
}

// loopback reports whether a host is this machine, where nobody can listen.
func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// question is what a token is asked for with.
type question struct {
	url            string
	form           url.Values
	user, password string
	// assertion names the field for what is in file. It is not part of what the token
	// is kept by: the platform rotates it, and the identity stays.
	assertion, file string
}

// key names the token that is asked for. It holds no secret.
func (q *question) key() string {
	var text strings.Builder
	for _, s := range []string{q.url, q.form.Encode(), q.user, q.password, q.file} {
		fmt.Fprintf(&text, "%d:%s", len(s), s)
	}
	sum := sha256.Sum256([]byte(text.String()))
	return string(sum[:])
}

// get returns the token for a question.
func (t *Tokens) get(ctx context.Context, via http.RoundTripper, q *question) (provider.Credentials, error) {
	return t.loans.get(ctx, q.key(), t.Now, func(now time.Time) (c provider.Credentials, until time.Time, err error) {
		value, life, err := q.ask(ctx, via)
		return provider.Credentials{Bearer: value}, now.Add(life), err
	})
}

// ask asks for a token. Errors do not hold what was sent or answered.
func (q *question) ask(ctx context.Context, via http.RoundTripper) (value string, life time.Duration, err error) {
	form := maps.Clone(q.form)
	if q.file != "" {
		text, err := os.ReadFile(q.file)
		if err != nil {
			return "", 0, fmt.Errorf("read identity token: %w", err)
		}
		form.Set(q.assertion, strings.TrimSpace(string(text)))
	}
	ctx, cancel := context.WithTimeout(ctx, tokenTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, q.url, strings.NewReader(form.Encode()))
	if err != nil {
		return "", 0, errors.New("ask for a token: the URL is wrong")
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Accept-Encoding", "identity")
	if q.user != "" {
		req.SetBasicAuth(url.QueryEscape(q.user), url.QueryEscape(q.password)) // RFC 6749, 2.3.1
	}
	resp, err := via.RoundTrip(req)
	if err != nil {
		return "", 0, fmt.Errorf("ask for a token: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxFile))
	if err != nil || resp.StatusCode != http.StatusOK {
		return "", 0, fmt.Errorf("ask for a token: status %d", resp.StatusCode)
	}
	var out struct {
		Token string      `json:"access_token"`
		Type  string      `json:"token_type"`
		Life  json.Number `json:"expires_in"` // a string at some
	}
	if json.Unmarshal(body, &out) != nil || out.Token == "" || !strings.EqualFold(out.Type, "Bearer") {
		return "", 0, errors.New("ask for a token: the answer has none")
	}
	seconds, err := out.Life.Float64()
	if err != nil || seconds <= 0 {
		return "", 0, errors.New("ask for a token: the answer does not say how long it holds")
	}
	return out.Token, time.Duration(min(seconds, maxLife.Seconds()) * float64(time.Second)), nil
}
