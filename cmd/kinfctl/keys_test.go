package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/apikey"
)

// Without a running router: a key is made, shown once, listed without it, and
// revoked.
func TestKeysOffline(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "team.yaml"), []byte(`
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceTenant
metadata: { name: team, namespace: a }
spec: { identities: [ { apiKeySecretRef: { name: keys } } ] }
`), 0o600); err != nil {
		t.Fatal(err)
	}
	keys := func(args ...string) (stdout, stderr string, err error) {
		var out, errs bytes.Buffer
		cmd := rootCommand()
		cmd.SetOut(&out)
		cmd.SetErr(&errs)
		cmd.SetArgs(append(append([]string{"keys"}, args...), "--config", dir))
		err = cmd.Execute()
		return out.String(), errs.String(), err
	}
	out, said, err := keys("create", "a/team", "--user", "alice", "--lifetime", "24h")
	key := strings.TrimSpace(out)
	id, ok := apikey.Parse(key)
	if err != nil || !ok || !strings.Contains(said, "Key "+id+" of a/team, written to the Secret a/keys. It is shown this once:") {
		t.Fatalf("%q, %q: %v", out, said, err)
	}
	out, _, err = keys("list")
	if err != nil || strings.Contains(out, key) || !strings.Contains(out, id+"  a/team  alice  good") {
		t.Errorf("%s: %v", out, err)
	}
	if out, _, err = keys("list", "b/team", "-o", "json"); err != nil || strings.TrimSpace(out) != "{}" {
		t.Errorf("%s: %v", out, err)
	}
	if out, _, err = keys("revoke", id); err != nil || !strings.Contains(out, "revoked") {
		t.Errorf("%s: %v", out, err)
	}
	if out, _, err = keys("list", "a/team"); err != nil || !strings.Contains(out, "alice  revoked") {
		t.Errorf("%s: %v", out, err)
	}
	other, _, err := keys("create", "a/team")
	if err != nil {
		t.Fatal(err)
	}
	if out, _, err = keys("revoke", strings.TrimSpace(other), "--tenant", "a/team"); err != nil || strings.Contains(out, strings.TrimSpace(other)) {
		t.Errorf("%s: %v", out, err)
	}
	var usage usageError
	if _, _, err := keys("revoke", "KEY"); !errors.As(err, &usage) {
		t.Error(err)
	}
	for _, args := range [][]string{{"revoke", "abcdefghijkl"}, {"create", "a/none"}, {"create", "a/team", "--lifetime", "-1s"}, {"create", "a/team", "--user", strings.Repeat("u", 300)}} {
		if out, _, err := keys(args...); err == nil {
			t.Errorf("%v: %s", args, out)
		}
	}
}
