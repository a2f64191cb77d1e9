package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// site is where processes run: each at an address of its own, on the ports that it
// has in production. With the rights for it, each is in a network namespace, which
// hangs on a bridge of this machine and can be cut off it; else all are on the
// loopback interface, and nothing can be cut off.
type site struct {
	t         *testing.T
	separated bool
	net       string // first three numbers of the addresses
	bridge    string
	places    int
}

// place is one address.
type place struct {
	site *site
	addr string
	ns   string // network namespace; empty: none
	link string // its end of the bridge
}

// newSite makes a site that ends with the test. Namespaces that a killed test has
// left are removed.
func newSite(t *testing.T) *site {
	t.Helper()
	sweep()
	s := &site{t: t, bridge: fmt.Sprintf("kc%d", os.Getpid())}
	s.net = fmt.Sprintf("10.%d.%d", 64+rand.IntN(128), rand.IntN(256))
	err := ip(fmt.Sprintf("link add %[1]s type bridge\naddress add %[2]s.1/24 dev %[1]s\nlink set %[1]s up\nnetns add %[1]s-0\n", s.bridge, s.net))
	if err == nil {
		s.separated = true
		t.Cleanup(func() { _ = ip("netns delete " + s.bridge + "-0\nlink delete " + s.bridge + "\n") })
		return s
	}
	_ = ip("link delete " + s.bridge + "\n")
	if os.Getenv("KINFERENCE_INTEROP") == "1" && os.Geteuid() == 0 {
		t.Fatalf("network namespaces: %v", err)
	}
	t.Logf("NOT TESTED: partitions, because there may be no network namespaces here (%v); all processes share the loopback interface", err)
	s.net = fmt.Sprintf("127.%d.%d", 64+rand.IntN(128), rand.IntN(256))
	return s
}

// host is the address of the test itself, where the simulated workers are.
func (s *site) host() string { return s.net + ".1" }

func (s *site) place() *place {
	s.t.Helper()
	s.places++
	p := &place{site: s, addr: fmt.Sprintf("%s.%d", s.net, s.places+1)}
	if !s.separated {
		return p
	}
	p.ns, p.link = fmt.Sprintf("%s-%d", s.bridge, s.places), fmt.Sprintf("%s-%d", s.bridge, s.places)
	err := ip(fmt.Sprintf(`netns add %[1]s
link add %[2]s type veth peer name eth0 netns %[1]s
link set %[2]s master %[3]s up
`, p.ns, p.link, s.bridge))
	if err == nil {
		err = ip(fmt.Sprintf("address add %s/24 dev eth0\nlink set eth0 up\nlink set lo up\n", p.addr), "-n", p.ns)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = ip("netns delete " + p.ns + "\n") })
	return p
}

// command is a program that runs there and ends with the test process.
func (p *place) command(bin string, args ...string) *exec.Cmd {
	if p.ns != "" {
		bin, args = "ip", append([]string{"netns", "exec", p.ns, bin}, args...)
	}
	cmd := exec.Command(bin, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// cut drops all that comes from the place and goes to it, in silence: its port of
// the bridge is disabled, and connections stay open on both sides. heal ends it.
func (p *place) cut()  { p.port("0") }
func (p *place) heal() { p.port("3") }

func (p *place) port(state string) {
	if out, err := exec.Command("bridge", "link", "set", "dev", p.link, "state", state).CombinedOutput(); err != nil {
		p.site.t.Errorf("bridge: %v: %s", err, out)
	}
}

// ip runs commands of the program ip.
func ip(commands string, options ...string) error {
	cmd := exec.Command("ip", append(options, "-batch", "-")...)
	cmd.Stdin = strings.NewReader(commands)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// sweep removes the namespaces and bridges of tests that are no more.
func sweep() {
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		return
	}
	for line := range strings.Lines(string(out)) {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		bridge, _, _ := strings.Cut(name, "-")
		pid, err := strconv.Atoi(strings.TrimPrefix(bridge, "kc"))
		if err != nil || !strings.HasPrefix(name, "kc") || syscall.Kill(pid, 0) == nil {
			continue
		}
		_ = ip("netns delete " + name + "\n")
		_ = ip("link delete " + bridge + "\n")
	}
}
