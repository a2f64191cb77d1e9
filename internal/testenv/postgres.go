package testenv

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// PostgresServer is a real PostgreSQL server. Its methods are not safe for
// concurrent use.
type PostgresServer struct {
	// URL of an empty database; it stays when the server is started again.
	URL string

	dir    string
	args   []string
	as     *syscall.SysProcAttr
	server *process
}

// Postgres starts a PostgreSQL server that ends with the test. Without its
// programs the test is skipped, or fails with KINFERENCE_INTEROP=1.
func Postgres(t testing.TB) *PostgresServer {
	t.Helper()
	programs := map[string]string{}
	for _, name := range []string{"initdb", "postgres"} {
		path := postgresProgram(name)
		if path == "" {
			if os.Getenv("KINFERENCE_INTEROP") == "1" {
				t.Fatal(name + " of PostgreSQL is missing: scripts/deps.sh installs it")
			}
			t.Skip("NOT TESTED against a real PostgreSQL: " + name + " is missing; scripts/deps.sh installs it")
		}
		programs[name] = path
	}
	// Others must be able to get there, since the server does not run as root.
	dir, err := os.MkdirTemp("", "postgres-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &PostgresServer{dir: dir, as: unprivileged(t, dir)}
	data := filepath.Join(dir, "data")
	init := exec.Command(programs["initdb"], "-D", data, "-U", "test", "-A", "trust", "-E", "UTF8", "--locale", "C", "--no-sync", "--no-instructions")
	init.SysProcAttr, init.Dir = s.as, dir
	if out, err := init.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	// Another process may take a free port before the server does.
	for range 5 {
		port := strconv.Itoa(FreePort(t))
		s.URL = fmt.Sprintf("postgres://test@%s/postgres?sslmode=disable", net.JoinHostPort("127.0.0.1", port))
		s.args = []string{programs["postgres"], "-D", data, "-h", "127.0.0.1", "-p", port, "-k", "", "-c", "shared_buffers=32MB", "-c", "max_connections=40"}
		if s.start(t) {
			t.Cleanup(s.Stop)
			return s
		}
	}
	t.Fatal("PostgreSQL does not start")
	return nil
}

// postgresProgram finds a program of PostgreSQL, which Debian keeps in folders by
// version.
func postgresProgram(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	list, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name) // the pattern is good
	slices.Sort(list)
	if len(list) == 0 {
		return ""
	}
	return list[len(list)-1]
}

// unprivileged makes a folder that of the user as which the server can run: our
// own, or that of the package if we are root.
func unprivileged(t testing.TB, dir string) *syscall.SysProcAttr {
	t.Helper()
	as := ownGroup()
	if os.Getuid() != 0 {
		return as
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		if u, err = user.Lookup("nobody"); err != nil {
			t.Fatalf("no user to run PostgreSQL as: %v", err)
		}
	}
	uid, err1 := strconv.Atoi(u.Uid)
	gid, err2 := strconv.Atoi(u.Gid)
	if err1 != nil || err2 != nil {
		t.Fatalf("user %s has no number", u.Username)
	}
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	as.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return as
}

func (s *PostgresServer) start(t testing.TB) bool {
	t.Helper()
	log := filepath.Join(s.dir, "log")
	s.server = startAs(t, s.as, log, s.args[0], s.args[1:]...)
	deadline, tick := time.After(30*time.Second), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for {
		if strings.Contains(string(tail(log)), "ready to accept connections") {
			return true
		}
		select {
		case <-tick.C:
		case <-s.server.done:
			t.Logf("postgres ended:\n%s", tail(log))
			return false
		case <-deadline:
			t.Fatalf("postgres is not ready after 30 s:\n%s", tail(log))
		}
	}
}

// Start starts the server again after Stop, with what it had stored.
func (s *PostgresServer) Start(t testing.TB) {
	t.Helper()
	if err := os.Remove(filepath.Join(s.dir, "log")); err != nil {
		t.Fatal(err)
	}
	if !s.start(t) {
		t.Fatalf("postgres does not start again at %s", s.URL)
	}
}

// Stop ends the server at once, as a crash would: it recovers when it is started
// again.
func (s *PostgresServer) Stop() {
	select {
	case <-s.server.done:
		return
	default:
	}
	// Its own children, which have groups of their own, end with it.
	_ = syscall.Kill(s.server.cmd.Process.Pid, syscall.SIGQUIT)
	select {
	case <-s.server.done:
	case <-time.After(10 * time.Second):
		s.server.stop()
	}
}
