// Package model holds the tokenizer and chat template of the simulated model: a small vocabulary trained on generated text, in
// the same files as a real model's, so that the simulator, the ingress in front of it and their tests count the same tokens.
//
// fleetsim, the demo and benchmarks use it. All functions are safe for concurrent use; they fail only where the temporary
// folder cannot be written.
package model

import (
	"embed"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

//go:generate go run ./train .

// FS holds tokenizer.json, tokenizer_config.json and chat_template.jinja.
//
//go:embed tokenizer.json tokenizer_config.json chat_template.jinja
var FS embed.FS

// ContextLength is the model's maximum length in tokens, as tokenizer_config.json states it.
const ContextLength = 262144

var dir = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kinference-model-")
	if err != nil {
		return "", fmt.Errorf("write simulated model: %w", err)
	}
	if err := os.CopyFS(dir, FS); err != nil {
		return "", fmt.Errorf("write simulated model: %w", err)
	}
	return dir, nil
})

// Dir returns a folder that holds the files of FS, for what loads a model by path. It is written to the temporary folder at the
// first call and stays for the life of the process and after.
func Dir() (string, error) { return dir() }

// CopyTo writes the files of FS into folder to, which is made if needed, for a model folder that outlives the process.
func CopyTo(to string) error {
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} {
		data, err := FS.ReadFile(name)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, name), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

//go:embed train/words.txt
var wordList string

// Words returns common English words that are one token each when a space stands before them. Callers must not change it.
var Words = sync.OnceValue(func() []string { return strings.Fields(wordList) })

// Text appends n words chosen by rng to b, each with a space before it: exactly n tokens wherever it stands after a word, a
// line break or a special token, and about 6 bytes a token.
func Text(b *strings.Builder, rng *rand.Rand, n int) {
	words := Words()
	for range n {
		b.WriteByte(' ')
		b.WriteString(words[rng.IntN(len(words))])
	}
}
