package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/deploy/charts"
	"github.com/kinference/kinference/internal/testenv"
)

// kinfctlErr runs a command and returns what it wrote.
func kinfctlErr(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := rootCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

// apart lets helm find nothing of the user's.
func apart(t *testing.T) {
	t.Helper()
	home := t.TempDir()
	for _, name := range []string{"HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"} {
		t.Setenv(name, home)
	}
	t.Setenv("HELM_NAMESPACE", "")
	t.Setenv("KUBECONFIG", filepath.Join(home, "none"))
}

// What is embedded are the charts of the repository: all files that helm reads.
func TestChartsAreComplete(t *testing.T) {
	const folder = "../../deploy/charts"
	n := 0
	err := filepath.WalkDir(folder, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "charts" && rel != "." {
				return filepath.SkipDir // of a build by hand
			}
			return nil
		}
		switch filepath.Ext(path) {
		case ".go", ".mod", ".sum", ".md", ".lock", ".tgz", ".gitignore":
			return nil
		}
		n++
		raw, err := charts.Files.ReadFile(rel)
		if err != nil {
			t.Error(err)
			return nil
		}
		if there, err := os.ReadFile(path); err != nil || !bytes.Equal(raw, there) {
			t.Errorf("%s is another one: %v", rel, err)
		}
		return nil
	})
	if err != nil || n < 30 {
		t.Errorf("%d files, %v", n, err)
	}
}

func TestInstallDryRun(t *testing.T) {
	helm := testenv.Helm(t)
	apart(t)
	out, err := kinfctlErr(t, "install", "--helm", helm, "--dry-run", "--profile", "dev", "--set", "router.replicas=2")
	if err != nil {
		t.Fatal(err, out)
	}
	list, err := manifests(out)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, m := range list {
		count[m.Kind]++
	}
	if count["CustomResourceDefinition"] != 6 || count["Deployment"] != 5 || count["StatefulSet"] != 3 || !strings.Contains(out, "replicas: 2") {
		t.Errorf("renders %v", count)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--profile", "large"}, "want dev or ha"},
		{[]string{"--set", "router.replcas=2"}, "replcas"},
		{[]string{"-f", "none.yaml"}, "none.yaml"},
	} {
		if _, err := kinfctlErr(t, append([]string{"install", "--helm", helm, "--dry-run"}, tc.args...)...); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: got %v, want %q", tc.args, err, tc.want)
		}
	}
	if _, err := kinfctlErr(t, "install", "--dry-run", "--helm", "no-such-helm"); exitCode(err) != 2 {
		t.Errorf("without helm: got %v, want wrong usage", err)
	}
}

// A kinfctl that is linked as a release's installs the images of that release.
func TestReleased(t *testing.T) {
	script, err := os.ReadFile("../../scripts/release.sh")
	if err != nil {
		t.Fatal(err)
	}
	flags := regexp.MustCompile(`-ldflags "([^"]*)" -o "\$out/\$name" ./cmd/kinfctl`).FindStringSubmatch(string(script))
	if flags == nil {
		t.Fatal("scripts/release.sh has not the go build that this test looks for")
	}
	program := filepath.Join(t.TempDir(), "kinfctl")
	link := os.Expand(flags[1], func(string) string { return "1.2.3" })
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags", link, "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	helm := testenv.Helm(t)
	apart(t)
	out, err := exec.CommandContext(t.Context(), program, "install", "--dry-run", "--helm", helm).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if text := string(out); strings.Count(text, "image: ghcr.io/kinference/") != 7 || strings.Count(text, ":1.2.3\n") != 7 || strings.Contains(text, charts.Version) {
		t.Errorf("it installs other images than those of its release:\n%s", strings.Join(regexp.MustCompile(`image: .*|version: .*`).FindAllString(text, -1), "\n"))
	}
}

// Helm that is interrupted has time to note it: killed, it would leave a release that
// is under way for ever.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	helm := filepath.Join(dir, "helm")
	if err := os.WriteFile(helm, []byte(`#!/bin/sh
[ "$1" = upgrade ] || exit 0
cd "`+dir+`"
trap 'kill $!; : >noted; exit 1' INT
tail -f /dev/null >/dev/null 2>&1 &
: >begun
wait
`), 0o700); err != nil {
		t.Fatal(err)
	}
	there := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		cmd := rootCommand()
		cmd.SetArgs([]string{"install", "--helm", helm})
		cmd.SetOut(t.Output())
		cmd.SetErr(t.Output())
		done <- cmd.ExecuteContext(ctx)
	}()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !there("begun") && time.Now().Before(deadline); {
		<-tick.C
	}
	interrupt()
	if err := <-done; err == nil || !there("noted") {
		t.Errorf("helm could note that it ends: %v; got %v", there("noted"), err)
	}
}

