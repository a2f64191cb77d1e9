package layers

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// scripts/newcomer.sh ends at once when what it times does, wherever it has got to.
func TestNewcomerEnds(t *testing.T) {
	for name, makes := range map[string]string{
		"before the first token": `echo "cannot build"; exit 2`,
		"before it says more":    `echo "data: {}"`,
		"before the refusal":     `echo "data: {}"; echo "# a first policy"`,
	} {
		t.Run(name, func(t *testing.T) {
			bin := t.TempDir()
			for program, text := range map[string]string{
				"git":  `mkdir -p "$4/out/dev" "$4/deploy/examples/policies" && touch "$4/deploy/examples/policies/first.yaml"`, // clone -q FROM TO
				"make": makes,
				"curl": "echo 000; exit 7", // nobody is there
			} {
				if err := os.WriteFile(filepath.Join(bin, program), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil { //nolint:gosec // a program
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			cmd := exec.CommandContext(ctx, "bash", "../../scripts/newcomer.sh")
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
			cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
			cmd.WaitDelay = 5 * time.Second
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if ctx.Err() != nil || !errors.As(err, &exit) || !strings.Contains(string(out), "make dev has ended") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
