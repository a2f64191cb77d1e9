package spelling_test

import (
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/spelling"
)

func TestNearest(t *testing.T) {
	known := []string{"model", "models", "tenant", "qos", "complexity-low", "bedrock"}
	for name, want := range map[string]string{
		"modl": "model", "modell": "model", "Tenant": "tenant", "tenants": "tenant", "complexty-lo": "complexity-low", "bedrok": "bedrock",
		"qs": "", "qo": "qos", "cat": "", "": "", strings.Repeat("x", 100): "",
	} {
		if got := spelling.Nearest(name, known); got != want {
			t.Errorf("%q: got %q, want %q", name, got, want)
		}
	}
}
