// Package model holds the tokenizer and chat template of the simulated model: a small vocabulary trained on generated text, in
// the same files as a real model's, so that the simulator, the ingress in front of it and their tests count the same tokens.
//
// fleetsim, the demo and benchmarks use it. All functions are safe for concurrent use; they fail only where the cache
// folder cannot be written.
package model

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
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
	base, err := os.UserCacheDir()
	if err != nil { // no home: a container, for instance
		base = os.TempDir()
	}
	sum := sha256.New()
	for _, name := range files {
		data, err := FS.ReadFile(name)
		if err != nil {
			return "", err
		}
		sum.Write(data)
	}
	to := filepath.Join(base, "kinference", fmt.Sprintf("simulated-model-%x", sum.Sum(nil)[:4]))
	for _, name := range files {
		want, err := FS.ReadFile(name)
		if err != nil {
			return "", err
		}
		if have, err := os.ReadFile(filepath.Join(to, name)); err == nil && bytes.Equal(have, want) {
			continue
		}
		if err := replace(filepath.Join(to, name), want); err != nil {
			return "", fmt.Errorf("write simulated model: %w", err)
		}
	}
	return to, nil
})

// replace writes a file so that whoever reads it sees the old one or the new one.
func replace(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone once it has its name
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// Dir returns a folder that holds the files of FS, for what loads a model by path. It is in the user's cache folder, and is
// written there by the first process that needs it.
func Dir() (string, error) { return dir() }

var files = []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}

// CopyTo writes the files of FS into folder to, which is made if needed, for a model folder that outlives the process.
func CopyTo(to string) error {
	for _, name := range files {
		data, err := FS.ReadFile(name)
		if err != nil {
			return err
		}
		if err := replace(filepath.Join(to, name), data); err != nil {
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
