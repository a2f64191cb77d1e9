package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the workers, and whether what is predicted agrees with what they do",
		Args:  cobra.NoArgs,
	}
	out, admin := outputFlag(cmd), adminFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		s, err := askStatus(cmd.Context(), admin)
		if err != nil {
			return err
		}
		return out.print(cmd.OutOrStdout(), s, func(w io.Writer) error { return printStatus(w, s, time.Now()) })
	}
	return cmd
}

// askStatus asks for the state of the fleet.
func askStatus(ctx context.Context, a *admin) (*adminv1.StatusResponse, error) {
	return ask(ctx, a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.StatusResponse, error) {
		return c.Status(ctx, &adminv1.StatusRequest{})
	})
}

func printStatus(w io.Writer, s *adminv1.StatusResponse, now time.Time) error {
	tracker := "followed"
	if !s.GetTrackerConnected() {
		tracker = "away"
	}
	open := ""
	if s.GetOpen() {
		open = ", open to everybody: there is no GatewayBackend"
	}
	fmt.Fprintf(w, "catalog version %d, kvtracker %s%s\n\n", s.GetCatalogVersion(), tracker, open)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "profile\ttokens from\ttoken ids\tblock\tcached tokens\tagree\ttoo few\ttoo many")
	for _, p := range s.GetProfiles() {
		n := p.GetCachedCounts()
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\n", p.GetProfile(), source(p), tokens(p), number(p.GetBlockSize()), cached(p), n.GetAgree(), n.GetTooFew(), n.GetTooMany())
	}
	fmt.Fprintln(t)
	fmt.Fprintln(t, "worker\tready\tsample\tblock\tcontext\tindex\tblocks\tlag\ttoken ids\tchecked")
	for _, x := range s.GetWorkers() {
		sample := "-"
		if x.SampleAge != nil {
			sample = x.GetSampleAge().AsDuration().Round(100 * time.Millisecond).String()
		}
		ready := "yes"
		if !x.GetReady() {
			ready = x.GetReason()
		}
		index, blocks, lag := "unknown", "-", "-"
		if i := x.GetIndex(); i != nil {
			index, blocks, lag = follows(i), fmt.Sprint(i.GetBlocks()), ms(i.GetLag())
		}
		checked := "-"
		if at := x.GetTokensCheckedUnixNanos(); at > 0 {
			checked = now.Sub(time.Unix(0, at)).Round(time.Second).String() + " ago"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", x.GetWorker(), ready, sample, number(x.GetBlockSize()), number(x.GetMaxModelLen()),
			index, blocks, lag, verdict(x.GetTokens(), x.GetTokensCause()), checked)
	}
	if len(s.GetPeers()) > 0 {
		fmt.Fprintln(t)
		fmt.Fprintln(t, "other router\theard of")
		for _, p := range s.GetPeers() {
			fmt.Fprintf(t, "%s\t%s ago\n", p.GetRouter(), p.GetAge().AsDuration().Round(100*time.Millisecond))
		}
	}
	return errors.Join(t.Flush(), printQueue(w, s, len(s.GetWaiting())))
}

func source(p *adminv1.ProfileStatus) string {
	switch p.GetSource() {
	case adminv1.TokenSource_TOKEN_SOURCE_LOCAL:
		if p.GetPassTokenIds() {
			return "tokenizer, passed on"
		}
		return "tokenizer"
	case adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED:
		return "workers, not tokenizer"
	}
	return "workers"
}

func tokens(p *adminv1.ProfileStatus) string {
	if p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_ASKED {
		return "-"
	}
	text := verdict(p.GetTokens(), p.GetTokensCause())
	if n := p.GetWorkersDiffer(); n > 0 {
		text += fmt.Sprintf(" (%d of %d workers differ)", n, n+p.GetWorkersAgree())
	}
	return text
}

func cached(p *adminv1.ProfileStatus) string {
	text := verdict(p.GetCached(), p.GetCachedCause())
	if list := p.GetCachedDiffers(); len(list) > 0 {
		text += " at " + list[0]
		if len(list) > 1 {
			text += fmt.Sprintf(" and %d more", len(list)-1)
		}
	}
	return text
}

// verdict is ok, differs with its cause, or unchecked, with the cause if there is
// one.
func verdict(s routerv1.ParityState, c routerv1.ParityCause) string {
	text := map[routerv1.ParityState]string{routerv1.ParityState_PARITY_STATE_AGREES: "ok", routerv1.ParityState_PARITY_STATE_DIFFERS: "differs"}[s]
	if text == "" {
		text = "unchecked"
	}
	if c != 0 {
		text += ": " + strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(c.String(), "PARITY_CAUSE_")), "_", " ")
	}
	return text
}

func follows(i *adminv1.WorkerIndex) string {
	switch {
	case !i.GetLive():
		return "not followed"
	case !i.GetComplete():
		return "incomplete"
	}
	return "complete"
}

func number(n uint32) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}
