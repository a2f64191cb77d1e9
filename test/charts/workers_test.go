package charts

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Who reaches the workers: ingress with requests, the router that probes them, the
// relay that reads their metrics, and a scraper, where it is named. Their events are
// the relay's alone. Everything else is shut out, also of other namespaces.
func TestWorkersPolicy(t *testing.T) {
	h := newHelm(t)
	render := h.render(t, "--set", "workers.networkPolicy=true,workers.sets[0].namespace=tenants,workers.sets[0].labels.app=vllm,workers.sets[0].ports={8000},workers.sets[0].eventPorts={5557,5558}",
		"--set-json", `workers.clients=[{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}]`)
	var got []string
	for _, n := range networks(t, render) {
		if n.Kind != "NetworkPolicy" || n.Metadata.Name != "kinference-workers-0" {
			continue
		}
		for _, rule := range n.Spec.Ingress {
			for _, p := range rule.Ports {
				if len(rule.From) == 0 {
					t.Errorf("everybody reaches %d", p.Port)
				}
				for _, from := range rule.From {
					got = append(got, fmt.Sprintf("%d %s/%s", p.Port, from.NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"], from.PodSelector.MatchLabels[nameLabel]))
				}
			}
		}
	}
	slices.Sort(got)
	want := []string{
		"5557 kinference/relay", "5558 kinference/relay", "8000 kinference/ingress", "8000 kinference/relay", "8000 kinference/router", "8000 monitoring/",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("who reaches the workers (-want +got):\n%s", diff)
	}
}
