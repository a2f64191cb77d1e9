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

	loans loans // by region
}

// Keys returns the keys of the role.
func (r *Role) Keys(ctx context.Context, region string) (provider.Credentials, error) {
	role, file := os.Getenv("AWS_ROLE_ARN"), os.Getenv("AWS_WEB_IDENTITY_TOKEN_FILE")
	if role == "" || file == "" {
		return provider.Credentials{}, errors.New("the Pod has no identity for AWS: AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE are not set")
	}
	return r.loans.get(ctx, region, r.Now, func(time.Time) (provider.Credentials, time.Time, error) { return r.assume(ctx, region, role, file) })
}

func (r *Role) assume(ctx context.Context, region, role, file string) (c provider.Credentials, until time.Time, err error) {
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
