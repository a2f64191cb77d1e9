package fleetsim

import (
	"os"
	"syscall"
	"time"
	"unsafe"
)

// alarm wakes one goroutine at exact instants. The runtime's timers wake up to
// a millisecond late when a processor is idle (it sleeps in epoll_wait, whose
// unit that is), which at 20 times real speed would be 20 ms in every
// iteration. A kernel timer behind a file descriptor ends epoll_wait at once.
type alarm struct {
	f    *os.File
	conn syscall.RawConn
	buf  [8]byte
}

type timerSpec struct{ interval, value syscall.Timespec }

func newAlarm() *alarm {
	const monotonic, nonblockCloexec = 1, syscall.O_NONBLOCK | syscall.O_CLOEXEC
	fd, _, errno := syscall.Syscall(syscall.SYS_TIMERFD_CREATE, monotonic, nonblockCloexec, 0)
	if errno != 0 {
		return &alarm{} // falls back to timers
	}
	f := os.NewFile(fd, "timerfd")
	conn, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return &alarm{}
	}
	return &alarm{f: f, conn: conn}
}

// wait returns when d has passed, or false if close was called.
func (a *alarm) wait(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	if a.f == nil {
		time.Sleep(d)
		return true
	}
	spec := timerSpec{value: syscall.NsecToTimespec(int64(d))}
	var errno syscall.Errno
	err := a.conn.Control(func(fd uintptr) {
		_, _, errno = syscall.Syscall6(syscall.SYS_TIMERFD_SETTIME, fd, 0, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
	})
	if err != nil || errno != 0 {
		return false
	}
	_, err = a.f.Read(a.buf[:])
	return err == nil
}

// close ends a wait under way and all later ones.
func (a *alarm) close() {
	if a.f != nil {
		a.f.Close()
	}
}
