package charts

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

// Each service starts with the flags that the values give it, in clear text and with
// TLS, and becomes ready with no other rights than its ServiceAccount's. Only
// addresses and folders are those of this machine.
func (c *cluster) testRun(t *testing.T) {
	c.must(t, `
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: chat, namespace: tenants }
spec: { endpoints: [ { name: a, address: "127.0.0.1:9" } ], models: [ { name: chat } ] }
`, "apply", "-f", "-")
	for _, variant := range []string{"default", "tls"} {
		t.Run(variant, func(t *testing.T) { c.runVariant(t, variant) })
	}
}

func (c *cluster) runVariant(t *testing.T, variant string) {
	bin := programsOf(t)
	c.install(t, variants[variant]...)
	defer c.uninstall(t)
	token := strings.TrimSpace(c.must(t, "", "create", "token", "kinference-router", "-n", namespace))
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	admin, err := os.ReadFile(c.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(kubeconfig, []byte(strings.ReplaceAll(string(admin), c.Token, token)), 0o600); err != nil {
		t.Fatal(err)
	}
	found := workloads(t, c.render(t, variants[variant]...))
	nats, router, api, data := testenv.NATS(t), testenv.FreeAddr(t), testenv.FreeAddr(t), t.TempDir()
	url, secret := "http://"+router, filepath.Join(data, "tls")
	if variant == "tls" {
		url = "https://" + router
	}
	authority := testenv.NewAuthority(t, "kinference")
	authority.Secret(t, secret)
	here := map[string][]string{
		"router":     {"--listen=" + router, "--kubeconfig=" + kubeconfig, "--admin-api-listen=" + api, "--accounting-url="},
		"classifier": {"--router-url=" + url},
		"ingress":    {"--router-url=" + url, "--usage-dir=" + filepath.Join(data, "usage"), "--limit-spill=" + filepath.Join(data, "settlements")},
		"relay":      {"--router-url=" + url},
		"accounting": {"--router-url=" + url, "--ledger=" + filepath.Join(data, "usage.db")},
	}
	for _, service := range []string{"router", "kvtracker", "relay", "limiter", "classifier", "accounting", "ingress"} {
		container := theContainer(t, found[service])
		program := strings.Split(filepath.Base(container.Image), ":")[0]
		args := append(container.Args, here[service]...)
		if service != "router" && service != "relay" {
			args = append(args, "--listen="+testenv.FreeAddr(t))
		}
		for _, env := range container.Env {
			if strings.HasSuffix(env.Name, "_NATS_URL") {
				args = append(args, "--nats-url="+nats)
			}
		}
		for i := range args {
			args[i] = strings.Replace(args[i], "/etc/kinference/tls", secret, 1)
		}
		c.ready(t, service, filepath.Join(bin, program), args)
	}
	// What the router found out is in the status, written with its own rights.
	c.must(t, "", "wait", "--for=jsonpath={.status.conditions[0].type}", "--timeout=3m", "-n", "tenants", "inferenceworkerset/chat")
	c.asked(t, api, url, authority.PEM)
	if out := c.must(t, "", "get", "leases", "-n", namespace, "-o", "name"); !strings.Contains(out, "kinference-router") {
		t.Errorf("the router leads by no Lease:\n%s", out)
	}
}

// asked shows who gets an answer of the router: people at the admin API, by their
// token, and at the RPC port, with TLS, nobody without a certificate.
func (c *cluster) asked(t *testing.T, api, rpc string, ca []byte) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	scheme, _, _ := strings.Cut(rpc, "://")
	post := func(url, token string) (int, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+token)
		answer, err := client.Do(r)
		if err != nil {
			return 0, err
		}
		return answer.StatusCode, answer.Body.Close()
	}
	status := scheme + "://" + api + "/kinference.admin.v1.AdminService/Status"
	for token, want := range map[string]int{c.Token: http.StatusOK, "guess": http.StatusUnauthorized} {
		if code, err := post(status, token); code != want {
			t.Errorf("the admin API says %d %v, want %d", code, err, want)
		}
	}
	code, err := post(rpc+"/grpc.health.v1.Health/Check", "")
	if want := scheme == "http"; (err == nil) != want || want && code != http.StatusOK {
		t.Errorf("the RPC port says %d %v to who has no certificate", code, err)
	}
}

// ready starts a program that ends with the test and waits until it is ready.
func (c *cluster) ready(t *testing.T, name, program string, args []string) {
	t.Helper()
	at := testenv.FreeAddr(t)
	path := filepath.Join(t.TempDir(), name+".log")
	log, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(program, append(args, "--admin-listen="+at)...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = append(os.Environ(), "KINFERENCE_KVTRACKER_SHARD=0", "KINFERENCE_ROUTER_IDENTITY=router-0")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // it may have ended
		if err := <-done; err != nil && !strings.Contains(err.Error(), "killed") {
			t.Errorf("%s: %v", name, err)
		}
	})
	client := &http.Client{Timeout: 5 * time.Second}
	deadline, tick := time.After(3*time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for answer := ""; ; {
		if r, err := client.Get("http://" + at + "/readyz"); err == nil {
			answer = r.Status
			_ = r.Body.Close()
			if r.StatusCode == http.StatusOK {
				client.CloseIdleConnections()
				return
			}
		}
		select {
		case <-tick.C:
		case err := <-done:
			done <- err
			out, _ := os.ReadFile(path)
			t.Fatalf("%s ended: %v\n%s", name, err, out)
		case <-deadline:
			out, _ := os.ReadFile(path)
			t.Fatalf("%s is not ready: %s\n%s", name, answer, out)
		}
	}
}
