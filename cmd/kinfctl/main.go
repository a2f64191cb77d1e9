// Command kinfctl checks resources offline, tells what policies would do with a
// request, and asks a running control plane how its workers are and why a request
// went where it went.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes: 1 for findings or failures, 2 for wrong usage and for requests that
// would not be routed.
func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "kinfctl:", err)
		return exitCode(err)
	}
	return 0
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "kinfctl",
		Short:         "Check Kinference resources, show its state and explain its decisions",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(installCommand(), upgradeCommand(), uninstallCommand(), validateCommand(), explainCommand(), replayCommand(), getCommand(), topCommand(), decisionsCommand(), checkCommand(), statusCommand(), indexCommand(), classifierCommand(), usageCommand(), objectivesCommand(), capacityCommand(), keysCommand())
	return root
}

// command is what is run.
func command() *cobra.Command {
	root := rootCommand()
	root.InitDefaultCompletionCmd("kinfctl")
	misuse(root)
	return root
}

// misuse makes wrong arguments a usageError, as wrong flags are. A command that only
// holds others would else print its help for a word that is none of them, and end well.
func misuse(c *cobra.Command) {
	if c.Runnable() {
		if check := c.Args; check != nil {
			c.Args = func(cmd *cobra.Command, args []string) error {
				if err := check(cmd, args); err != nil {
					return usageError{err}
				}
				return nil
			}
		}
	} else {
		c.SuggestionsMinimumDistance = 2
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			hint := ""
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				hint = ": did you mean " + strings.Join(near, " or ") + "?"
			}
			return usageError{fmt.Errorf("unknown command %q for %q%s", args[0], cmd.CommandPath(), hint)}
		}
	}
	for _, sub := range c.Commands() {
		misuse(sub)
	}
}

func exitCode(err error) int {
	var usage usageError
	var refused refusedError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage), errors.As(err, &refused):
		return 2
	}
	return 1
}

// usageError is a call that cannot be carried out as it stands.
type usageError struct{ error }

// refusedError tells that a request would not be routed.
type refusedError struct{ error }
