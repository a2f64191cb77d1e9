package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// conf is the folder of the tests with other policies.
func conf(t *testing.T, policies string) string {
	t.Helper()
	dir := t.TempDir()
	for name, path := range map[string]string{"resources.yaml": "testdata/conf/resources.yaml", "policies.yaml": policies} {
		raw, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestReplay(t *testing.T) {
	dir := conf(t, "testdata/replay/policies.yaml")
	for _, o := range []string{"table", "json"} {
		out, errs, code := kinfctl(t, "replay", "--config", dir, "--decisions", "testdata/replay/decisions.jsonl", "-o", o)
		if code != 0 {
			t.Errorf("code %d: %s", code, errs)
		}
		golden(t, "testdata/replay/"+o+".golden", out)
	}
}

// What explain prints is what replay reads: under the same policies nothing
// changes, and nothing is lacking.
func TestReplayOfExplain(t *testing.T) {
	var lines strings.Builder
	for _, c := range [][2]string{{"unclassified", "fleet"}, {"clean", "fleet"}, {"batch", "fleet"}, {"batch", "busy"}, {"long", "fleet"}} {
		out, _, _ := kinfctl(t, "explain", "--request", "testdata/explain/"+c[0]+".yaml", "--fleet", "testdata/explain/"+c[1]+".yaml", "--config", "testdata/conf", "-o", "json")
		lines.WriteString(out)
	}
	path := filepath.Join(t.TempDir(), "decisions")
	if err := os.WriteFile(path, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, code := kinfctl(t, "replay", "--config", "testdata/conf", "--decisions", path, "-o", "json")
	var r replayReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || r.Decisions != 5 || r.Changed != 0 || r.Compared != 3 || len(r.Lacks) != 0 {
		t.Errorf("%v, code %d %s\n%s", err, code, errs, out)
	}
}

// Of a usage log only backends are known, and what they took and cost on average.
func TestReplayUsageLog(t *testing.T) {
	dir := conf(t, "testdata/replay/cheap.yaml")
	for _, o := range []string{"table", "json"} {
		out, errs, code := kinfctl(t, "replay", "--config", dir, "--usage", "testdata/replay/usage.jsonl", "-o", o)
		if code != 0 {
			t.Errorf("code %d: %s", code, errs)
		}
		golden(t, "testdata/replay/usage."+o+".golden", out)
	}
	raw, err := os.ReadFile("testdata/replay/usage.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "array.json")
	if err := os.WriteFile(path, []byte("["+strings.ReplaceAll(strings.TrimSpace(string(raw)), "\n", ",")+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	lines, _, _ := kinfctl(t, "replay", "--config", dir, "--usage", "testdata/replay/usage.jsonl")
	if array, errs, _ := kinfctl(t, "replay", "--config", dir, "--usage", path); array != lines {
		t.Errorf("as an array: %s %s", errs, array)
	}
}

func TestReplayMisused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "decisions")
	if err := os.WriteFile(path, []byte("{\"model\":\"m\"}\n{\"model\":7}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "give --config, and --decisions or --usage"},
		{[]string{"--config", "testdata/conf", "--decisions", "nowhere"}, 2, "nowhere"},
		{[]string{"--config", "testdata/conf", "--decisions", path}, 1, "record 2: "},
		{[]string{"--config", "nowhere", "--decisions", path}, 1, "nowhere"},
	} {
		if _, errs, code := kinfctl(t, append([]string{"replay"}, c.args...)...); code != c.code || !strings.Contains(errs, c.want) {
			t.Errorf("%v: code %d, %s", c.args, code, errs)
		}
	}
}
