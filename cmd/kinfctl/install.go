package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/api/v1alpha1"
)

func installCommand() *cobra.Command { return applyCommand("install") }
func upgradeCommand() *cobra.Command { return applyCommand("upgrade") }

// applyCommand installs what is not there, or upgrades what is.
func applyCommand(verb string) *cobra.Command {
	first := verb == "install"
	cmd := &cobra.Command{
		Use:   verb,
		Short: map[bool]string{true: "Install Kinference in a cluster", false: "Upgrade Kinference in a cluster"}[first],
		Long: strings.ToUpper(verb[:1]) + verb[1:] + ` Kinference with the charts that are part of kinfctl, the definitions first. It is a release of helm, which must be
installed: helm status, rollback and history know it, and the charts of the repository upgrade it. An upgrade keeps the values that are not
given anew, also those of a former profile. With --dry-run the manifests are written instead, and no cluster is asked. kinfctl check --pre tells before what is missing.`,
		Args: cobra.NoArgs,
	}
	c := clusterFlags(cmd)
	c.valueFlags(cmd)
	var dryRun, wait, noDefinitions bool
	var timeout string
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "write what would be applied, and apply nothing")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until all Pods are ready")
	cmd.Flags().BoolVar(&noDefinitions, "no-definitions", false, "leave the definitions as they are, which another one with more rights installs")
	cmd.Flags().StringVar(&timeout, "timeout", "5m", "how long to wait")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out, log := cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()
		dir, remove, err := unpacked()
		if err != nil {
			return err
		}
		defer remove()
		if dryRun {
			text, err := c.render(ctx, dir, !noDefinitions)
			if err == nil {
				_, err = io.WriteString(out, text)
			}
			return err
		}
		args, err := c.values(dir)
		if err != nil {
			return err
		}
		switch there, err := c.installed(ctx); {
		case err != nil:
			return err
		case there && first:
			return usageError{fmt.Errorf("the release %s is in the namespace %s already: see kinfctl upgrade", c.release, c.namespace)}
		case !there && !first:
			return usageError{fmt.Errorf("there is no release %s in the namespace %s: see kinfctl install", c.release, c.namespace)}
		}
		if !noDefinitions {
			if err := c.runHelm(ctx, io.Discard, log, "upgrade", "--install", definitions, filepath.Join(dir, definitions), "--namespace", definitionsNamespace); err != nil {
				return err
			}
		}
		args = append([]string{"upgrade", "--install", c.release, filepath.Join(dir, "kinference"), "--namespace", c.namespace, "--timeout", timeout}, args...)
		if first {
			args = append(args, "--create-namespace")
		} else {
			args = append(args, "--reset-then-reuse-values")
		}
		if wait {
			args = append(args, "--wait")
		}
		return c.runHelm(ctx, out, log, args...)
	}
	return cmd
}

func uninstallCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take Kinference out of a cluster",
		Long: `Take Kinference out of a cluster. The definitions stay, and with them all resources of Kinference, unless --definitions asks for their end.
Volume claims stay. With --dry-run the objects that would be deleted are listed.`,
		Args: cobra.NoArgs,
	}
	c := clusterFlags(cmd)
	var dryRun, all bool
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "list what would be deleted, and delete nothing")
	cmd.Flags().BoolVar(&all, "definitions", false, "delete the definitions and all resources of Kinference in the cluster, too")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ctx, out, log := cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()
		releases := [][]string{{c.release, "--namespace", c.namespace}}
		if all {
			releases = append(releases, []string{definitions, "--namespace", definitionsNamespace})
		}
		for _, release := range releases {
			var err error
			if dryRun {
				err = c.list(ctx, out, release)
			} else {
				args := append([]string{"uninstall"}, release...)
				if all { // a former try may have ended half-way
					args = append(args, "--ignore-not-found")
				}
				err = c.runHelm(ctx, out, log, args...)
			}
			if err != nil {
				return err
			}
		}
		if !all || dryRun {
			return nil
		}
		// The chart marks them to stay, so that they are not lost by accident.
		names, err := definitionNames()
		if err != nil {
			return err
		}
		c.settle(ctx, names)
		_, err = c.ask(ctx, append([]string{"delete", "customresourcedefinitions", "--ignore-not-found"}, names...)...)
		return err
	}
	return cmd
}

// settle waits until the API server serves the resources of definitions. It looks at them
// before it deletes a definition, and again five minutes later only if the cache that it
// has just begun for them was not ready. A question waits for that cache.
func (c *cluster) settle(ctx context.Context, names []string) {
	for _, name := range names {
		resource, group, _ := strings.Cut(name, ".")
		_, _ = c.ask(ctx, "get", "--raw", "/apis/"+group+"/"+v1alpha1.Version+"/"+resource) // what is not there needs no wait
	}
}

// list names the objects of a release.
func (c *cluster) list(ctx context.Context, out io.Writer, release []string) error {
	text, err := c.askHelm(ctx, append([]string{"get", "manifest"}, release...)...)
	if err != nil {
		return err
	}
	list, err := manifests(text)
	if err != nil {
		return err
	}
	for _, m := range list {
		name := m.Metadata.Name
		if m.Metadata.Namespace != "" {
			name = m.Metadata.Namespace + "/" + name
		}
		if _, err := fmt.Fprintf(out, "%s %s\n", m.Kind, name); err != nil {
			return err
		}
	}
	return nil
}
