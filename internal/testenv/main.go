package testenv

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Main runs the tests of a package and fails it where they leave goroutines behind, as
// goleak.VerifyTestMain does. It waits longer for their end: where all the parts of a
// stack share a busy machine, one of them may get no time for a second.
func Main(m *testing.M) {
	code := m.Run()
	for deadline := time.Now().Add(time.Minute); code == 0; {
		err := goleak.Find()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintln(os.Stderr, "goroutines are left behind:", err)
			code = 1
		}
	}
	os.Exit(code)
}
