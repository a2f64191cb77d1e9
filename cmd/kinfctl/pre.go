package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/deploy/charts"
)

// oldestKubernetes is the minor version that the charts ask for.
const oldestKubernetes = 32

// manifest is what a check looks at of an object.
type manifest struct {
	APIVersion string `json:"apiVersion"`
	Kind       string
	Metadata   struct{ Name, Namespace string }
	Spec       struct {
		SecretName           string // of a Certificate
		VolumeClaimTemplates []struct {
			Spec struct{ StorageClassName string }
		}
		Template struct{ Spec podSpec }
	}
}

type podSpec struct {
	Containers []struct {
		Env []struct {
			ValueFrom struct {
				SecretKeyRef struct{ Name, Key string }
			}
		}
	}
	Volumes []struct {
		Secret struct {
			SecretName string
			Items      []struct{ Key string }
		}
	}
}

var separator = regexp.MustCompile(`(?m)^---\s*$`)

// manifests are the objects of a render.
func manifests(text string) (out []manifest, err error) {
	for _, doc := range separator.Split(text, -1) {
		var m manifest
		if err := yaml.Unmarshal([]byte(doc), &m); err != nil {
			return nil, fmt.Errorf("read manifest: %w", err)
		}
		if m.Kind != "" {
			out = append(out, m)
		}
	}
	return out, nil
}

// definitionNames are those of the resources of Kinference.
func definitionNames() ([]string, error) {
	files, err := fs.Glob(charts.Files, definitions+"/templates/*.yaml")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, f := range files {
		raw, err := fs.ReadFile(charts.Files, f)
		if err != nil {
			return nil, err
		}
		list, err := manifests(string(raw))
		if err != nil {
			return nil, err
		}
		for _, m := range list {
			out = append(out, m.Metadata.Name)
		}
	}
	return out, nil
}

// checker collects what was looked at.
type checker struct{ list []check }

func (c *checker) add(category, name string, problem error, hint string) bool {
	x := check{Category: category, Name: name, Result: passed}
	if problem != nil {
		x.Result, x.Hint = failed, problem.Error()
		if hint != "" {
			x.Hint += ": " + hint
		}
	}
	c.list = append(c.list, x)
	return problem == nil
}

func (c *checker) warn(category, name, hint string) {
	c.list = append(c.list, check{Category: category, Name: name, Result: unknown, Hint: hint})
}

// before looks at what an installation with these values needs and does not bring.
func (c *cluster) before(ctx context.Context) ([]check, error) {
	var k checker
	dir, remove, err := unpacked()
	if err != nil {
		return nil, err
	}
	defer remove()

	version, err := c.askHelm(ctx, "version", "--template", "{{.Version}}")
	if err == nil && !helmIsNew(version) {
		err = fmt.Errorf("it is %s", strings.TrimSpace(version))
	}
	if !k.add("tools", "helm is there", err, "install helm 4, or 3.18 and later") {
		return k.list, nil
	}
	if _, err := exec.LookPath(c.kubectl); !k.add("tools", "kubectl is there", err, "install kubectl, or name it with --kubectl") {
		return k.list, nil
	}
	text, err := c.render(ctx, dir, false)
	if !k.add("values", "the charts take them", err, "see the README of the chart") {
		return k.list, nil
	}
	objects, err := manifests(text)
	if err != nil {
		return nil, err
	}

	raw, err := c.ask(ctx, "get", "--raw", "/version")
	if !k.add("cluster", "answers", err, "see kubectl cluster-info") {
		return k.list, nil
	}
	k.add("cluster", fmt.Sprintf("is Kubernetes 1.%d or later", oldestKubernetes), kubernetesIsNew(raw), "")
	k.add("cluster", "the release is not there yet", c.absent(ctx), "see kinfctl upgrade")
	c.groups(ctx, &k, objects)
	c.mayCreate(ctx, &k, objects)
	c.secrets(ctx, &k, objects)
	c.storage(ctx, &k, objects)
	return k.list, nil
}

var helmVersion = regexp.MustCompile(`^v(\d+)\.(\d+)`)

func helmIsNew(version string) bool {
	m := helmVersion.FindStringSubmatch(strings.TrimSpace(version))
	if m == nil {
		return false
	}
	major, _ := strconv.Atoi(m[1]) // digits
	minor, _ := strconv.Atoi(m[2])
	return major > 3 || major == 3 && minor >= 18
}

func kubernetesIsNew(raw string) error {
	var v struct{ Major, Minor string }
	if err := json.Unmarshal([]byte(raw), &v); err != nil {
		return fmt.Errorf("read its version: %w", err)
	}
	// Some platforms add a sign, as in 32+.
	minor, err := strconv.Atoi(strings.TrimRight(v.Minor, "+"))
	if err != nil || v.Major == "1" && minor < oldestKubernetes {
		return fmt.Errorf("it is %s.%s", v.Major, v.Minor)
	}
	return nil
}

func (c *cluster) absent(ctx context.Context) error {
	there, err := c.installed(ctx)
	if err == nil && there {
		err = fmt.Errorf("%s is in the namespace %s", c.release, c.namespace)
	}
	return err
}

// bring names what makes an API of others known.
var bring = map[string]string{
	"monitoring.coreos.com/v1": "install the Prometheus Operator, or leave global.podMonitor.enabled off",
	"cert-manager.io/v1":       "install cert-manager, or make the Secrets yourself",
	"keda.sh/v1alpha1":         "install KEDA, or use autoscaling.enabled",
}

