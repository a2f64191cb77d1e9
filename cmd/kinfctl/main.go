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
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes: 1 for findings or failures, 2 for wrong usage and for requests that
// would not be routed.
func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := rootCommand().ExecuteContext(ctx); err != nil {
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
