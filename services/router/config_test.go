package router_test

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/kinference/kinference/services/router"
)

// The table of settings in the README is that of the program, but for those that all
// services have for NATS.
func TestReadmeListsFlags(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	fs := flag.NewFlagSet("router", flag.ContinueOnError)
	new(router.Service).Flags(fs)
	listed := 0
	fs.VisitAll(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "nats-") && f.Name != "nats-url" {
			return
		}
		if !strings.Contains(string(readme), "| `--"+f.Name+"` | ") {
			t.Errorf("README lacks --%s", f.Name)
		}
		listed++
	})
	if n := strings.Count(string(readme), "\n| `--"); n != listed {
		t.Errorf("README lists %d flags, there are %d", n, listed)
	}
}
