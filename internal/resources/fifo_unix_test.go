//go:build unix

package resources_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/resources"
)

// What is no regular file is refused, and not waited for; one that is named may be a pipe.
func TestNoRegularFile(t *testing.T) {
	fifo, device := t.TempDir(), t.TempDir()
	pipe := filepath.Join(fifo, "pipe.yaml")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(device, "zero.yaml")); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{fifo, device} {
		found := make(chan resources.Problems, 1)
		go func() {
			_, ps := resources.Load(dir)
			found <- ps
		}()
		select {
		case ps := <-found:
			if len(ps) != 1 || !strings.HasSuffix(ps[0].String(), ".yaml: error: is no regular file: only those are read in a folder") {
				t.Errorf("got %v", ps)
			}
		case <-time.After(time.Minute):
			t.Fatalf("it waits for %s", dir)
		}
	}
	if _, ps := (resources.Options{}).Load(filepath.Join(device, "zero.yaml")); len(ps) != 1 || !strings.Contains(ps[0].String(), "larger than") {
		t.Errorf("a device without end: got %v", ps)
	}
	wrote := make(chan error, 1)
	go func() { wrote <- os.WriteFile(pipe, []byte("{}"), 0o600) }()
	if _, ps := (resources.Options{}).Load(pipe); len(ps) != 1 || !strings.Contains(ps[0].String(), "apiVersion") {
		t.Errorf("a pipe that is named: got %v", ps)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
}
