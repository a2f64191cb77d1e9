package resources_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/kinference/kinference/internal/resources"
)

// Every recipe of the policy cookbook is accepted.
func TestCookbook(t *testing.T) {
	text, err := os.ReadFile("../../docs/policy-cookbook.md")
	if err != nil {
		t.Fatal(err)
	}
	recipes := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1)
	if len(recipes) < 7 {
		t.Fatalf("%d recipes, want at least 7", len(recipes))
	}
	for _, r := range recipes {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "recipe.yaml"), r[1], 0o600); err != nil {
			t.Fatal(err)
		}
		if c, problems := resources.Load(dir); c == nil || len(c.Policies)+len(c.Tenants) != 1 {
			t.Errorf("%v\n%s", problems, r[1])
		}
	}
}
