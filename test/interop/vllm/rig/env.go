// Package rig starts real vLLM engines with tiny models, and the real control
// plane in front of them, for the tests and benchmarks of test/interop/vllm.
//
// The engines come from a virtual environment that scripts/interop-vllm.sh
// makes; without it Require skips the test and says so. Engines listen on
// loopback ports that were free, each is a process group of its own, and all
// of them are killed at the end of the test. One test at a time.
package rig

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Env is where the engines come from.
type Env struct {
	// Venv is a Python virtual environment with vLLM.
	Venv string
	// Models is the folder of the tiny models.
	Models string
}

// Model is the folder of a model by its name.
func (e Env) Model(name string) string { return filepath.Join(e.Models, name) }

// Require returns the environment of scripts/interop-vllm.sh. Without
// KINFERENCE_VLLM the test is skipped.
func Require(tb testing.TB) Env {
	tb.Helper()
	e := Env{Venv: os.Getenv("KINFERENCE_VLLM"), Models: os.Getenv("KINFERENCE_VLLM_MODELS")}
	if e.Venv == "" {
		tb.Skip("NOT TESTED against vLLM: run make interop-vllm")
	}
	if _, err := os.Stat(filepath.Join(e.Venv, "bin", "vllm")); err != nil {
		tb.Fatalf("KINFERENCE_VLLM names no environment with vLLM: %v", err)
	}
	if e.Models == "" {
		tb.Fatal("KINFERENCE_VLLM_MODELS is not set")
	}
	tb.Logf("vLLM %s", e.Version(tb))
	return e
}

var versions sync.Map // by venv

// Version is vLLM's own version.
func (e Env) Version(tb testing.TB) string {
	tb.Helper()
	if v, ok := versions.Load(e.Venv); ok {
		return v.(string)
	}
	out, err := exec.CommandContext(tb.Context(), filepath.Join(e.Venv, "bin", "python"), "-c", "import importlib.metadata as m; print(m.version('vllm'))").Output()
	if err != nil {
		tb.Fatalf("read the version of vLLM: %v", err)
	}
	v := strings.TrimSpace(string(out))
	versions.Store(e.Venv, v)
	return v
}
