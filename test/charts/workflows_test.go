package charts

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Workflows run what the repository has: targets of make and scripts that are there,
// and actions of others by the digest of their sources, not by a name that may move.
func TestWorkflows(t *testing.T) {
	makefile, err := os.ReadFile(top + "/Makefile")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(top + "/.github/workflows/*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	pinned := regexp.MustCompile(`^[a-z-]+/[a-z-]+@[0-9a-f]{40}$`)
	target := regexp.MustCompile(`(?m)^ *make (?:-C \S+ )?([a-z-]+)`)
	script := regexp.MustCompile(`scripts/[a-z-]+\.sh`)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var flow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				Timeout int `yaml:"timeout-minutes"`
				Steps   []struct{ Uses, Run string }
			}
		}
		if err := yaml.Unmarshal(raw, &flow); err != nil {
			t.Fatal(file, err)
		}
		if len(flow.Permissions) != 1 || flow.Permissions["contents"] != "read" {
			t.Errorf("%s: permissions %v, want to read only where a job says nothing", file, flow.Permissions)
		}
		for name, job := range flow.Jobs {
			if job.Timeout == 0 || len(job.Steps) == 0 {
				t.Errorf("%s: %s has no end or no steps", file, name)
			}
			for _, step := range job.Steps {
				if step.Uses != "" && !pinned.MatchString(step.Uses) {
					t.Errorf("%s: %s is not pinned", file, step.Uses)
				}
				for _, m := range target.FindAllStringSubmatch(step.Run, -1) {
					if !strings.Contains(string(makefile), "\n"+m[1]+":") {
						t.Errorf("%s: there is no target %s", file, m[1])
					}
				}
				for _, m := range script.FindAllString(step.Run, -1) {
					if _, err := os.Stat(filepath.Join(top, m)); err != nil {
						t.Error(file, err)
					}
				}
			}
		}
	}
}
