package testenv_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/testenv"
)

// What scripts/kube.sh builds is what tests look for.
func TestKubeVersion(t *testing.T) {
	module, err := os.ReadFile("../../tools/kube/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"k8s.io/kubernetes " + testenv.KubeVersion, "go.etcd.io/etcd/server/v3 " + testenv.EtcdVersion, "sigs.k8s.io/kwok " + testenv.KwokVersion} {
		if !strings.Contains(string(module), want) {
			t.Errorf("tools/kube/go.mod has not %s", want)
		}
	}
}

func TestKube(t *testing.T) {
	k := testenv.Kube(t)
	if out, err := k.Kubectl(t, "", "create", "namespace", "one"); err != nil {
		t.Fatal(err, out)
	}
	k.Stop()
	k.Start(t)
	if out, err := k.Kubectl(t, "", "get", "namespaces", "-o", "name"); err != nil || !strings.Contains(out, "namespace/one") {
		t.Fatal(err, out)
	}
}

// Pods of a StatefulSet come, are ready while their engines are up, and are made
// anew under their names when they end.
func TestNodes(t *testing.T) {
	k := testenv.Kube(t)
	k.Nodes(t)
	kubectl := func(stdin string, args ...string) string {
		t.Helper()
		out, err := k.Kubectl(t, stdin, args...)
		if err != nil {
			t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return out
	}
	kubectl(testenv.StatefulSet("default", "vllm", "127.0.7", 2), "apply", "-f", "-")
	kubectl("", "wait", "--for=create", "--timeout=1m", "pod/vllm-1")
	kubectl("", "annotate", "pod", "vllm-0", "vllm-1", "kinference.test/engine=up")
	kubectl("", "wait", "--for=condition=Ready", "--timeout=1m", "pod/vllm-0", "pod/vllm-1")
	if got := kubectl("", "get", "pod", "vllm-1", "-o", "jsonpath={.status.podIP}"); got != "127.0.7.2" {
		t.Errorf("address %q", got)
	}
	uid := kubectl("", "get", "pod", "vllm-1", "-o", "jsonpath={.metadata.uid}")
	kubectl("", "annotate", "--overwrite", "pod", "vllm-0", "kinference.test/engine=down")
	kubectl("", "wait", "--for=condition=Ready=False", "--timeout=1m", "pod/vllm-0")
	kubectl("", "delete", "pod", "vllm-1", "--wait=false")
	if got := kubectl("", "get", "pod", "vllm-1", "-o", "jsonpath={.metadata.uid} {.metadata.deletionTimestamp}"); !strings.HasPrefix(got, uid+" 2") {
		t.Errorf("it is gone with its engine up: %q", got)
	}
	kubectl("", "annotate", "--overwrite", "pod", "vllm-1", "kinference.test/engine=ended")
	deadline, tick := time.After(time.Minute), time.NewTicker(50*time.Millisecond)
	defer tick.Stop()
	for again := ""; again == "" || again == uid; {
		select {
		case <-deadline:
			t.Fatalf("the Pod is %q still", again)
		case <-tick.C:
			again = kubectl("", "get", "pod", "vllm-1", "--ignore-not-found", "-o", "jsonpath={.metadata.uid}")
		}
	}
}
