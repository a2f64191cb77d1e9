// Command kinfctl checks resources offline, and asks a running control plane how
// its workers are and why a request went where it went.
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

// Exit codes: 1 for findings or failures, 2 for wrong usage.
func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := &cobra.Command{
		Use:           "kinfctl",
		Short:         "Check Kinference resources, show its state and explain its decisions",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(validateCommand(), explainCommand(), statusCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "kinfctl:", err)
		var usage usageError
		if errors.As(err, &usage) {
			return 2
		}
		return 1
	}
	return 0
}

// usageError is a call that cannot be carried out as it stands.
type usageError struct{ error }
