package acceptance

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

// process is a started binary that ends with the test.
type process struct {
	cmd    *exec.Cmd
	stdout io.ReadCloser
	stderr *syncBuffer
}

func run(t *testing.T, bin string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(bin, args...), stderr: &syncBuffer{}}
	p.cmd.Stderr = p.stderr
	var err error
	if p.stdout, err = p.cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", bin, err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
		err := p.cmd.Wait()
		if !kill.Stop() {
			t.Errorf("%s did not end within a minute of SIGTERM", filepath.Base(bin))
		} else if err != nil {
			t.Errorf("%s ended with %v", filepath.Base(bin), err)
		}
		if t.Failed() {
			t.Logf("%s:\n%s", filepath.Base(bin), p.stderr.tail(8<<10))
		}
	})
	return p
}

// build builds the binaries of packages into a folder of the test.
func build(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"build", "-o", dir + "/"}
	for _, n := range names {
		args = append(args, "github.com/kinference/kinference/"+n)
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return dir
}

// The second page of the README: simulated workers as processes of their own,
// kinference in front of them, driven by curl and by the official OpenAI
// client, and kinfctl to ask why.
func TestServeInFrontOfExistingWorkers(t *testing.T) {
	bin := build(t, "cmd/kinference", "cmd/fleetsim", "cmd/kinfctl")
	conf := t.TempDir()

	fleet := run(t, filepath.Join(bin, "fleetsim"), "--workers", "3", "--time-scale", "50", "--profile", "l40s-plain16", "--model", modelName, "--print-config")
	var yaml strings.Builder
	in := bufio.NewReader(fleet.stdout)
	for !strings.Contains(yaml.String(), "kind: InferenceWorkerSet, name: sim") { // the last line
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatalf("read the fleet's resources: %v\n%s", err, yaml.String())
		}
		yaml.WriteString(line)
	}
	if err := os.WriteFile(filepath.Join(conf, "fleet.yaml"), []byte(yaml.String()), 0o644); err != nil {
		t.Fatal(err)
	}

	addr, admin := testenv.FreeAddr(t), testenv.FreeAddr(t)
	serve := run(t, filepath.Join(bin, "kinference"), "serve", "--config", conf, "--listen", addr, "--admin-listen", admin, "--router-listen", "127.0.0.1:0", "--admin-api-listen", "127.0.0.1:0", "--accounting-listen", "127.0.0.1:0")
	var forKinfctl []string // what serve says to export
	for lines := bufio.NewScanner(serve.stdout); forKinfctl == nil && lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) == 3 && f[0] == "export" {
			forKinfctl = f[1:]
		}
	}
	client := &http.Client{}
	defer client.CloseIdleConnections()
	e := &env{t: t}
	e.eventually("endpoint is ready", func() bool {
		resp, err := client.Get("http://" + admin + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return false
		}
		resp, err = client.Post("http://"+addr+"/v1/chat/completions", "application/json", strings.NewReader(req{text: "x"}.body()))
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})

	t.Run("curl", func(t *testing.T) {
		out, err := exec.CommandContext(t.Context(), "curl", "-sS", "-D", "-", "http://"+addr+"/v1/chat/completions", "-H", "content-type: application/json",
			"-d", `{"model": "`+modelName+`", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "stream": true}`).CombinedOutput()
		if err != nil {
			t.Fatalf("curl: %v\n%s", err, out)
		}
		if !bytes.Contains(out, []byte("data: [DONE]")) || !bytes.Contains(out, []byte("200 OK")) {
			t.Errorf("curl got:\n%s", out)
		}
		id := ""
		for _, line := range strings.Split(string(out), "\n") {
			if name, v, ok := strings.Cut(line, ":"); ok && strings.EqualFold(name, "x-request-id") {
				id = strings.TrimSpace(v)
			}
		}
		kinfctl := exec.CommandContext(t.Context(), filepath.Join(bin, "kinfctl"), "explain", id)
		kinfctl.Env = append(os.Environ(), forKinfctl...)
		why, err := kinfctl.CombinedOutput()
		if err != nil || !bytes.Contains(why, []byte("predicted")) {
			t.Errorf("kinfctl explain %s: %v\n%s", id, err, why)
		}
	})

	t.Run("openai client", func(t *testing.T) {
		dir, err := filepath.Abs("../interop/openai")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(dir, "node_modules", "openai")); err != nil {
			if os.Getenv("KINFERENCE_INTEROP") == "1" {
				t.Fatalf("the OpenAI client is not installed: %v", err)
			}
			t.Skip("SKIPPED: the OpenAI client is not installed; run scripts/deps.sh")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "node", "client.mjs", "http://"+addr+"/v1", modelName)
		cmd.Dir = dir
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("client: %v\n%s", err, stderr.String())
		}
		checkClient(t, out)
	})
}

// checkClient checks what the official client saw.
func checkClient(t *testing.T, out []byte) {
	t.Helper()
	type usage struct {
		Prompt  int `json:"prompt_tokens"`
		Output  int `json:"completion_tokens"`
		Details *struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	type failure struct {
		Name, Code, Type, RequestID string
		Status                      int
	}
	var got struct {
		Models []string
		Chat   struct {
			Content, Finish, Model string
			Usage                  usage
		}
		Stream struct {
			Content                           string
			Chunks, UsageChunks, EmptyChoices int
		}
		Counted struct {
			Content string
			Usage   *usage
		}
		Completion struct {
			Text  string
			Usage usage
		}
		UnknownModel, TooLong *failure
		AfterAbandon          string
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("decode %s: %v", out, err)
	}
	if len(got.Models) == 0 || got.Models[0] == "" {
		t.Errorf("models: got %v", got.Models)
	}
	if got.Chat.Content == "" || got.Chat.Usage.Output != 8 || got.Chat.Finish != "length" || got.Chat.Model != modelName {
		t.Errorf("chat: got %+v", got.Chat)
	}
	if got.Stream.Content != got.Chat.Content {
		t.Errorf("stream says %q, the whole answer was %q", got.Stream.Content, got.Chat.Content)
	}
	if got.Stream.UsageChunks != 0 || got.Stream.EmptyChoices != 0 {
		t.Errorf("a client that did not ask for usage saw %d usage chunks and %d chunks without choices", got.Stream.UsageChunks, got.Stream.EmptyChoices)
	}
	if got.Counted.Usage == nil || got.Counted.Usage.Output != 8 || got.Counted.Usage.Details == nil || got.Counted.Usage.Details.Cached == nil {
		t.Errorf("a client that asked for usage got %+v", got.Counted.Usage)
	}
	if got.Completion.Text == "" || got.Completion.Usage.Output != 4 {
		t.Errorf("completion: got %+v", got.Completion)
	}
	if f := got.UnknownModel; f == nil || f.Status != 404 || f.Code != "model_not_found" || f.Name != "NotFoundError" || f.RequestID == "" {
		t.Errorf("unknown model: got %+v", f)
	}
	if f := got.TooLong; f == nil || f.Status != 400 || f.Code != "context_length_exceeded" || f.Name != "BadRequestError" {
		t.Errorf("long prompt: got %+v", f)
	}
	if got.AfterAbandon != "length" {
		t.Errorf("after an abandoned stream: got finish reason %q", got.AfterAbandon)
	}
}
