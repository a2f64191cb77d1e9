package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/resources"
)

func validateCommand() *cobra.Command {
	o := resources.Options{Elsewhere: true}
	cmd := &cobra.Command{
		Use:   "validate DIR|FILE...",
		Short: "Check resources with the code that would load and admit them",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			catalog, problems := o.Load(args...)
			for _, p := range problems {
				fmt.Fprintln(cmd.OutOrStdout(), p)
			}
			if problems.Err() != nil {
				return errors.New("the resources would not be loaded")
			}
			fmt.Fprintf(cmd.OutOrStdout(), "ok: %d models, %d worker sets, %d providers, %d pools, %d policies, %d tenants, %d gateway backends\n", len(catalog.Models),
				len(catalog.Sets), len(catalog.Providers), len(catalog.Pools), len(catalog.Policies), len(catalog.Tenants), len(catalog.Backends))
			return nil
		},
	}
	cmd.Flags().BoolVar(&o.Strict, "strict", false, "take what is referred to and not there for an error, not a warning")
	return cmd
}
