package charts

import (
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

type selector struct {
	MatchLabels map[string]string `yaml:"matchLabels"`
}

// network is what of a NetworkPolicy and a Service counts here.
type network struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		Selector map[string]string
		Egress   *[]struct {
			Ports []struct{ Port int }
			To    []struct {
				PodSelector       selector `yaml:"podSelector"`
				NamespaceSelector selector `yaml:"namespaceSelector"`
			}
		}
		PodSelector selector `yaml:"podSelector"`
		Ports       []struct{ Port int }
		Ingress     []struct {
			Ports []struct{ Port int }
			From  []struct {
				PodSelector       selector `yaml:"podSelector"`
				NamespaceSelector selector `yaml:"namespaceSelector"`
			}
		}
	}
}

const nameLabel = "app.kubernetes.io/name"

var (
	urlFlag    = regexp.MustCompile(`(https?)://(?:[a-z-]+-[0-9]+\.)?kinference-([a-z]+):([0-9]+)`)
	listenFlag = regexp.MustCompile(`listen=:([0-9]+)$`)
)

// Services find each other: what one is told to call is a Service with that port,
// whose Pods listen on it and let the caller in, and nobody but callers.
func TestWiring(t *testing.T) {
	h := newHelm(t)
	for variant, scheme := range map[string]string{"default": "http", "ha": "http", "tls": "https"} {
		render := h.render(t, variants[variant]...)
		calls, listens := map[string]bool{}, map[string]bool{}
		for from, w := range workloads(t, render) {
			for _, arg := range theContainer(t, w).Args {
				for _, m := range urlFlag.FindAllStringSubmatch(arg, -1) {
					calls[from+" > "+m[2]+":"+m[3]] = true
					if m[1] != scheme {
						t.Errorf("%s: %s calls %s", variant, from, m[0])
					}
				}
				if m := listenFlag.FindStringSubmatch(arg); m != nil {
					listens[from+":"+m[1]] = true
				}
			}
		}
		if len(calls) < 6 {
			t.Fatalf("%s: only %v; this test would show nothing", variant, calls)
		}
		serves, allowed := map[string]bool{}, map[string]bool{}
		for _, n := range networks(t, render) {
			switch n.Kind {
			case "Service":
				for _, p := range n.Spec.Ports {
					serves[n.Spec.Selector[nameLabel]+":"+strconv.Itoa(p.Port)] = true
				}
			case "NetworkPolicy":
				to := n.Spec.PodSelector.MatchLabels[nameLabel]
				for _, rule := range n.Spec.Ingress {
					if len(rule.Ports) == 0 {
						t.Errorf("%s: %s lets in to all ports", variant, to)
					}
					for _, p := range rule.Ports {
						if len(rule.From) == 0 && to != "ingress" {
							t.Errorf("%s: %s lets everybody in to %d", variant, to, p.Port)
						}
						for _, from := range rule.From {
							if name := from.PodSelector.MatchLabels[nameLabel]; name != "" {
								allowed[fmt.Sprintf("%s > %s:%d", name, to, p.Port)] = true
							}
						}
					}
				}
				if to != "classifier" {
					continue
				}
				// What leaves it: a question to the router, and for its address.
				var leaves []string
				for _, rule := range *n.Spec.Egress {
					if len(rule.To) != 1 || len(rule.Ports) == 0 {
						t.Errorf("%s: the classifier reaches %v", variant, rule)
						continue
					}
					leaves = append(leaves, fmt.Sprint(rule.To[0].PodSelector.MatchLabels[nameLabel], rule.To[0].NamespaceSelector.MatchLabels["kubernetes.io/metadata.name"], rule.Ports[0].Port))
				}
				if diff := cmp.Diff([]string{"router7102", "kube-system53"}, leaves); diff != "" {
					t.Errorf("%s: what leaves the classifier (-want +got):\n%s", variant, diff)
				}
			}
		}
		if diff := cmp.Diff(slices.Sorted(maps.Keys(calls)), slices.Sorted(maps.Keys(allowed))); diff != "" {
			t.Errorf("%s: who is called and who is let in (-called +let in):\n%s", variant, diff)
		}
		for call := range calls {
			_, to, _ := strings.Cut(call, " > ")
			if !serves[to] || !listens[to] {
				t.Errorf("%s: %s, but the Service has the port: %v, its Pods listen: %v", variant, call, serves[to], listens[to])
			}
		}
	}
}

// In a Linkerd mesh what comes to a Pod comes to the port of its proxy, whatever the
// port that it is for: each rule has it but that of the API server, which is in no
// mesh. Servers that speak no HTTP are marked, or the proxy would wait for a request.
func TestMesh(t *testing.T) {
	h := newHelm(t)
	const proxy = 4143
	rules := 0
	render := h.render(t, append(slices.Clone(everything), "--set", "global.nats.embedded=true,global.redis.embedded=true,classifier.customTags=")...)
	for _, n := range networks(t, render) {
		if n.Kind != "NetworkPolicy" {
			continue
		}
		check := func(ports []struct{ Port int }, want bool) {
			rules++
			if got := slices.Contains(ports, struct{ Port int }{proxy}); got != want {
				t.Errorf("%s: the rule for %v has the proxy's port: %v, want %v", n.Metadata.Name, ports, got, want)
			}
		}
		for _, rule := range n.Spec.Ingress {
			check(rule.Ports, rule.Ports[0].Port != 8443)
		}
		if n.Spec.Egress != nil {
			check((*n.Spec.Egress)[0].Ports, true)
		}
	}
	if rules < 15 {
		t.Errorf("%d rules; this test would show nothing", rules)
	}
	found := workloads(t, render)
	for name, port := range map[string]string{"nats": "4222", "redis": "6379", "router": "<nil>"} {
		annotations, _ := found[name].Spec.Template.Metadata["annotations"].(map[string]any)
		if got := fmt.Sprint(annotations["config.linkerd.io/opaque-ports"]); got != port || annotations["linkerd.io/inject"] != "enabled" {
			t.Errorf("%s: annotations %v, want the opaque port %s", name, annotations, port)
		}
	}
	if n := strings.Count(render, "config.linkerd.io/opaque-ports"); n != 4 {
		t.Errorf("%d marks, want them on Services and Pods of two", n)
	}
}

// Nobody reads metrics where no scraper is named: a rule without peers lets everybody in.
func TestNoScraper(t *testing.T) {
	h := newHelm(t)
	for _, n := range networks(t, h.render(t, "--set-json", "global.networkPolicy.scraper=[]")) {
		for _, rule := range n.Spec.Ingress {
			if slices.Contains(rule.Ports, struct{ Port int }{9990}) {
				t.Errorf("%s lets %v in to the metrics", n.Metadata.Name, rule.From)
			}
		}
	}
}

func networks(t *testing.T, render string) (out []network) {
	t.Helper()
	d := yaml.NewDecoder(strings.NewReader(render))
	for {
		var n network
		switch err := d.Decode(&n); {
		case err == io.EOF:
			return out
		case err != nil:
			// Others have fields of the same name and another type.
			if n.Kind == "NetworkPolicy" || n.Kind == "Service" {
				t.Fatal(err)
			}
		default:
			out = append(out, n)
		}
	}
}
