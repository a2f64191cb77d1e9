package salt_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/services/ingress/internal/salt"
)

func TestSalt(t *testing.T) {
	a, b := salt.Secret(strings.Repeat("a", 32)), salt.Secret(strings.Repeat("b", 32))
	if got, again := a.Salt("Tenant", "ns/x"), a.Salt("Tenant", "ns/x"); got != again || len(got) != 43 {
		t.Errorf("salts %q and %q", got, again)
	}
	seen := map[string]string{}
	for name, s := range map[string]string{
		"tenant": a.Salt("Tenant", "ns/x"), "other secret": b.Salt("Tenant", "ns/x"), "other tenant": a.Salt("Tenant", "ns/y"), "user": a.Salt("User", "ns/x", ""),
		"moved boundary": a.Salt("User", "ns/", "x"), "joined": a.Salt("Userns/x"), "none": a.Salt(), "empty": a.Salt(""),
	} {
		if other := seen[s]; other != "" {
			t.Errorf("%s and %s have one salt", name, other)
		}
		seen[s] = name
	}
}

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "salt")
	if err := salt.Keep(path); err != nil {
		t.Fatal(err)
	}
	first, err := salt.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := salt.Keep(path); err != nil {
		t.Fatal(err)
	}
	if again, err := salt.Read(path); err != nil || string(again) != string(first) {
		t.Errorf("the secret was replaced: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for name, content := range map[string]string{"short": "abc", "long": strings.Repeat("a", 5000)} {
		bad := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(bad, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := salt.Read(bad); err == nil || strings.Contains(err.Error(), "aaaa") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := salt.Read(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("no file, no error")
	}
}

func BenchmarkSalt(b *testing.B) {
	s := salt.New()
	b.ReportAllocs()
	for b.Loop() {
		s.Salt("Tenant", "inference/search-team")
	}
}
