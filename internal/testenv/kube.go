package testenv

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Versions of what tests run for a Kubernetes API. scripts/kube.sh builds them.
const (
	KubeVersion = "v1.37.2"
	EtcdVersion = "v3.7.0"
	KwokVersion = "v0.8.0"
)

// KubeAPI is a real Kubernetes API: etcd and kube-apiserver; Nodes adds what
// lets Pods come and go. Only Call is safe for concurrent use.
type KubeAPI struct {
	URL string
	// Token is the bearer token of an administrator.
	Token string
	// CA signs the server's certificate, as PEM.
	CA []byte
	// Kubeconfig is a file for the administrator.
	Kubeconfig string

	programs map[string]string
	dir      string
	args     []string
	server   *process
	once     sync.Once
	http     *http.Client
}

// Kube starts a Kubernetes API that ends with the test. Where its programs are
// missing the test is skipped, or fails with KINFERENCE_INTEROP=1.
func Kube(t testing.TB) *KubeAPI {
	t.Helper()
	programs := map[string]string{}
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kubectl"} {
		programs[name] = program(t, "kube-"+KubeVersion, name)
	}
	programs["etcd"], programs["kwok"] = program(t, "etcd-"+EtcdVersion, "etcd"), program(t, "kwok-"+KwokVersion, "kwok")
	dir := t.TempDir()
	etcd, peer, api := FreeAddr(t), FreeAddr(t), FreePort(t)
	k := &KubeAPI{URL: "https://" + loopback(api), Token: "admin-token", Kubeconfig: filepath.Join(dir, "kubeconfig"), programs: programs, dir: dir}
	store := "http://" + etcd
	peers := "http://" + peer
	e := start(t, filepath.Join(dir, "etcd.log"), programs["etcd"], "--data-dir", filepath.Join(dir, "etcd"),
		"--listen-client-urls", store, "--advertise-client-urls", store, "--listen-peer-urls", peers,
		"--initial-advertise-peer-urls", peers, "--initial-cluster", "default="+peers, "--unsafe-no-fsync", "--log-level", "error")
	t.Cleanup(e.stop)
	authority := NewAuthority(t, "kubernetes")
	authority.Secret(t, filepath.Join(dir, "api"))
	k.CA = authority.PEM
	write(t, k.Kubeconfig, k.kubeconfig())
	write(t, filepath.Join(dir, "tokens.csv"), []byte(k.Token+",admin,admin,\"system:masters\"\n"))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("make key: %v", err)
	}
	serviceAccounts := filepath.Join(dir, "sa.key")
	write(t, serviceAccounts, encodeKey(t, key))
	k.args = []string{
		"--etcd-servers", store, "--secure-port", strconv.Itoa(api), "--bind-address", "127.0.0.1",
		"--tls-cert-file", filepath.Join(dir, "api", "tls.crt"), "--tls-private-key-file", filepath.Join(dir, "api", "tls.key"),
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", serviceAccounts,
		"--service-account-signing-key-file", serviceAccounts, "--service-cluster-ip-range", "10.0.0.0/24",
		"--authorization-mode", "RBAC", "--token-auth-file", filepath.Join(dir, "tokens.csv"),
		// Nobody makes the ServiceAccounts that Pods would need.
		"--disable-admission-plugins", "ServiceAccount", "--profiling=false",
	}
	k.Start(t)
	t.Cleanup(k.Stop)
	return k
}

// program returns the path of a program that scripts/kube.sh builds. Without it
// the test is skipped, or fails where everything must be there.
func program(t testing.TB, folder, name string) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cache, "kinference", folder, name)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("KINFERENCE_INTEROP") == "1" {
			t.Fatalf("%s is missing: scripts/kube.sh builds it", path)
		}
		t.Skipf("NOT TESTED against a real Kubernetes API: %s is missing; scripts/kube.sh builds it", path)
	}
	return path
}

// Start starts the API server again after Stop and waits until it is ready.
func (k *KubeAPI) Start(t testing.TB) {
	t.Helper()
	log := filepath.Join(k.dir, "kube-apiserver.log")
	k.server = start(t, log, k.programs["kube-apiserver"], k.args...)
	ready := func() bool {
		code, _, err := k.Call(http.MethodGet, "/readyz", "", nil)
		return err == nil && code == http.StatusOK
	}
	deadline, tick := time.After(5*time.Minute), time.NewTicker(200*time.Millisecond)
	defer tick.Stop()
	for !ready() {
		select {
		case <-tick.C:
		case <-k.server.done:
			t.Fatalf("kube-apiserver ended:\n%s", tail(log))
		case <-deadline:
			t.Fatalf("kube-apiserver is not ready after 5 min:\n%s", tail(log))
		}
	}
}

// Stop ends the API server at once, as a crash would. What it has stored stays.
func (k *KubeAPI) Stop() {
	k.client().CloseIdleConnections()
	k.server.stop()
}

// Program is the path of one of the programs: kubectl, for commands that run it.
func (k *KubeAPI) Program(name string) string { return k.programs[name] }

// Kubectl runs kubectl as administrator and returns what it wrote to stdout and
// stderr together.
func (k *KubeAPI) Kubectl(t testing.TB, stdin string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), k.programs["kubectl"], append([]string{"--kubeconfig", k.Kubeconfig}, args...)...)
	cmd.Stdin = bytes.NewBufferString(stdin)
	cmd.Env = append(os.Environ(), "HOME="+k.dir) // it caches what the API offers
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (k *KubeAPI) kubeconfig() []byte {
	return fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [ { name: test, cluster: { server: %q, certificate-authority: %q } } ]
users: [ { name: admin, user: { token: %q } } ]
contexts: [ { name: test, context: { cluster: test, user: admin } } ]
current-context: test
`, k.URL, filepath.Join(k.dir, "api", "ca.crt"), k.Token)
}

// process is a program of its own process group.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
}

func start(t testing.TB, log, name string, args ...string) *process {
	t.Helper()
	return startAs(t, ownGroup(), log, name, args...)
}

func startAs(t testing.TB, as *syscall.SysProcAttr, log, name string, args ...string) *process {
	t.Helper()
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p := &process{cmd: exec.Command(name, args...), done: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.SysProcAttr = out, out, as
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		_ = p.cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	return p
}

func (p *process) stop() {
	select {
	case <-p.done:
		return
	default:
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may be ending
	<-p.done
}

func tail(path string) []byte {
	data, err := os.ReadFile(path)
	if err != nil {
		return []byte(err.Error())
	}
	return data[max(0, len(data)-4000):]
}

func encodeKey(t testing.TB, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
}

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
}
