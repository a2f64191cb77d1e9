package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

func indexCommand() *cobra.Command {
	var r adminv1.InspectIndexRequest
	cmd := &cobra.Command{
		Use:   "index",
		Short: "Show the index of KV-cache blocks and what is shared most",
		Long: `Show how large the index of KV-cache blocks is, and the prefixes with the most blocks of conversations below them: from the first block to
where the conversations part, with the numbers of workers that hold their first and their last block. Prompts are known by hashes only; where
a prompt is cached kinfctl explain tells.`,
		Example: `  kinfctl index --top 20`,
		Args:    cobra.NoArgs,
	}
	out, admin := outputFlag(cmd), adminFlags(cmd)
	cmd.Flags().Uint32Var(&r.Top, "top", 10, "number of prefixes, at most 1000")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		client, err := admin.client(cmd.Context())
		if err != nil {
			return err
		}
		answer, err := client.InspectIndex(cmd.Context(), &r)
		if err != nil {
			return admin.failed(err)
		}
		return out.print(cmd.OutOrStdout(), answer.GetIndex(), func(w io.Writer) error { return printIndex(w, answer) })
	}
	return cmd
}

func printIndex(w io.Writer, answer *adminv1.InspectIndexResponse) error {
	i := answer.GetIndex()
	perBlock := 0.0
	if i.GetBlocks() > 0 {
		perBlock = float64(i.GetBytes()) / float64(i.GetBlocks())
	}
	fmt.Fprintf(w, "%d blocks in %.1f MB (%.1f bytes each), %d combinations of holders, %d workers with holes\n",
		i.GetBlocks(), float64(i.GetBytes())/1e6, perBlock, i.GetStates(), i.GetHoled())
	if len(i.GetPrefixes()) == 0 {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\nFIRST BLOCK\tBLOCKS\tBELOW\tHOLD THE FIRST\tHOLD ALL")
	for _, p := range i.GetPrefixes() {
		fmt.Fprintf(t, "%016x\t%d\t%d\t%d\t%d\n", p.GetFirst(), p.GetBlocks(), p.GetBelow(), p.GetHolders(), p.GetWhole())
	}
	return t.Flush()
}
