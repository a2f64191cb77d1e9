package testenv

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// RedisServer is a real Redis server without persistence. Its methods are not
// safe for concurrent use.
type RedisServer struct {
	// Addr is its host:port; it stays when the server is started again.
	Addr string

	dir    string
	args   []string
	server *process
}

// Redis starts a Redis server that ends with the test. Further arguments are
// options of redis-server. Without the program the test is skipped, or fails
// with KINFERENCE_INTEROP=1.
func Redis(t testing.TB, options ...string) *RedisServer {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		if os.Getenv("KINFERENCE_INTEROP") == "1" {
			t.Fatal("redis-server is missing: scripts/deps.sh installs it")
		}
		t.Skip("NOT TESTED against a real Redis: redis-server is missing; scripts/deps.sh installs it")
	}
	// Another process may take a free port before the server does.
	for range 5 {
		port := strconv.Itoa(FreePort(t))
		r := &RedisServer{Addr: net.JoinHostPort("127.0.0.1", port), dir: t.TempDir()}
		r.args = append([]string{"--port", port, "--bind", "127.0.0.1", "--dir", r.dir, "--save", "", "--appendonly", "no", "--daemonize", "no"}, options...)
		if r.start(t) {
			t.Cleanup(r.Stop)
			return r
		}
	}
	t.Fatal("redis-server does not start")
	return nil
}

func (r *RedisServer) start(t testing.TB) bool {
	t.Helper()
	log := filepath.Join(r.dir, "redis.log")
	r.server = start(t, log, "redis-server", r.args...)
	deadline, tick := time.After(30*time.Second), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for {
		if out, err := r.CLI("ping"); err == nil && (strings.Contains(out, "PONG") || strings.Contains(out, "NOAUTH")) {
			return true
		}
		select {
		case <-tick.C:
		case <-r.server.done:
			t.Logf("redis-server ended:\n%s", tail(log))
			return false
		case <-deadline:
			t.Fatalf("redis-server does not answer after 30 s:\n%s", tail(log))
		}
	}
}

// Start starts the server again after Stop, empty.
func (r *RedisServer) Start(t testing.TB) {
	t.Helper()
	if !r.start(t) {
		t.Fatalf("redis-server does not start again at %s", r.Addr)
	}
}

// Stop kills the server, as a crash would.
func (r *RedisServer) Stop() { r.server.stop() }

// Pause stops the server in its tracks (SIGSTOP): connections stay open and
// nothing answers. Resume lets it go on.
func (r *RedisServer) Pause() { _ = syscall.Kill(-r.server.cmd.Process.Pid, syscall.SIGSTOP) }

// Resume ends Pause.
func (r *RedisServer) Resume() { _ = syscall.Kill(-r.server.cmd.Process.Pid, syscall.SIGCONT) }

