package testenv

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main runs the tests of a package and fails it where they leave goroutines behind, as
// goleak.VerifyTestMain does, but for the patience of Leaks.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := Leaks(); err != nil {
			fmt.Fprintln(os.Stderr, "goroutines are left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Leaks waits for the end of all goroutines but the one that calls it, and names those
// that are left after a minute. goleak alone looks for a second: where all the parts of a
// stack share a busy machine, one of them may get no time for as long.
func Leaks() error {
	for deadline := time.Now().Add(time.Minute); ; {
		if err := goleak.Find(); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
