package main

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares with a file.
func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs, see it with -update: got\n%s\nwant\n%s", path, got, want)
	}
}

// kinfctl runs a command line.
func kinfctl(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	root := rootCommand()
	root.SetOut(&out)
	root.SetErr(&errs)
	root.SetArgs(args)
	err := root.ExecuteContext(t.Context())
	if err != nil {
		errs.WriteString(err.Error())
	}
	return out.String(), errs.String(), exitCode(err)
}

func TestExplainOffline(t *testing.T) {
	const dir, conf = "testdata/explain/", "testdata/conf"
	const document = "../../internal/resources/testdata/good/"
	for _, c := range []struct {
		name, request, fleet, config string
		code                         int
	}{
		{"clean", "clean", "fleet", conf, 0},
		{"unclassified", "unclassified", "fleet", conf, 0},
		{"partly", "partly", "fleet", conf, 0},
		{"batch", "batch", "fleet", conf, 0},
		{"batch-busy", "batch", "busy", conf, 2},
		{"embeddings", "embeddings", "fleet", conf, 2},
		{"long", "long", "fleet", conf, 2},
		{"document-burst", "glm", "document", document + "document-burst-to-cloud.good.yaml", 0},
		{"document-pii", "glm", "document", document + "document-pii-stays-local.good.yaml", 0},
		{"no-resources", "glm", "document", "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := []string{"explain", "--request", dir + c.request + ".yaml", "--fleet", dir + c.fleet + ".yaml"}
			if c.config != "" {
				args = append(args, "--config", c.config)
			}
			out, errs, code := kinfctl(t, args...)
			if code != c.code {
				t.Errorf("code %d, want %d: %s", code, c.code, errs)
			}
			golden(t, dir+c.name+".golden", out)
			raw, _, _ := kinfctl(t, append(args, "-o", "json")...)
			d := &adminv1.Decision{}
			if err := protojson.Unmarshal([]byte(raw), d); err != nil || strings.Count(raw, "\n") != 1 {
				t.Errorf("no record on one line: %v\n%s", err, raw)
			}
			if (d.Chosen != "") != (c.code == 0) || d.Chosen != d.Verdict.Chosen || len(d.Candidates) == 0 {
				t.Errorf("chosen %q, verdict %v", d.Chosen, d.Verdict)
			}
		})
	}
}

// What is wrong with a call or a file is said with its name.
func TestExplainUsage(t *testing.T) {
	const dir, conf = "testdata/explain/", "testdata/conf"
	write := func(text string) string {
		path := t.TempDir() + "/file.yaml"
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, c := range []struct{ request, fleet, config, want string }{
		{"", dir + "fleet.yaml", conf, "give the id of a request"},
		{dir + "glm.yaml", "", conf, "give the id of a request"},
		{"none.yaml", dir + "fleet.yaml", conf, "none.yaml: no such file"},
		{write("{ model: glm-5.3, quality: high }"), dir + "fleet.yaml", conf, `unknown field "quality"`},
		{write("{ qos: batch }"), dir + "fleet.yaml", conf, "model is required"},
		{write("{ model: m, qos: urgent }"), dir + "fleet.yaml", conf, `qos "urgent" is unknown: want`},
		{write("{ model: m, endpoint: Chat }"), dir + "fleet.yaml", conf, `endpoint "Chat" is unknown: want`},
		{write("{ model: m, maxTokens: -1 }"), dir + "fleet.yaml", conf, "at least 0"},
		{write("{ model: gpt }"), dir + "fleet.yaml", conf, `no pool serves the model "gpt": there are glm-5.3,`},
		{dir + "glm.yaml", write("endpoints: [ { id: a } ]"), conf, "endpoints[0]: give either workerSet or provider"},
		{dir + "glm.yaml", write("endpoints: [ { workerSet: glm-worker } ]"), conf, "endpoints[0].id is required"},
		{dir + "glm.yaml", write("endpoints: [ { provider: bedrock } ]"), conf, "endpoints[0].models are required: --config has no provider that is called inference/bedrock"},
		{dir + "glm.yaml", write("endpoints: [ { id: a, workerSet: b, models: [ m ], predictedTTFT: 5 } ]"), conf, "a duration is written as"},
		{dir + "glm.yaml", dir + "fleet.yaml", "nowhere", "nowhere"},
	} {
		args := []string{"explain", "--config", c.config}
		if c.request != "" {
			args = append(args, "--request", c.request)
		}
		if c.fleet != "" {
			args = append(args, "--fleet", c.fleet)
		}
		if _, errs, code := kinfctl(t, args...); code != 2 || !strings.Contains(errs, c.want) {
			t.Errorf("%v: code %d, %s; want %q", args, code, errs, c.want)
		}
	}
	if _, errs, code := kinfctl(t, "explain", "r", "-o", "xml"); code != 2 || !strings.Contains(errs, "want table, json, yaml") {
		t.Errorf("code %d, %s", code, errs)
	}
}
