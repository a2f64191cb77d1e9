package rig

import (
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

var locked struct {
	sync.Mutex
	file  *os.File
	users int
}

// lock lets the engines of one test process at a time run on a machine: more
// would only slow each other down until all of them time out. It is given back
// when the last test of the process that uses engines ends.
func lock(tb testing.TB) {
	tb.Helper()
	locked.Lock()
	defer locked.Unlock()
	if locked.users == 0 {
		f, err := os.OpenFile(filepath.Join(os.TempDir(), "kinference-vllm.lock"), os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			tb.Fatal(err)
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			tb.Log("waiting for the engines of another test process")
			if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
				tb.Fatal(err)
			}
		}
		locked.file = f
	}
	locked.users++
	tb.Cleanup(func() {
		locked.Lock()
		defer locked.Unlock()
		if locked.users--; locked.users == 0 {
			locked.file.Close()
		}
	})
}
