package testenv

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	_ "embed"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
)

//go:embed stages.yaml
var stages []byte

// Node is the name of the node that Nodes makes.
const Node = "node"

// Nodes lets Pods come and go: kube-controller-manager keeps the Pods of a
// StatefulSet, and what more controllers are named for, and kwok does what kubelet
// does on one Node, by the annotations that stages.yaml describes. Whoever calls it
// runs the engines of the Pods. Both end with the test.
func (k *KubeAPI) Nodes(t testing.TB, controllers ...string) {
	t.Helper()
	manager := start(t, filepath.Join(k.dir, "kube-controller-manager.log"), k.programs["kube-controller-manager"],
		"--kubeconfig", k.Kubeconfig, "--leader-elect=false", "--secure-port=0", "--controllers="+strings.Join(append([]string{"statefulset-controller"}, controllers...), ","),
		"--kube-api-qps=200", "--kube-api-burst=200")
	t.Cleanup(manager.stop)
	config := filepath.Join(k.dir, "stages.yaml")
	write(t, config, stages)
	kwok := start(t, filepath.Join(k.dir, "kwok.log"), k.programs["kwok"], "--kubeconfig", k.Kubeconfig, "--manage-all-nodes=true",
		"-c", config, "--server-address", FreeAddr(t), "--node-lease-duration-seconds=40")
	t.Cleanup(kwok.stop)
	t.Cleanup(func() {
		if t.Failed() {
			for _, name := range []string{"kube-controller-manager.log", "kwok.log"} {
				t.Logf("%s:\n%s", name, tail(filepath.Join(k.dir, name)))
			}
		}
	})
	if out, err := k.Kubectl(t, "apiVersion: v1\nkind: Node\nmetadata: { name: "+Node+" }\n", "create", "-f", "-"); err != nil {
		t.Fatal(err, out)
	}
	if out, err := k.Kubectl(t, "", "wait", "--for=condition=Ready", "--timeout=2m", "node/"+Node); err != nil {
		t.Fatal(err, out)
	}
}

// StatefulSet is one whose Pods have the label app with its name and addresses in
// a network such as 127.0.7. All of them start and end at once.
func StatefulSet(namespace, name, network string, replicas int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: StatefulSet
metadata: { namespace: %[1]s, name: %[2]s }
spec:
  replicas: %[4]d
  serviceName: %[2]s
  podManagementPolicy: Parallel
  selector: { matchLabels: { app: %[2]s } }
  template:
    metadata:
      labels: { app: %[2]s }
      annotations: { kinference.test/network: %[3]q }
    spec: { nodeName: %[5]s, terminationGracePeriodSeconds: 60, containers: [ { name: engine, image: vllm } ] }
`, namespace, name, network, replicas, Node)
}

// Call sends a request to the API as administrator and returns the answer. It
// may be called from several goroutines.
func (k *KubeAPI) Call(method, path, contentType string, body []byte) (code int, answer []byte, err error) {
	req, err := http.NewRequest(method, k.URL+path, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Authorization", "Bearer "+k.Token)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := k.client().Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err = io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}

// client is shared; Stop closes its idle connections.
func (k *KubeAPI) client() *http.Client {
	k.once.Do(func() {
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(k.CA)
		k.http = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, MaxIdleConnsPerHost: 8}}
	})
	return k.http
}
