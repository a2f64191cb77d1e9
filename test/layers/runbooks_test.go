package layers

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Each alert has its section in docs/runbooks.md, each section its alert, and the
// metrics that the sections name are made somewhere.
func TestAlertsHaveRunbooks(t *testing.T) {
	read := func(path string) string {
		raw, err := os.ReadFile(filepath.Join(top, path))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	all := func(expr, text string) (found []string) {
		for _, m := range regexp.MustCompile(expr).FindAllStringSubmatch(text, -1) {
			found = append(found, m[1])
		}
		return found
	}
	alerts := all(`alert: (Kinference\w+)`, read("deploy/rules/kinference.yaml"))
	alerts = append(alerts, all(`"(KinferenceObjective\w+)"`, read("services/accounting/internal/objective/rules.go"))...)
	runbooks := read("docs/runbooks.md")
	sections := all(`(?m)^## (Kinference\w+)$`, runbooks)
	if len(alerts) < 10 {
		t.Fatalf("found %d alerts only", len(alerts))
	}
	for _, a := range alerts {
		if !slices.Contains(sections, a) {
			t.Errorf("docs/runbooks.md lacks the alert %s", a)
		}
	}
	for _, s := range sections {
		if !slices.Contains(alerts, s) {
			t.Errorf("docs/runbooks.md has a section for %s, which is no alert", s)
		}
	}

	var made strings.Builder
	for _, s := range services {
		for _, m := range instruments(t, s) {
			made.WriteString(strings.ReplaceAll(m, ".", "_") + "\n")
		}
	}
	unit := regexp.MustCompile(`(_seconds|_bytes|_ratio)?(_total|_bucket)?$`)
	for _, m := range all(`(kinference_[a-z_]+)`, runbooks) {
		if !strings.Contains(made.String(), unit.ReplaceAllString(m, "")+"\n") {
			t.Errorf("docs/runbooks.md names %s, which no service makes", m)
		}
	}
}
