package credential

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Keys are read as the kubelet mounts them, by links that it turns over, are used
// for a second, and are gone when the Secret is.
func TestRotation(t *testing.T) {
	dir := t.TempDir()
	at := time.Unix(100, 0)
	s := New(dir)
	s.now = func() time.Time { return at }
	mount := filepath.Join(dir, "ns", "paid")
	write(t, filepath.Join(mount, "..one", "apiKey"), "first\n")
	for link, to := range map[string]string{"..data": "..one", "apiKey": "..data/apiKey"} {
		if err := os.Symlink(to, filepath.Join(mount, link)); err != nil {
			t.Fatal(err)
		}
	}
	get := func() string {
		t.Helper()
		c, err := s.Secret(t.Context(), "ns/paid")
		if err != nil {
			return "none"
		}
		return c.APIKey
	}
	if got := get(); got != "first" {
		t.Fatal(got)
	}
	write(t, filepath.Join(mount, "..two", "apiKey"), "second")
	if err := os.Symlink("..two", filepath.Join(mount, "..tmp")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(mount, "..tmp"), filepath.Join(mount, "..data")); err != nil {
		t.Fatal(err)
	}
	if got := get(); got != "first" {
		t.Error("read again within a second: " + got)
	}
	at = at.Add(fresh)
	if got := get(); got != "second" {
		t.Error(got)
	}
	if err := os.RemoveAll(mount); err != nil {
		t.Fatal(err)
	}
	at = at.Add(fresh)
	if got := get(); got != "none" {
		t.Error("a key that is gone is used: " + got)
	}
}

// Nothing is read that is no Secret of the folder.
func TestInside(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "apiKey")
	write(t, outside, "not yours")
	write(t, filepath.Join(dir, "ns", "long", "apiKey"), strings.Repeat("x", maxFile+1))
	if err := os.MkdirAll(filepath.Join(dir, "ns", "linked"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "ns", "linked", "apiKey")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "ns", "ns/", "/ns", "../x", "ns/..", "ns/../ns/long", "ns/a/b", "NS/x", "ns/long", "ns/linked", "ns/none"} {
		if c, err := New(dir).Secret(t.Context(), name); err == nil || c.APIKey != "" || strings.Contains(err.Error(), "not yours") {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := New("").Secret(t.Context(), "ns/x"); err == nil {
		t.Error("no folder, but a key")
	}
}

// The Pod's identity becomes keys of the role, which are replaced before they end
// and used until then if that fails.
func TestRole(t *testing.T) {
	at := time.Unix(1_000_000, 0).UTC()
	asked, fails := 0, false
	sts := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		if r.FormValue("Action") != "AssumeRoleWithWebIdentity" || r.FormValue("Version") != "2011-06-15" || r.FormValue("RoleArn") != "arn:aws:iam::1:role/x" ||
			r.FormValue("WebIdentityToken") != "token" || r.FormValue("RoleSessionName") == "" || r.Header.Get("Authorization") != "" {
			t.Errorf("asked with %v", r.Form)
		}
		if fails {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		fmt.Fprintf(w, `<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult><Credentials><SessionToken>s%d</SessionToken>`+
			`<SecretAccessKey>secret</SecretAccessKey><Expiration>%s</Expiration><AccessKeyId>ASIA</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>`,
			asked, at.Add(time.Hour).Format(time.RFC3339))
	}))
	defer sts.Close()
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, "token\n")
	r := &Role{Endpoint: sts.URL, Now: func() time.Time { return at }}
	if _, err := r.Keys(t.Context(), "eu-west-1"); err == nil {
		t.Error("keys without an identity")
	}
	t.Setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
	t.Setenv("AWS_WEB_IDENTITY_TOKEN_FILE", file)
	keys := func() string {
		c, err := r.Keys(context.Background(), "eu-west-1")
		if err != nil {
			return err.Error()
		}
		return c.AccessKeyID + " " + c.SecretAccessKey + " " + c.SessionToken
	}
	for range 3 {
		if got := keys(); got != "ASIA secret s1" {
			t.Fatal(got)
		}
	}
	at = at.Add(56 * time.Minute)
	if got := keys(); got != "ASIA secret s2" {
		t.Error("near the end: " + got)
	}
	fails = true
	at = at.Add(56 * time.Minute)
	if got := keys(); got != "ASIA secret s2" || asked != 3 {
		t.Errorf("while STS is away: %s, asked %d times", got, asked)
	}
	if keys(); asked != 3 {
		t.Error("STS is asked again at once")
	}
	at = at.Add(5 * time.Minute)
	if got := keys(); !strings.Contains(got, "403") {
		t.Error("after the end: " + got)
	}
}
