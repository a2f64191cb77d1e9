package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kinference/kinference/deploy/charts"
	"github.com/kinference/kinference/internal/testenv"
)

// What is packed is what helm takes, with the version of the release throughout, and
// the same each time.
func TestCharts(t *testing.T) {
	helm := testenv.Helm(t)
	one, two := t.TempDir(), t.TempDir()
	for _, dir := range []string{one, two} {
		if err := run(t.Context(), []string{"charts", "-out", dir, "-version", "1.2.3", "-created", "1700000000"}, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"kinference-1.2.3.tgz", "kinference-crds-1.2.3.tgz"} {
		a, err := os.ReadFile(filepath.Join(one, name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(two, name))
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v", name, err)
		}
		cmd := exec.CommandContext(t.Context(), helm, "template", "kinference", filepath.Join(one, name))
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
		if text := string(out); name == "kinference-1.2.3.tgz" && (strings.Count(text, "image: ghcr.io/kinference/") != 7 || strings.Count(text, ":1.2.3\n") != 7 || strings.Contains(text, charts.Version)) {
			t.Errorf("%s renders other images than those of its version", name)
		}
	}
}
