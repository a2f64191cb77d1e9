package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func topCommand() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the workers live",
		Long: `Show the workers live, anew each second until interrupted: whether each is ready, how old its newest load sample is, what the index
knows of its cache and how late its events are.`,
		Args: cobra.NoArgs,
	}
	routerURL := routerFlag(cmd)
	cmd.Flags().BoolVar(&once, "once", false, "show them once")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ask := func() (*routerv1.StatusResponse, error) { return askStatus(cmd.Context(), *routerURL) }
		if once {
			s, err := ask()
			if err != nil {
				return err
			}
			return printTop(cmd.OutOrStdout(), s)
		}
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		return top(cmd.Context(), cmd.OutOrStdout(), ticker.C, ask)
	}
	return cmd
}

// clear puts the cursor of a terminal at the top and wipes what is below.
const clear = "\x1b[H\x1b[2J"

// top prints at once and at each tick until the context ends. A router that was
// there once may go away for a while.
func top(ctx context.Context, w io.Writer, tick <-chan time.Time, ask func() (*routerv1.StatusResponse, error)) error {
	for seen := false; ; {
		s, err := ask()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !seen:
			return err
		case err != nil:
			fmt.Fprintf(w, "\n%v: asking on\n", err)
		default:
			seen = true
			fmt.Fprint(w, clear)
			if err := printTop(w, s); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		}
	}
}

func printTop(w io.Writer, s *routerv1.StatusResponse) error {
	ready := 0
	for _, x := range s.GetWorkers() {
		if x.GetReady() {
			ready++
		}
	}
	fmt.Fprintf(w, "catalog version %d, %d of %d workers ready\n\n", s.GetCatalogVersion(), ready, len(s.GetWorkers()))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tready\tsample\tcache\tblocks\tlag")
	for _, x := range s.GetWorkers() {
		r := rowOf(x)
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", x.GetWorker(), r.ready, r.sample, r.cache, r.blocks, r.lag)
	}
	return t.Flush()
}
