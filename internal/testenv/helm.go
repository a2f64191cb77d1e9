package testenv

import "testing"

// HelmVersion is the one that scripts/kube.sh builds, of tools/helm/go.mod.
const HelmVersion = "v4.3.1"

// Helm returns the path of helm. Without it the test is skipped, or fails with
// KINFERENCE_INTEROP=1.
func Helm(t testing.TB) string {
	t.Helper()
	return program(t, "helm-"+HelmVersion, "helm")
}
