package chaos

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// process is a program at a place that a test ends and starts again with the same
// command. Its methods are for one goroutine.
type process struct {
	*place
	t    *testing.T
	name string
	bin  string
	args []string
	log  string // file
	well func() bool

	cmd  *exec.Cmd
	done chan struct{}
}

// newProcess starts a program that ends with the test; well reports that it works.
func (c *cluster) newProcess(name string, at *place, well func() bool, bin string, args ...string) *process {
	c.t.Helper()
	p := &process{place: at, t: c.t, name: name, bin: bin, args: args, well: well, log: filepath.Join(c.dir, name+".log")}
	p.start()
	c.t.Cleanup(func() {
		p.signal(syscall.SIGCONT)
		p.end(syscall.SIGTERM)
		if c.t.Failed() && p.args[0] == "--admin-listen" {
			c.t.Logf("%s:\n%s", name, p.tail(2<<10))
		}
	})
	return p
}

func (p *process) start() {
	p.t.Helper()
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer out.Close()
	p.cmd = p.command(p.bin, p.args...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if err := p.cmd.Start(); err != nil {
		p.t.Fatalf("start %s: %v", p.name, err)
	}
	p.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) { _ = cmd.Wait(); close(done) }(p.cmd, p.done)
}

func (p *process) signal(s syscall.Signal) { _ = syscall.Kill(-p.cmd.Process.Pid, s) } // it may have ended

// end sends a signal and waits; SIGKILL is what it gets if it takes too long.
func (p *process) end(s syscall.Signal) {
	p.signal(s)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Errorf("%s did not end within 30 s of a signal", p.name)
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

func (p *process) tail(n int) string {
	raw, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-n):])
}

// built is the folder of programs that was made here.
var built string

// programs are what the suite runs, built once for all tests unless they are given.
var programs = sync.OnceValues(func() (dir string, err error) {
	if *bins != "" {
		return filepath.Abs(*bins)
	}
	if dir, err = os.MkdirTemp("", "kinference-chaos"); err != nil {
		return "", err
	}
	built = dir
	args := []string{"build", "-o", dir + "/"}
	for _, s := range []string{"ingress", "router", "kvtracker", "limiter", "classifier", "accounting"} {
		args = append(args, "github.com/kinference/kinference/services/"+s+"/cmd/"+s)
	}
	for _, args := range [][]string{args, {"build", "-o", dir + "/nats-server", "github.com/nats-io/nats-server/v2"}} {
		cmd := exec.Command("go", args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return dir, &buildError{err, string(out)}
		}
	}
	return dir, nil
})

type buildError struct {
	error
	out string
}

func (e *buildError) Error() string {
	return "build: " + e.error.Error() + ": " + strings.TrimSpace(e.out)
}

// eventually polls a condition for d.
func eventually(d time.Duration, ok func() bool) bool {
	deadline, tick := time.After(d), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			return false
		}
	}
	return true
}

// pause waits; what it waits for is time itself.
func pause(d time.Duration) { <-time.After(d) }