// Before definitions are deleted, each is asked for its resources: else one that is new may
// be deleted five minutes later.
func TestUninstallAsksFirst(t *testing.T) {
	apart(t)
	dir := t.TempDir()
	said := filepath.Join(dir, "said")
	for program, text := range map[string]string{"helm": "true", "kubectl": `echo "$@" >>"` + said + `"; [ "$1" = delete ]`} {
		if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := kinfctlErr(t, "uninstall", "--definitions", "--helm", filepath.Join(dir, "helm"), "--kubectl", filepath.Join(dir, "kubectl")); err != nil {
		t.Fatal(err, out)
	}
	raw, err := os.ReadFile(said)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	last := lines[len(lines)-1]
	if len(lines) != 7 || !strings.HasPrefix(last, "delete customresourcedefinitions ") {
		t.Fatalf("kubectl was asked\n%s", raw)
	}
	for _, l := range lines[:6] {
		path := strings.Fields(l)[2]
		if name := path[strings.LastIndex(path, "/")+1:]; path != "/apis/kinference.buoyant.io/v1alpha1/"+name || !strings.Contains(last, " "+name+".kinference.buoyant.io ") {
			t.Errorf("kubectl was asked %s", l)
		}
	}
}

// From an empty cluster and back, by kinfctl alone, against a real API.
func TestInstall(t *testing.T) {
	helm, k := testenv.Helm(t), testenv.Kube(t)
	apart(t)
	at := []string{"--helm", helm, "--kubeconfig", k.Kubeconfig}
	run := func(fails string, args ...string) string {
		t.Helper()
		out, err := kinfctlErr(t, append(args, at...)...)
		if (err == nil) != (fails == "") || err != nil && !strings.Contains(err.Error()+out, fails) {
			t.Errorf("kinfctl %v: got %v, want %q\n%s", args, err, fails, out)
		}
		return out
	}
	pre := []string{"check", "--pre", "--kubectl", k.Program("kubectl")}

	// What is missing is named, and nothing else fails.
	out := run("a check failed", append(pre, "--profile", "ha")...)
	for _, want := range []string{
		"√ is Kubernetes 1.32 or later", "√ you may create customresourcedefinitions.apiextensions.k8s.io", "√ you may create namespaces", "√ you may create secrets in kinference", "× knows monitoring.coreos.com/v1",
		"install the Prometheus Operator", "× kinference-nats is there", "× kinference-ledger is there", "× there is a default class",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("lacks %q:\n%s", want, out)
		}
	}
	if n := strings.Count(out, "×"); n != 9 { // an API, six Secrets, the class and the sum
		t.Errorf("%d failures, want 9:\n%s", n, out)
	}
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, err := k.Kubectl(t, stdin, args...)
		if err != nil {
			t.Fatal(err, out)
		}
		return out
	}
	kubectl(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: { name: fast, annotations: { storageclass.kubernetes.io/is-default-class: "true" } }
provisioner: none
---
apiVersion: v1
kind: Namespace
metadata: { name: kinference }
---
apiVersion: v1
kind: Secret
metadata: { name: kinference-ledger, namespace: kinference }
stringData: { uri: "postgres://" }
`, "create", "-f", "-")
	run("", append(pre, "--profile", "dev")...)
	// A Secret without the key is as good as none, and its content is not shown.
	out = run("a check failed", append(pre, "--set", "accounting.ledger.postgres.secret=kinference-ledger")...)
	if !strings.Contains(out, "it has no key url") || strings.Contains(out, "postgres://") {
		t.Error(out)
	}
	// Somebody who may only look.
	kubectl("", "create", "serviceaccount", "guest", "-n", "kinference")
	kubectl("", "create", "clusterrolebinding", "guest", "--clusterrole=view", "--serviceaccount=kinference:guest")
	token := strings.TrimSpace(kubectl("", "create", "token", "guest", "-n", "kinference"))
	raw, err := os.ReadFile(k.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	guest := filepath.Join(t.TempDir(), "guest")
	if err := os.WriteFile(guest, bytes.ReplaceAll(raw, []byte(k.Token), []byte(token)), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = kinfctlErr(t, append(pre, "--profile", "dev", "--helm", helm, "--kubeconfig", guest)...)
	if err == nil || !strings.Contains(out, "× you may create deployments.apps in kinference") || !strings.Contains(out, "× you may create secrets in default") ||
		strings.Contains(out, "create namespaces") {
		t.Errorf("who may only look: %v\n%s", err, out)
	}

	run("see kinfctl install", "upgrade")
	run("", "install", "--profile", "dev", "--set", "router.replicas=2")
	run("see kinfctl upgrade", "install")
	run("want dev or ha", "upgrade", "--profile", "large")
	run("see kinfctl upgrade", append(pre, "--profile", "dev")...)
	if got := kubectl("", "get", "inferencepools", "-A"); !strings.Contains(got, "No resources found") {
		t.Error(got)
	}
	// Values stay that are not given anew, and the definitions are found from whatever
	// namespace is the current one.
	t.Setenv("HELM_NAMESPACE", "kinference")
	run("", "upgrade", "--set", "global.image.tag=0.1.1")
	if got := kubectl("", "get", "deployment", "kinference-router", "-n", "kinference", "-o", "jsonpath={.spec.replicas} {.spec.template.spec.containers[0].image}"); got != "2 ghcr.io/kinference/router:0.1.1" {
		t.Errorf("after the upgrade: %s", got)
	}
	if out := run("", "uninstall", "--dry-run", "--definitions", "--kubectl", k.Program("kubectl")); !strings.Contains(out, "Deployment kinference/kinference-router\n") || strings.Count(out, "CustomResourceDefinition inferencepools.kinference.buoyant.io\n") != 1 {
		t.Errorf("lists\n%s", out)
	}
	run("", "uninstall")
	kubectl("", "get", "crd", "inferencepools.kinference.buoyant.io") // stays
	if got := kubectl("", "get", "deployments,statefulsets,services,clusterroles", "-A", "-l", "app.kubernetes.io/part-of=kinference", "-o", "name"); got != "" {
		t.Errorf("it stays behind:\n%s", got)
	}
	run("", "install", "--profile", "dev")
	for range 2 { // the second has nothing to do
		run("", "uninstall", "--definitions", "--kubectl", k.Program("kubectl"))
	}
	if got := kubectl("", "get", "crd", "-o", "name"); strings.Contains(got, "kinference") {
		t.Errorf("it stays behind:\n%s", got)
	}
}
