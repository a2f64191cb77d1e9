package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/deploy/charts"
)

// definitions is the release of the chart kinference-crds. It is the cluster's, so
// there is one.
const definitions = "kinference-crds"

// definitionsNamespace has its release: the same for everybody, whatever the namespace
// of the context in use, because helm lets a release of another one not have them.
const definitionsNamespace = "default"

// helmEnds is the time that helm has to end when it is asked to.
const helmEnds = 30 * time.Second

// cluster is how helm and kubectl reach one, and what is installed there.
type cluster struct {
	kubeconfig, context string
	namespace, release  string
	files, sets         []string
	variant             string
	helm, kubectl       string // programs
}

func clusterFlags(cmd *cobra.Command) *cluster {
	c := &cluster{}
	f := cmd.Flags()
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "file that says how to reach the cluster; empty: as kubectl does")
	f.StringVar(&c.context, "context", "", "context in it; empty: the current one")
	f.StringVarP(&c.namespace, "namespace", "n", "kinference", "namespace of the services")
	f.StringVar(&c.release, "release", "kinference", "name of the release")
	f.StringVar(&c.helm, "helm", "helm", "the program helm, version 4 or 3.18 and later")
	f.StringVar(&c.kubectl, "kubectl", "kubectl", "the program kubectl")
	return c
}

// valueFlags are for what renders the chart.
func (c *cluster) valueFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringArrayVarP(&c.files, "values", "f", nil, "file with values; may be repeated")
	f.StringArrayVar(&c.sets, "set", nil, "value as helm has it: NAME=VALUE; may be repeated")
	f.StringVar(&c.variant, "profile", "", "values to begin with: dev (one Pod of each service and its own NATS) or ha (for production); empty: the defaults")
}

// unpacked are the embedded charts in a folder, with the dependencies in place.
func unpacked() (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp("", "kinference-charts-")
	if err != nil {
		return "", nil, fmt.Errorf("unpack charts: %w", err)
	}
	remove = func() { _ = os.RemoveAll(dir) } // scratch
	for _, chart := range []string{"kinference", definitions} {
		if err := unpack(chart, filepath.Join(dir, chart)); err != nil {
			remove()
			return "", nil, fmt.Errorf("unpack chart %s: %w", chart, err)
		}
	}
	return dir, remove, nil
}

// unpack writes a chart into the folder to, and the charts that it depends on below
// it, as helm's `dependency update` does.
func unpack(chart, to string) error {
	files, err := fs.Sub(charts.Files, chart)
	if err != nil {
		return err
	}
	raw, err := charts.Read(chart+"/Chart.yaml", charts.Version)
	if err != nil {
		return err
	}
	var meta struct{ Dependencies []struct{ Name string } }
	if err := yaml.Unmarshal(raw, &meta); err != nil {
		return err
	}
	if err := os.CopyFS(to, files); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(to, "Chart.yaml"), raw, 0o644); err != nil { //nolint:gosec // as the others
		return err
	}
	for _, d := range meta.Dependencies {
		if err := unpack(d.Name, filepath.Join(to, "charts", d.Name)); err != nil {
			return err
		}
	}
	return nil
}

// values are helm's arguments for the values.
func (c *cluster) values(dir string) ([]string, error) {
	var out []string
	if c.variant != "" {
		path := filepath.Join(dir, "kinference", "values-"+c.variant+".yaml")
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return nil, usageError{fmt.Errorf("there is no profile %q: want dev or ha", c.variant)}
		}
		out = append(out, "--values", path)
	}
	for _, f := range c.files {
		out = append(out, "--values", f)
	}
	for _, s := range c.sets {
		out = append(out, "--set", s)
	}
	return out, nil
}

// runHelm runs helm, whose messages go to the writers.
func (c *cluster) runHelm(ctx context.Context, stdout, stderr io.Writer, args ...string) error {
	if c.kubeconfig != "" {
		args = append(args, "--kubeconfig", c.kubeconfig)
	}
	if c.context != "" {
		args = append(args, "--kube-context", c.context)
	}
	path, err := exec.LookPath(c.helm)
	if err != nil {
		return usageError{fmt.Errorf("%w: install helm, or name it with --helm", err)}
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// Helm that is killed leaves a release that is under way for ever, which none can
	// upgrade; asked to end, it notes that it failed.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = helmEnds
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("helm %s: %w", args[0], err)
	}
	return nil
}

// askHelm runs helm and returns what it says.
func (c *cluster) askHelm(ctx context.Context, args ...string) (string, error) {
	var out, stderr bytes.Buffer
	err := c.runHelm(ctx, &out, &stderr, args...)
	if text := strings.TrimSpace(stderr.String()); err != nil && text != "" {
		err = fmt.Errorf("%w\n%s", err, text)
	}
	return out.String(), err
}

// render is what would be applied, without asking a cluster.
func (c *cluster) render(ctx context.Context, dir string, crds bool) (out string, err error) {
	args, err := c.values(dir)
	if err != nil {
		return "", err
	}
	if crds {
		if out, err = c.askHelm(ctx, "template", definitions, filepath.Join(dir, definitions)); err != nil {
			return "", err
		}
	}
	// Who asks knows what the cluster has to offer; check --pre looks.
	text, err := c.askHelm(ctx, append([]string{"template", c.release, filepath.Join(dir, "kinference"), "--namespace", c.namespace, "--api-versions", "monitoring.coreos.com/v1"}, args...)...)
	return out + text, err
}

// ask runs kubectl and returns what it says.
func (c *cluster) ask(ctx context.Context, args ...string) (string, error) {
	if c.kubeconfig != "" {
		args = slices.Insert(args, 0, "--kubeconfig", c.kubeconfig)
	}
	if c.context != "" {
		args = slices.Insert(args, 0, "--context", c.context)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, c.kubectl, append(args, "--request-timeout=10s")...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out), fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// installed tells whether the release is there. Which ones a list has without the
// states, helm 3 and 4 see differently.
func (c *cluster) installed(ctx context.Context) (bool, error) {
	out, err := c.askHelm(ctx, "list", "--namespace", c.namespace, "--filter", "^"+regexp.QuoteMeta(c.release)+"$", "--deployed", "--failed", "--pending", "--short")
	return strings.TrimSpace(out) != "", err
}
