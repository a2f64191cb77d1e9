package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

func topCommand() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the workers live",
		Long: `Show the workers live, anew each second until interrupted: whether each is ready, the prompts that wait and run in the engine with
their means over 30 s, the share of its KV cache in use, our requests in flight, and of the requests that ended there in the last
five minutes the share of prompt tokens that were cached, the mean time to first token, and by how much half of the predictions of it were
off at most. Providers follow with what is known, then the first of the requests that wait in the router.`,
		Args: cobra.NoArgs,
	}
	admin := adminFlags(cmd)
	cmd.Flags().BoolVar(&once, "once", false, "show them once")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		ask := func() (*adminv1.StatusResponse, error) { return askStatus(cmd.Context(), admin) }
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
func top(ctx context.Context, w io.Writer, tick <-chan time.Time, ask func() (*adminv1.StatusResponse, error)) error {
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

func printTop(w io.Writer, s *adminv1.StatusResponse) error {
	ready := 0
	for _, x := range s.GetWorkers() {
		if x.GetReady() {
			ready++
		}
	}
	fmt.Fprintf(w, "catalog version %d, %d of %d workers ready, %d requests wait for one\n\n", s.GetCatalogVersion(), ready, len(s.GetWorkers()), s.GetQueued())
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "worker\tready\tqueue\t30s\trunning\t30s\tkv\t30s\tin flight\tcache hits\tttft\toff by\trequests")
	for _, x := range s.GetWorkers() {
		r := rowOf(x)
		hits, ttft, n := recent(x.GetRecent())
		off := "-"
		if e := x.GetRecent().GetTtftError(); e != nil {
			off = ms(e)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", x.GetWorker(), r.ready, r.queue, r.meanQueue, r.running, r.meanRunning, r.kv, r.meanKV, x.GetInFlight(), hits, ttft, off, n)
	}
	for _, x := range s.GetProviders() {
		_, ttft, n := recent(x.GetRecent())
		ready := "yes"
		if x.Concurrency > 0 && x.InFlight >= x.Concurrency {
			ready = "full"
		}
		fmt.Fprintf(t, "provider %s\t%s\t-\t-\t-\t-\t-\t-\t%d\t-\t%s\t-\t%s\n", x.GetProvider(), ready, x.GetInFlight(), ttft, n)
	}
	return errors.Join(t.Flush(), printQueue(w, s, maxTop))
}

// maxTop bounds the requests that are shown of those that wait.
const maxTop = 10

// printQueue shows who waits in the router, most of them at most; nothing if nobody
// does.
func printQueue(w io.Writer, s *adminv1.StatusResponse, most int) error {
	if len(s.GetQueue()) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "waiting\trequests\tlongest")
	for _, c := range s.GetQueue() {
		fmt.Fprintf(t, "%s\t%d\t%s\n", c.GetQos(), c.GetWaiting(), ms(c.GetOldest()))
	}
	fmt.Fprintln(t)
	fmt.Fprintln(t, "request\tmodel\ttenant\tclass\twaits\tfor\tfrom now\twhy")
	list := s.GetWaiting()
	for _, q := range list[:min(len(list), most)] {
		worker := q.GetWorker()
		if worker == "" {
			worker = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", q.GetRequestId(), q.GetModel(), q.GetTenant(), q.GetQos(), ms(q.GetWaited()), worker, ms(q.GetPredictedWait()), q.GetWhy())
	}
	return t.Flush()
}

// recent sums up what ended lately: the share of prompt tokens that were cached, the
// time to first token, and how many requests.
func recent(r *adminv1.RecentRequests) (hits, ttft, n string) {
	hits, ttft, n = "-", "-", "-"
	if r == nil {
		return hits, ttft, n
	}
	if r.PromptTokens > 0 {
		hits = fmt.Sprintf("%.0f %%", 100*float64(r.CachedTokens)/float64(r.PromptTokens))
	}
	if r.Ttft != nil {
		ttft = ms(r.Ttft)
	}
	return hits, ttft, fmt.Sprint(r.Requests)
}