// CLI runs redis-cli against the server and returns what it wrote.
func (r *RedisServer) CLI(args ...string) (string, error) {
	host, port, err := net.SplitHostPort(r.Addr)
	if err != nil {
		return "", err
	}
	cmd := exec.Command("redis-cli", append([]string{"-h", host, "-p", port}, args...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return strings.TrimSpace(out.String()), err
}

// RedisSentinel starts a primary named m, a replica and a Sentinel that watches
// them, and returns them in this order. A primary that is silent for a second is
// replaced.
func RedisSentinel(t testing.TB) (primary, replica, sentinel *RedisServer) {
	t.Helper()
	primary = Redis(t, "--repl-diskless-sync-delay", "0")
	_, port, err := net.SplitHostPort(primary.Addr)
	if err != nil {
		t.Fatal(err)
	}
	replica = Redis(t, "--replicaof", "127.0.0.1 "+port)
	own := strconv.Itoa(FreePort(t))
	sentinel = &RedisServer{Addr: net.JoinHostPort("127.0.0.1", own), dir: t.TempDir()}
	file := filepath.Join(sentinel.dir, "sentinel.conf")
	write(t, file, []byte("port "+own+"\nbind 127.0.0.1\ndir "+sentinel.dir+"\nsentinel monitor m 127.0.0.1 "+port+
		" 1\nsentinel down-after-milliseconds m 1000\nsentinel failover-timeout m 5000\n"))
	sentinel.args = []string{file, "--sentinel"}
	if !sentinel.start(t) {
		t.Fatal("the sentinel does not start")
	}
	t.Cleanup(sentinel.Stop)
	deadline, tick := time.After(time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for {
		repl, _ := replica.CLI("info", "replication")
		known, _ := sentinel.CLI("sentinel", "replicas", "m")
		if strings.Contains(repl, "master_link_status:up") && strings.Contains(known, "127.0.0.1") {
			return primary, replica, sentinel
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("replica and sentinel are not ready after a minute")
		}
	}
}

// RedisGroup is a Redis Cluster of three primaries and perhaps replicas.
type RedisGroup struct {
	Nodes []*RedisServer
}

// RedisCluster starts a Cluster of three primaries, each with so many replicas,
// that ends with the test. A primary that is silent for two seconds is replaced.
func RedisCluster(t testing.TB, replicas int) *RedisGroup {
	t.Helper()
	g := &RedisGroup{}
	args := []string{"--cluster", "create"}
	for range 3 * (1 + replicas) {
		r := Redis(t, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000",
			"--cluster-port", strconv.Itoa(FreePort(t)), "--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0")
		g.Nodes = append(g.Nodes, r)
		args = append(args, r.Addr)
	}
	args = append(args, "--cluster-replicas", string(rune('0'+replicas)), "--cluster-yes")
	if out, err := g.Nodes[0].CLI(args...); err != nil {
		t.Fatalf("create cluster: %v\n%s", err, out)
	}
	g.ready(t, 3*replicas)
	return g
}

// Addrs of the nodes.
func (g *RedisGroup) Addrs() []string {
	var out []string
	for _, n := range g.Nodes {
		out = append(out, n.Addr)
	}
	return out
}

// ready blocks until all nodes see all slots served, and so many of them are
// replicas that have what their primaries have.
func (g *RedisGroup) ready(t testing.TB, replicas int) {
	t.Helper()
	deadline, tick := time.After(time.Minute), time.NewTicker(100*time.Millisecond)
	defer tick.Stop()
	for {
		ok, linked := 0, 0
		for _, n := range g.Nodes {
			if info, _ := n.CLI("cluster", "info"); strings.Contains(info, "cluster_state:ok") {
				ok++
			}
			if repl, _ := n.CLI("info", "replication"); strings.Contains(repl, "master_link_status:up") {
				linked++
			}
		}
		if ok == len(g.Nodes) && linked == replicas {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("cluster is not ready after a minute: of %d nodes %d see all slots, %d of %d replicas have their data", len(g.Nodes), ok, linked, replicas)
		}
	}
}

// Owner returns the primary of a key and one of its replicas, nil without any.
func (g *RedisGroup) Owner(t testing.TB, key string) (primary, replica *RedisServer) {
	t.Helper()
	for _, n := range g.Nodes {
		select {
		case <-n.server.done:
			continue
		default:
		}
		role, err := n.CLI("role")
		if err != nil {
			continue
		}
		// A node that does not own the key says so; MOVED names the one that does.
		if out, _ := n.CLI("exists", key); !strings.Contains(out, "MOVED") && strings.HasPrefix(role, "master") {
			primary = n
		}
	}
	if primary == nil {
		t.Fatalf("no primary owns %s", key)
	}
	_, port, err := net.SplitHostPort(primary.Addr)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range g.Nodes {
		if role, err := n.CLI("role"); err == nil && strings.HasPrefix(role, "slave") && strings.Contains(role, "\n"+port+"\n") {
			replica = n
		}
	}
	return primary, replica
}
