package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

const reference = "../../docs/reference/kinfctl.md"

// The reference is written from the commands:
//
//	go test ./cmd/kinfctl -run Reference -update
func TestReference(t *testing.T) {
	root := rootCommand()
	root.InitDefaultCompletionCmd("kinfctl")
	var index, sections strings.Builder
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}
		if c.Runnable() {
			path := c.CommandPath()
			fmt.Fprintf(&index, "* [%s](#%s): %s\n", path, strings.ReplaceAll(path, " ", "-"), c.Short)
			section(&sections, c)
		}
		// The shells differ in how the script is loaded, which their help tells.
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	golden(t, reference, `# kinfctl

`+root.Short+`. This page is written from the commands in [cmd/kinfctl](../../cmd/kinfctl); do not edit it.

The exit code is 0, 1 for findings and failures, or 2 for wrong usage and for requests that would not be routed.

`+index.String()+sections.String())
	if raw, err := os.ReadFile(reference); err != nil || strings.Contains(string(raw), "\t") {
		t.Errorf("%v; want blanks only", err)
	}
}

func section(b *strings.Builder, c *cobra.Command) {
	fmt.Fprintf(b, "\n## %s\n\n", c.CommandPath())
	long := c.Long
	if long == "" {
		long = c.Short + "."
	}
	if c.Parent().Name() == "completion" {
		long = c.Short + ". `" + c.CommandPath() + " --help` tells how to load it."
	}
	use := strings.TrimSuffix(c.UseLine(), " [flags]")
	fmt.Fprintf(b, "%s\n\n```\n%s\n```\n", strings.TrimSpace(long), use)
	if c.Example != "" {
		fmt.Fprintf(b, "\nFor example:\n\n```\n%s\n```\n", strings.ReplaceAll(c.Example, "  kinfctl", "kinfctl"))
	}
	if flags := c.LocalFlags().FlagUsages(); flags != "" {
		fmt.Fprintf(b, "\nFlags:\n\n```\n%s```\n", flags)
	}
}
