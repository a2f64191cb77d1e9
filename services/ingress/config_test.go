package ingress_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/services/ingress"
)

// The README lists the flags as they are, but those that are the same for all services.
func TestREADMEFlags(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	fs := flag.NewFlagSet("ingress", flag.ContinueOnError)
	new(ingress.Service).Flags(fs)
	shared := flag.NewFlagSet("nats", flag.ContinueOnError)
	new(bus.Access).Flags(shared)
	fs.VisitAll(func(f *flag.Flag) {
		if shared.Lookup(f.Name) != nil {
			return
		}
		if row := fmt.Sprintf("| `--%s` | %s | %s |\n", f.Name, f.DefValue, f.Usage); !strings.Contains(string(readme), row) {
			t.Errorf("README.md lacks %s", row)
		}
	})
}

func TestValidate(t *testing.T) {
	c := ingress.Config{RouterURL: "nowhere", MaxBody: 10, MaxBodies: 5, IdleTimeout: -1}
	err := c.Validate()
	for _, want := range []string{"router-url", "max-bodies", "idle-timeout"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if err := (&ingress.Service{Config: c}).Run(t.Context()); err == nil {
		t.Error("runs with faulty settings")
	}
}
