package chat_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/model"
)

// realFolder returns the folder of a real model's files. If they have not been fetched it skips the test, or fails it where the
// environment demands real ones.
func realFolder(t testing.TB, name string) string {
	t.Helper()
	root := os.Getenv("KINFERENCE_TOKENIZERS")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		root = filepath.Join(home, ".cache", "kinference", "tokenizers")
	}
	dir := filepath.Join(root, name+"-3.7.2")
	if _, err := os.Stat(filepath.Join(dir, "tokenizer_config.json")); err != nil {
		const hint = "NOT CHECKED AGAINST THE REFERENCE: run scripts/fetch-tokenizers.sh"
		if os.Getenv("KINFERENCE_INTEROP") == "1" {
			t.Fatalf("model %s: %v; %s", name, err, hint)
		}
		t.Skipf("model %s is not there. %s", name, hint)
	}
	return dir
}

func load(t testing.TB, name string) *chat.Template {
	t.Helper()
	var tmpl *chat.Template
	var err error
	switch name {
	case "parts":
		var source []byte
		if source, err = os.ReadFile("testdata/parts.jinja"); err == nil {
			tmpl, err = chat.Parse(string(source), map[string]string{"bos_token": "<s>", "eos_token": "</s>"})
		}
	case "model":
		var dir string
		if dir, err = model.Dir(); err == nil {
			tmpl, err = chat.Load(dir)
		}
	default:
		tmpl, err = chat.Load(realFolder(t, name))
	}
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

// body is a chat completion request as a client writes it.
type body struct {
	Messages             json.RawMessage `json:"messages"`
	Tools                json.RawMessage `json:"tools"`
	AddGenerationPrompt  bool            `json:"add_generation_prompt"`
	ContinueFinalMessage bool            `json:"continue_final_message"`
	Kwargs               json.RawMessage `json:"chat_template_kwargs"`
	ReasoningEffort      string          `json:"reasoning_effort"`
	Documents            json.RawMessage `json:"documents"`
}

type testCase struct {
	Name    string
	Request body
}

func cases(t testing.TB) []testCase {
	t.Helper()
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var all []testCase
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestGolden compares prompts with Hugging Face's Jinja; test/interop/tokens/regen.sh wrote the goldens. A null there is an error.
func TestGolden(t *testing.T) {
	for _, name := range []string{"model", "parts", "qwen3", "llama3_1", "deepseek_v3"} {
		t.Run(name, func(t *testing.T) {
			tmpl := load(t, name)
			data, err := os.ReadFile(filepath.Join("testdata", name+".golden.json"))
			if err != nil {
				t.Fatal(err)
			}
			var golden map[string]*string
			if err := json.Unmarshal(data, &golden); err != nil {
				t.Fatal(err)
			}
			compared := 0
			for _, c := range cases(t) {
				want, ok := golden[c.Name]
				if !ok {
					continue
				}
				compared++
				got, err := tmpl.Render(chat.Request(c.Request))
				if want == nil {
					if ce := (*chat.Error)(nil); !errors.As(err, &ce) {
						t.Errorf("%s: got %q, error %v; want a chat.Error", c.Name, got, err)
					}
					continue
				}
				if err != nil {
					t.Errorf("%s: %v", c.Name, err)
				} else if diff := cmp.Diff(*want, got); diff != "" {
					t.Errorf("%s (-want +got):\n%s", c.Name, diff)
				}
			}
			t.Logf("%d prompts compared", compared)
			if compared < 20 {
				t.Errorf("only %d prompts compared", compared)
			}
		})
	}
}

func TestNoTemplate(t *testing.T) {
	if _, err := chat.Load(t.TempDir()); !errors.Is(err, chat.ErrNoTemplate) {
		t.Errorf("empty folder: got error %v, want ErrNoTemplate", err)
	}
	// gpt-oss has none: vLLM renders it by its Harmony encoder.
	if _, err := chat.Load(realFolder(t, "gptoss")); !errors.Is(err, chat.ErrNoTemplate) {
		t.Errorf("gpt-oss: got error %v, want ErrNoTemplate", err)
	}
}

// TestSnippets renders small templates, one for each thing that chat templates do. templates are compared with Hugging Face's Jinja
// for JavaScript, python with what Jinja itself prints where the JavaScript one does not (True, not true). deviating are the
// known differences from Jinja, which go unnoticed in every template seen so far; refused do not compile.
func TestSnippets(t *testing.T) {
	var file struct {
		Variables map[string]json.RawMessage
		Templates []string
		Python    map[string]string
		Deviating []struct{ Template, Python, Ours string }
		Refused   []string
	}
	var golden []string
	for name, into := range map[string]any{"snippets.json": &file, "snippets.golden.json": &golden} {
		data, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, into); err != nil {
			t.Fatal(err)
		}
	}
	want := file.Python
	for i, source := range file.Templates {
		want[source] = golden[i]
	}
	for _, d := range file.Deviating {
		if want[d.Template] = d.Ours; d.Ours == d.Python {
			t.Errorf("%s deviates no longer", d.Template)
		}
	}
	messages := file.Variables["messages"]
	delete(file.Variables, "messages")
	kwargs, err := json.Marshal(file.Variables)
	if err != nil {
		t.Fatal(err)
	}
	for source, want := range want {
		tmpl, err := chat.Parse(source, nil)
		if err != nil {
			t.Errorf("%s: %v", source, err)
			continue
		}
		got, err := tmpl.Render(chat.Request{Messages: messages, Kwargs: kwargs})
		if err != nil {
			t.Errorf("%s: %v", source, err)
		} else if got != want {
			t.Errorf("%s\n got %q\nwant %q", source, got, want)
		}
	}
	for _, source := range file.Refused {
		if tmpl, err := chat.Parse(source, nil); err == nil {
			if got, err := tmpl.Render(chat.Request{Messages: messages, Kwargs: kwargs}); err == nil {
				t.Errorf("%s renders %q, want it refused", source, got)
			}
		}
	}
}
