package stack

import (
	"os"
	"path/filepath"
	"testing"
)

// kinfctl finds the token from wherever it is called, also if the data folder was named
// relative to where the stack was started.
func TestAdminTokenFile(t *testing.T) {
	t.Chdir(t.TempDir())
	a, err := newAdminAPI("data")
	if err != nil {
		t.Fatal(err)
	}
	if raw, err := os.ReadFile(a.tokenFile); !filepath.IsAbs(a.tokenFile) || err != nil || string(raw) != a.secret+"\n" {
		t.Errorf("the token is at %s: %v", a.tokenFile, err)
	}
}
