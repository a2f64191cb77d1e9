package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/resources"
)

func validateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate DIR",
		Short: "Check a folder of resources with the code that would load it",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			catalog, problems := resources.Load(args[0])
			for _, p := range problems {
				fmt.Fprintln(cmd.OutOrStdout(), p)
			}
			if problems.Err() != nil {
				return errors.New("the resources would not be loaded")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %d models, %d worker sets, %d pools\n", len(catalog.Models), len(catalog.Sets), len(catalog.Pools))
			return nil
		},
	}
}
