package resources_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
)

func tenantOf(t *testing.T, dir string) *resources.Tenant {
	t.Helper()
	c, problems := resources.Load(dir)
	if c == nil {
		t.Fatal(problems)
	}
	return c.TenantNamed("a/team")
}

// A key that is made is read back; revoked, it stays so; the file never has it.
func TestKeyFolder(t *testing.T) {
	dir := folder(t, "team.yaml", team)
	w := &resources.KeyFolder{Dir: dir}
	now := time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)
	key, secret, made, err := resources.CreateKey(t.Context(), w, tenantOf(t, dir), apikey.Record{User: "it's alice", Description: "laptop: #1", Created: now}, time.Hour)
	if err != nil || secret != "keys" {
		t.Fatal(secret, err)
	}
	got := tenantOf(t, dir).Keys
	if len(got) != 1 || got[0] != made || got[0].SHA256 != apikey.Hash(key) || got[0].User != "it's alice" || !got[0].Expires.Equal(now.Add(time.Hour)) {
		t.Fatalf("%+v, want %+v", got, made)
	}
	for range 2 {
		if _, r, err := resources.RevokeKey(t.Context(), w, tenantOf(t, dir), made.ID, now.Add(time.Minute)); err != nil || !r.Revoked.Equal(now.Add(time.Minute)) {
			t.Errorf("%+v, %v", r, err)
		}
		now = now.Add(0)
	}
	if got = tenantOf(t, dir).Keys; len(got) != 1 || got[0].Revoked.IsZero() {
		t.Errorf("%+v", got)
	}
	if _, _, err := resources.RevokeKey(t.Context(), w, tenantOf(t, dir), "abcdefghijkl", now); !errors.Is(err, resources.ErrNoKey) {
		t.Error(err)
	}
	for _, bad := range []apikey.Record{{User: strings.Repeat("u", 300)}, {User: "a\nb"}, {Description: "\x00"}} {
		if _, _, _, err := resources.CreateKey(t.Context(), w, tenantOf(t, dir), bad, 0); !errors.Is(err, resources.ErrKeyForm) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil || strings.Contains(string(data), key) {
			t.Errorf("%s has the key: %v", e.Name(), err)
		}
	}
}

// Writers at the same time lose nothing.
func TestKeyFolderTogether(t *testing.T) {
	dir := folder(t, "team.yaml", team)
	tenant := tenantOf(t, dir)
	var wg sync.WaitGroup
	for range 4 {
		w := &resources.KeyFolder{Dir: dir} // as of another process
		for range 5 {
			wg.Go(func() {
				if _, _, _, err := resources.CreateKey(t.Context(), w, tenant, apikey.Record{}, 0); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if got := tenantOf(t, dir).Keys; len(got) != 20 {
		t.Errorf("%d keys, want 20", len(got))
	}
}

// What people have written they change.
func TestKeyFolderOfOthers(t *testing.T) {
	_, id, text := record(t, "")
	secret := "apiVersion: v1\nkind: Secret\nmetadata: { name: keys, namespace: a }\nstringData: { " + id + ": '" + text + "' }\n"
	for name, files := range map[string][]string{
		"another file":        {"team.yaml", team + secret},
		"another document":    {"team.yaml", team, "a.keys.keys.yaml", secret + "---\n" + strings.Replace(secret, "name: keys", "name: more", 1)},
		"resources beside it": {"a.keys.keys.yaml", team + secret},
		"another Secret":      {"team.yaml", team, "a.keys.keys.yaml", strings.Replace(secret, "name: keys", "name: more", 1)},
	} {
		dir := folder(t, files...)
		w := &resources.KeyFolder{Dir: dir}
		if _, _, _, err := resources.CreateKey(t.Context(), w, tenantOf(t, dir), apikey.Record{}, 0); !errors.Is(err, resources.ErrNotOurs) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := folder(t, "team.yaml", strings.Replace(team, "spec: { identities: [ { apiKeySecretRef: { name: keys } } ] }", "spec: {}", 1))
	if _, _, _, err := resources.CreateKey(context.Background(), &resources.KeyFolder{Dir: dir}, tenantOf(t, dir), apikey.Record{}, 0); !errors.Is(err, resources.ErrNoSecret) {
		t.Error(err)
	}
}
