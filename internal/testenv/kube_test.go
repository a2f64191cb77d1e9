package testenv_test

import (
	"os"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/testenv"
)

// What scripts/kube.sh builds is what tests look for.
func TestKubeVersion(t *testing.T) {
	module, err := os.ReadFile("../../tools/kube/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(module), "k8s.io/kubernetes "+testenv.KubeVersion) {
		t.Errorf("tools/kube/go.mod has not k8s.io/kubernetes %s", testenv.KubeVersion)
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
