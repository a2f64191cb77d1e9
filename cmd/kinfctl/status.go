package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

func statusCommand() *cobra.Command {
	var routerURL, output string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the workers, and whether what is predicted agrees with what they do",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return usageError{fmt.Errorf("output %q is unknown: want json", output)}
			}
			if output == "json" {
				return statusJSON(cmd.Context(), cmd.OutOrStdout(), routerURL)
			}
			client := rpc.Client(cmd.Context(), routerURL, routerv1connect.NewRouterServiceClient)
			s, err := client.Status(cmd.Context(), &routerv1.StatusRequest{})
			if err != nil {
				return fmt.Errorf("ask router: %w", err)
			}
			return printStatus(cmd.OutOrStdout(), s, time.Now())
		},
	}
	cmd.Flags().StringVar(&routerURL, "router", "http://127.0.0.1:7102", "base URL of the router")
	cmd.Flags().StringVarP(&output, "output", "o", "", "json for all that is known, else tables")
	return cmd
}

// statusJSON asks for the answer in JSON, which every RPC port speaks, and only
// indents it. What is absent from it is 0, false or empty.
func statusJSON(ctx context.Context, w io.Writer, routerURL string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(routerURL, "/")+routerv1connect.RouterServiceStatusProcedure, strings.NewReader("{}"))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("ask router: %w", err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("ask router: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("ask router: status %d", resp.StatusCode)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return fmt.Errorf("read the router's answer: %w", err)
	}
	out.WriteByte('\n')
	_, err = out.WriteTo(w)
	return err
}

func printStatus(w io.Writer, s *routerv1.StatusResponse, now time.Time) error {
	tracker := "followed"
	if !s.GetTrackerConnected() {
		tracker = "away"
	}
	fmt.Fprintf(w, "catalog version %d, kvtracker %s\n\n", s.GetCatalogVersion(), tracker)
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
	return t.Flush()
}

func source(p *routerv1.ProfileStatus) string {
	switch p.GetSource() {
	case routerv1.TokenSource_TOKEN_SOURCE_LOCAL:
		if p.GetPassTokenIds() {
			return "tokenizer, passed on"
		}
		return "tokenizer"
	case routerv1.TokenSource_TOKEN_SOURCE_DISTRUSTED:
		return "workers, not tokenizer"
	}
	return "workers"
}

func tokens(p *routerv1.ProfileStatus) string {
	if p.GetSource() == routerv1.TokenSource_TOKEN_SOURCE_ASKED {
		return "-"
	}
	text := verdict(p.GetTokens(), p.GetTokensCause())
	if n := p.GetWorkersDiffer(); n > 0 {
		text += fmt.Sprintf(" (%d of %d workers differ)", n, n+p.GetWorkersAgree())
	}
	return text
}

func cached(p *routerv1.ProfileStatus) string {
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

func follows(i *routerv1.WorkerIndex) string {
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
