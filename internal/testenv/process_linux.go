package testenv

import "syscall"

// ownGroup makes a process group of its own, which ends with the test process,
// also when that is killed.
func ownGroup() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
