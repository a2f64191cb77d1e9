package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asKinfctl makes the test's own program the command.
const asKinfctl = "KINFCTL_TEST_RUN"

func TestMain(m *testing.M) {
	if os.Getenv(asKinfctl) != "" {
		os.Exit(run())
	}
	os.Exit(m.Run())
}

// What does not look whether it should end, such as the read of a file that hangs, is
// ended by a second signal.
func TestSecondSignal(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pipe.yaml")
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "validate", file)
	cmd.Env = append(os.Environ(), asKinfctl+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	w, err := os.OpenFile(file, os.O_WRONLY, 0) // once it reads
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	tick, late := time.NewTicker(20*time.Millisecond), time.After(30*time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_ = cmd.Process.Signal(os.Interrupt) // it may have ended
		case err := <-done:
			if err == nil {
				t.Error("it ends well")
			}
			return
		case <-late:
			_ = cmd.Process.Kill()
			t.Fatal("it does not end")
		}
	}
}

// A wrong call ends with 2, whether it is a word, an argument or a flag that is wrong,
// and nothing that is no command ends well.
func TestMisuse(t *testing.T) {
	for call, want := range map[string]int{
		"": 0, "get": 0, "help": 0, "validate testdata/nothing": 1,
		"nonsense": 2, "stats": 2, "get nothing": 2, "get workers x": 2, "keys nothing": 2, "classifier nothing": 2, "completion fishy": 2, "usage nothing": 2,
		"validate": 2, "status extra": 2, "index x": 2, "keys create": 2, "keys create a b": 2, "top --nope": 2, "explain": 2, "get workers -o xml": 2,
	} {
		cmd := command()
		cmd.SetArgs(strings.Fields(call))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); exitCode(err) != want {
			t.Errorf("kinfctl %s: %d, want %d: %v", call, exitCode(err), want, err)
		} else if call == "stats" && !strings.Contains(err.Error(), "status") {
			t.Errorf("no hint in %v", err)
		}
	}
}