// groups looks whether the cluster knows all kinds that are rendered.
func (c *cluster) groups(ctx context.Context, k *checker, objects []manifest) {
	raw, err := c.ask(ctx, "api-versions")
	if !k.add("cluster", "tells what it offers", err, "") {
		return
	}
	known := strings.Fields(raw)
	wanted := map[string]bool{}
	for _, m := range objects {
		wanted[m.APIVersion] = true
	}
	for _, v := range slices.Sorted(maps.Keys(wanted)) {
		var err error
		if !slices.Contains(known, v) {
			err = fmt.Errorf("it does not know %s", v)
		}
		k.add("cluster", "knows "+v, err, bring[v])
	}
}

// mayCreate asks for the rights to make what is rendered, the definitions, what helm
// notes of both and, if it is not there, the namespace.
func (c *cluster) mayCreate(ctx context.Context, k *checker, objects []manifest) {
	wanted := map[string]bool{
		"customresourcedefinitions.apiextensions.k8s.io": true, "secrets " + c.namespace: true, "secrets " + definitionsNamespace: true,
	}
	if there, err := c.ask(ctx, "get", "namespace", c.namespace, "--ignore-not-found", "-o", "name"); err == nil && there == "" {
		wanted["namespaces"] = true
	}
	for _, m := range objects {
		group, _, ok := strings.Cut(m.APIVersion, "/")
		resource := plural(m.Kind)
		if ok {
			resource += "." + group
		}
		if m.Metadata.Namespace != "" {
			resource += " " + m.Metadata.Namespace
		}
		wanted[resource] = true
	}
	for _, w := range slices.Sorted(maps.Keys(wanted)) {
		resource, namespace, ok := strings.Cut(w, " ")
		args := []string{"auth", "can-i", "create", resource}
		name := "you may create " + resource
		if ok {
			args, name = append(args, "--namespace", namespace), name+" in "+namespace
		}
		answer, err := c.ask(ctx, args...)
		if err != nil && strings.TrimSpace(answer) == "no" { // it says no and fails
			err = errors.New("you may not")
		}
		k.add("rights", name, err, "let somebody with more rights install, or give them")
	}
}

// plural is the resource of a kind, of those that the charts have.
func plural(kind string) string {
	kind = strings.ToLower(kind)
	if stem, ok := strings.CutSuffix(kind, "cy"); ok {
		return stem + "cies"
	}
	return strings.TrimSuffix(kind, "s") + "s"
}

// secrets looks whether those that are referred to are there, with their keys.
func (c *cluster) secrets(ctx context.Context, k *checker, objects []manifest) {
	made, wanted := map[string]bool{}, map[string]map[string]bool{}
	want := func(name, key string) {
		if wanted[name] == nil {
			wanted[name] = map[string]bool{}
		}
		if key != "" {
			wanted[name][key] = true
		}
	}
	for _, m := range objects {
		if m.Kind == "Certificate" {
			made[m.Spec.SecretName] = true
		}
		for _, v := range m.Spec.Template.Spec.Volumes {
			if v.Secret.SecretName != "" {
				want(v.Secret.SecretName, "")
			}
			for _, item := range v.Secret.Items {
				want(v.Secret.SecretName, item.Key)
			}
		}
		for _, container := range m.Spec.Template.Spec.Containers {
			for _, env := range container.Env {
				if ref := env.ValueFrom.SecretKeyRef; ref.Name != "" {
					want(ref.Name, ref.Key)
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if made[name] {
			continue
		}
		// The names of keys only: values stay where they are.
		raw, err := c.ask(ctx, "get", "secret", name, "--namespace", c.namespace, "-o", `go-template={{range $k, $v := .data}}{{$k}} {{end}}`)
		if err == nil {
			for _, key := range slices.Sorted(maps.Keys(wanted[name])) {
				if !slices.Contains(strings.Fields(raw), key) {
					err = fmt.Errorf("it has no key %s", key)
				}
			}
		}
		k.add("secrets", name+" is there", err, "operations.md says what is in it")
	}
}

// storage looks for the classes of volumes.
func (c *cluster) storage(ctx context.Context, k *checker, objects []manifest) {
	wanted := map[string]bool{}
	for _, m := range objects {
		for _, claim := range m.Spec.VolumeClaimTemplates {
			wanted[claim.Spec.StorageClassName] = true
		}
	}
	if len(wanted) == 0 {
		return
	}
	raw, err := c.ask(ctx, "get", "storageclasses", "-o", `go-template={{range .items}}{{.metadata.name}} {{with .metadata.annotations}}{{index . "storageclass.kubernetes.io/is-default-class"}}{{end}}{{"\n"}}{{end}}`)
	if err != nil {
		k.warn("storage", "classes are known", err.Error())
		return
	}
	known := map[string]bool{}
	for _, line := range strings.Split(raw, "\n") {
		name, standard, _ := strings.Cut(line, " ")
		if name != "" {
			known[name] = true
		}
		if strings.TrimSpace(standard) == "true" {
			known[""] = true // the one that a claim without a class gets
		}
	}
	for _, class := range slices.Sorted(maps.Keys(wanted)) {
		name := "the class " + class + " is there"
		if class == "" {
			name = "there is a default class"
		}
		var err error
		if !known[class] {
			err = errors.New("it is not")
		}
		k.add("storage", name, err, "volumes would wait for ever: name one in the values")
	}
}
