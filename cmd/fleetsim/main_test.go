package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/resources"
)

// serve runs the command and returns a reader of its output.
func serve(t *testing.T, args ...string) *bufio.Reader {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	out, in := io.Pipe()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer in.Close()
		if err := run(ctx, args, in, t.Output()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); out.Close(); wg.Wait() })
	return bufio.NewReader(out)
}

func TestWorkersServe(t *testing.T) {
	out := serve(t, "--workers", "2", "--ranks", "2", "--time-scale", "100", "--served-model-name", "m,alias", "--admin", "--speed", "1,0.5")
	for i := range 2 {
		text, err := out.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		var l struct {
			Name, URL, Model string
			Events           []string `json:"kvEvents"`
			Replays          []string `json:"kvReplay"`
		}
		if err := json.Unmarshal(text, &l); err != nil {
			t.Fatal(err)
		}
		if l.Model != "m" || len(l.Events) != 2 || len(l.Replays) != 2 {
			t.Errorf("worker %d: %s", i, text)
		}
		resp, err := http.Post(l.URL+"/v1/chat/completions", "application/json", strings.NewReader(`{"model":"alias","messages":[{"role":"user","content":"hi"}],"max_tokens":3}`))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !bytes.Contains(body, []byte(`"completion_tokens":3`)) {
			t.Errorf("%s %s %v", resp.Status, body, err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// What --print-config prints is what the control plane reads.
func TestPrintedConfigLoads(t *testing.T) {
	out := serve(t, "--workers", "3", "--print-config", "--lora", "sql,py", "--served-model-name", `Qwen/Qwen3.6-27B,"odd"`, "--kv-events-topic", "kv")
	var text strings.Builder
	for !strings.Contains(text.String(), "destinations:") || !strings.HasSuffix(text.String(), "name: sim }\n") {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		text.WriteString(line)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "fleet.yaml"), []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	c, problems := resources.Load(dir)
	if len(problems) > 0 {
		t.Fatalf("%v in\n%s", problems, text.String())
	}
	if len(c.Sets) != 1 || len(c.Sets[0].Workers) != 3 || c.Sets[0].Workers[2].KVReplay == "" {
		t.Errorf("%+v", c)
	}
}

func TestBadFlags(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"--profile tpu", "tpu"},
		{"--vllm-version 7", "vllm-version"},
		{"--workers 0", "workers"},
		{"--workers 2 --speed 1,2,3", "speed"},
		{"--speed -1", "speed"},
		{"--faults {", "faults"},
		{"--tokenizer /nonexistent", "tokenizer"},
		{"--prefix-caching-hash-algo md5", "md5"},
		{"extra", "extra"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		err := run(ctx, strings.Fields(c.args), io.Discard, io.Discard)
		cancel()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.args, err)
		}
	}
}
