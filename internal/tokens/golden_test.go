package tokens_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/internal/tokens/corpus"
)

// realVersion is the version of the packages that scripts/fetch-tokenizers.sh fetches.
const realVersion = "3.7.2"

var real = []string{"qwen3", "llama3_1", "gptoss", "deepseek_v3"}

// find returns the folder of a tokenizer by its golden's name, with an error if it has not been fetched.
func find(t testing.TB, name string) (string, error) {
	t.Helper()
	if name == "model" {
		dir, err := model.Dir()
		if err != nil {
			t.Fatal(err)
		}
		return dir, nil
	}
	root := os.Getenv("KINFERENCE_TOKENIZERS")
	if root == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		root = filepath.Join(home, ".cache", "kinference", "tokenizers")
	}
	dir := filepath.Join(root, name+"-"+realVersion)
	_, err := os.Stat(filepath.Join(dir, "tokenizer.json"))
	return dir, err
}

// folder is find. A tokenizer that has not been fetched skips the test, or fails it where the environment demands real ones.
func folder(t testing.TB, name string) string {
	t.Helper()
	dir, err := find(t, name)
	if err != nil {
		const hint = "NOT CHECKED AGAINST THE REFERENCE: run scripts/fetch-tokenizers.sh"
		if os.Getenv("KINFERENCE_INTEROP") == "1" {
			t.Fatalf("tokenizer %s: %v; %s", name, err, hint)
		}
		t.Skipf("tokenizer %s is not there. %s", name, hint)
	}
	return dir
}

var loaded sync.Map // folder name to func() (*tokens.Tokenizer, error): loading a real one takes most of a second

func load(t testing.TB, name string) *tokens.Tokenizer {
	t.Helper()
	dir := folder(t, name)
	once, _ := loaded.LoadOrStore(name, sync.OnceValues(func() (*tokens.Tokenizer, error) { return tokens.Load(dir) }))
	tok, err := once.(func() (*tokens.Tokenizer, error))()
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// loadChanged loads a tokenizer whose tokenizer.json edit has changed.
func loadChanged(t testing.TB, name string, edit func(file map[string]any)) (*tokens.Tokenizer, error) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(folder(t, name), "tokenizer.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if err := dec.Decode(&file); err != nil {
		t.Fatal(err)
	}
	edit(file)
	if data, err = json.Marshal(file); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	return tokens.Load(dir)
}

var texts = sync.OnceValue(corpus.Texts)

// TestGolden compares every id of the corpus with Hugging Face's own tokenizers; test/interop/tokens/regen.sh wrote the goldens.
func TestGolden(t *testing.T) {
	for _, name := range append([]string{"model"}, real...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkGolden(t, name, load(t, name))
		})
	}
	t.Run("qwen3_marks", func(t *testing.T) {
		t.Parallel()
		tok, err := loadChanged(t, "qwen3", func(file map[string]any) {
			split := file["pre_tokenizer"].(map[string]any)["pretokenizers"].([]any)[0].(map[string]any)
			pattern := split["pattern"].(map[string]any)
			s := strings.Replace(pattern["Regex"].(string), `]?\p{L}+`, `]?[\p{L}\p{M}]+`, 1)
			pattern["Regex"] = strings.Replace(s, `[^\s\p{L}\p{N}]+`, `[^\s\p{L}\p{M}\p{N}]+`, 1)
		})
		if err != nil {
			t.Fatal(err)
		}
		checkGolden(t, "qwen3_marks", tok)
	})
	t.Run("model_strip", func(t *testing.T) {
		tok, err := loadChanged(t, "model", func(file map[string]any) {
			for _, a := range file["added_tokens"].([]any) {
				a := a.(map[string]any)
				a["lstrip"] = a["content"] != "<|im_end|>"
				a["rstrip"] = a["content"] != "<|im_start|>"
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		checkGolden(t, "model_strip", tok)
	})
}

func checkGolden(t *testing.T, name string, tok *tokens.Tokenizer) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name+".golden"))
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
	if len(want) != len(texts()) {
		t.Fatalf("%d golden lines for %d texts", len(want), len(texts()))
	}
	wrong := 0
	var ids []uint32
	for i, text := range texts() {
		ids = tok.Encode(ids[:0], text, false)
		if got := corpus.Digest(ids); got != want[i] {
			if wrong++; wrong <= 5 {
				t.Errorf("text %d: got %s, want %s for %.300q", i, got, want[i], text)
			}
		}
	}
	t.Logf("%d wrong of %d", wrong, len(want))
}
