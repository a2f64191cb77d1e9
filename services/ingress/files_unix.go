//go:build unix

package ingress

import (
	"math"
	"syscall"
)

// openFiles is how many files the process may open.
func openFiles() int64 {
	var r syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r) != nil {
		return math.MaxInt64
	}
	return int64(min(uint64(r.Cur), math.MaxInt64)) //nolint:unconvert // a signed number on some systems
}
