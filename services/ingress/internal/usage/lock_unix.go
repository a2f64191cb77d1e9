//go:build unix

package usage

import (
	"os"
	"syscall"
)

// lock keeps other processes from using a folder until it is closed.
func lock(dir *os.File) error { return syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }
