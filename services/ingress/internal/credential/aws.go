package credential

import (
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

// Role gets keys of AWS for the identity of the Pod, as EKS provides it: a token
// in a file, which the Security Token Service takes for keys of a role. The
// environment names both, as for every SDK. Its zero value is ready.
//
// Keys are fetched again some minutes before they end. While that fails the old
// ones are used until they do.
type Role struct {
	// Client of STS; nil: one with a timeout of 10 s that follows no redirects.
	Client *http.Client
	// Endpoint of STS for tests; empty: the region's public one.
	Endpoint string
	// Now is the clock; nil: the real one.
	Now func() time.Time

	mu    sync.Mutex
	keys  map[string]provider.Credentials // by region
	until map[string]time.Time
	tried map[string]time.Time
}

const (
	// early is how long before their end keys are replaced, and again how long to
	// wait after that failed.
	early, again = 5 * time.Minute, 10 * time.Second
)

// Keys returns the keys of the role. Only one caller at a time asks for them.
func (r *Role) Keys(ctx context.Context, region string) (provider.Credentials, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.Now != nil {
		now = r.Now()
	}
	left := r.until[region].Sub(now)
	if left > early || left > 0 && now.Sub(r.tried[region]) < again {
		return r.keys[region], nil
	}
	if r.keys == nil {
		r.keys, r.until, r.tried = map[string]provider.Credentials{}, map[string]time.Time{}, map[string]time.Time{}
	}
	r.tried[region] = now
	keys, until, err := r.assume(ctx, region)
	switch {
	case err == nil:
		r.keys[region], r.until[region] = keys, until
	case left > 0:
		return r.keys[region], nil
	}
	return keys, err
}

func (r *Role) assume(ctx context.Context, region string) (c provider.Credentials, until time.Time, err error) {
	role, file := os.Getenv("AWS_ROLE_ARN"), os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE")
	if role == "" || file == "" {
		return c, until, errors.New("the Pod has no identity for AWS: AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE are not set")
	}
	token, err := os.ReadFile(file) //nolint:gosec // the platform names it
	if err != nil {
		return c, until, fmt.Errorf("read identity token: %w", err)
	}
	session := os.Getenv("AWS_ROLE_SESSION_NAME")
	if session == "" {
		session = "kinference"
	}
	form := url.Values{"Action": {"AssumeRoleWithWebIdentity"}, "Version": {"2011-06-15"}, "RoleArn": {role}, "RoleSessionName": {session},
		"WebIdentityToken": {strings.TrimSpace(string(token))}}
	endpoint := r.Endpoint
	if endpoint == "" {
		endpoint = "https://sts." + region + ".amazonaws.com/"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, endpoint, strings.NewReader(form.Encode()))
	if err != nil {
		return c, until, err
	}
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	client := r.Client
	if client == nil {
		client = &http.Client{Timeout: 10 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	resp, err := client.Do(req)
	if err != nil {
		return c, until, fmt.Errorf("ask STS: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxFile))
	if err != nil || resp.StatusCode != http.StatusOK {
		return c, until, fmt.Errorf("ask STS: status %d", resp.StatusCode)
	}
	var out struct {
		Keys struct {
			ID         string    `xml:"AccessKeyId"`
			Secret     string    `xml:"SecretAccessKey"`
			Token      string    `xml:"SessionToken"`
			Expiration time.Time `xml:"Expiration"`
		} `xml:"AssumeRoleWithWebIdentityResult>Credentials"`
	}
	if err := xml.Unmarshal(body, &out); err != nil || out.Keys.ID == "" || out.Keys.Secret == "" {
		return c, until, errors.New("ask STS: the answer has no keys")
	}
	return provider.Credentials{AccessKeyID: out.Keys.ID, SecretAccessKey: out.Keys.Secret, SessionToken: out.Keys.Token}, out.Keys.Expiration, nil
}
