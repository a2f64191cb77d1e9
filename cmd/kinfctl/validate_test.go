package main

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

// The samples of internal/resources, through the command: good ones exit 0, bad
// ones 1, with file and line.
func TestValidateSamples(t *testing.T) {
	const samples = "../../internal/resources/testdata/"
	good, _ := filepath.Glob(samples + "good/*.good.yaml")
	bad, _ := filepath.Glob(samples + "bad/*.bad.yaml")
	if len(good) < 8 || len(bad) < 40 {
		t.Fatalf("%d good, %d bad samples", len(good), len(bad))
	}
	validate := func(args ...string) (string, error) {
		var out bytes.Buffer
		cmd := validateCommand()
		cmd.SetOut(&out)
		cmd.SetErr(&out)
		cmd.SetArgs(args)
		cmd.SilenceUsage, cmd.SilenceErrors = true, true
		err := cmd.Execute()
		return out.String(), err
	}
	for _, path := range good {
		if out, err := validate(path); err != nil || !strings.Contains(out, "\nok: ") && !strings.HasPrefix(out, "ok: ") {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
	}
	for _, path := range bad {
		if out, err := validate(path); err == nil || !strings.Contains(out, path+":") || !strings.Contains(out, ": error: ") {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
	}
	if out, err := validate(good...); err == nil || !strings.Contains(out, "is used already") {
		t.Errorf("samples together use the same names: %v\n%s", err, out)
	}
	if out, err := validate("--strict", samples+"good/document-burst-to-cloud.good.yaml"); err == nil || !strings.Contains(out, `error: InferencePolicy inference/burst-policy: spec.rules[0].route.select[1].order[0]`) {
		t.Errorf("strict: %v\n%s", err, out)
	}
}
