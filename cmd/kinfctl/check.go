package main

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check that a running control plane works, with a hint for what does not",
		Long: `Check that a running control plane works: the router answers and has resources, kvtracker is followed, every worker is ready, and
token ids and cached tokens are those of the engines. What fails comes with a hint, and the exit code is 1. What nothing is
known of yet is a warning.

With --pre, before an installation: the cluster is new enough and knows what the charts use, you may make what they make, and the Secrets and
classes of volumes that the values name are there. kubectl and helm ask; nothing is changed.`,
		Args: cobra.NoArgs,
	}
	out, admin, place := outputFlag(cmd), adminFlags(cmd), clusterFlags(cmd)
	place.valueFlags(cmd)
	var pre bool
	cmd.Flags().BoolVar(&pre, "pre", false, "check whether a cluster is ready for an installation with these values")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var list []check
		if pre {
			var err error
			if list, err = place.before(cmd.Context()); err != nil {
				return err
			}
		} else {
			s, err := askStatus(cmd.Context(), admin)
			list = checks(admin.url(), s, err)
		}
		if err := out.print(cmd.OutOrStdout(), list, func(w io.Writer) error { return printChecks(w, list) }); err != nil {
			return err
		}
		for _, c := range list {
			if c.Result == failed {
				return errors.New("a check failed")
			}
		}
		return nil
	}
	return cmd
}

// Results of a check.
const (
	passed  = "ok"
	unknown = "warning"
	failed  = "failed"
)

// check is one thing that was looked at.
type check struct {
	Category string `json:"category"`
	Name     string `json:"name"`
	Result   string `json:"result"`
	Hint     string `json:"hint,omitempty"` // what to do about it
}

// checks looks at what a router says, or at why it says nothing.
func checks(url string, s *adminv1.StatusResponse, err error) []check {
	var out []check
	add := func(category, name, result, hint string) {
		if result == passed {
			hint = ""
		}
		out = append(out, check{category, name, result, hint})
	}
	need := func(category, name string, ok bool, hint string) {
		result := failed
		if ok {
			result = passed
		}
		add(category, name, result, hint)
	}
	need("router", "answers at "+url, err == nil, fmt.Sprintf("%v: is it running and as new as kinfctl, and is --admin the address of its admin API?", err))
	if err != nil {
		return out
	}
	need("router", "catalog is loaded", s.GetCatalogVersion() > 0, "the resources were never good: see the router's log, and kinfctl validate")
	switch {
	case s.GetOpen():
		add("gateway", "callers are known", unknown, "there is no GatewayBackend: whoever reaches the gateway is served, without limits")
	case s.GetCatalogVersion() > 0:
		add("gateway", "callers are known", passed, "")
	}
	need("kvtracker", "is followed", s.GetTrackerConnected(), "it is away or not configured: the router goes by its own memory of what is cached where")
	if len(s.GetWorkers()) == 0 {
		add("workers", "there are some", unknown, "no InferenceWorkerSet of the catalog has workers: give endpoints, or a selector that Pods match")
	}
	for _, x := range s.GetWorkers() {
		need("workers", x.GetWorker()+" is ready", x.GetReady(), fmt.Sprintf("%s: look at the engine at %s", x.GetReason(), x.GetUrl()))
	}
	for _, p := range s.GetProfiles() {
		if p.GetSource() == adminv1.TokenSource_TOKEN_SOURCE_ASKED {
			continue // nothing of ours that could differ
		}
		result, hint := parity(p.GetTokens(), p.GetTokensCause(), "the model folder is not what the engines run: give the tokenizer and template of the same revision",
			"no engine was asked yet: it is, with the first requests")
		add("tokenizers", "token ids of "+p.GetProfile()+" agree", result, hint)
	}
	for _, p := range s.GetProfiles() {
		result, hint := parity(p.GetCached(), p.GetCachedCause(), "the index does not know what the engines have cached: look at kvEvents, block size and engine version of the set",
			"nothing to compare yet: send the same prompt twice, and let the engines report cached tokens")
		if list := p.GetCachedDiffers(); result == failed && len(list) > 0 {
			hint = fmt.Sprintf("%s: %s", list[0], hint)
		}
		add("caches", "cached tokens of "+p.GetProfile()+" agree", result, hint)
	}
	return out
}

func parity(s routerv1.ParityState, c routerv1.ParityCause, differs, unchecked string) (result, hint string) {
	switch s {
	case routerv1.ParityState_PARITY_STATE_AGREES:
		return passed, ""
	case routerv1.ParityState_PARITY_STATE_DIFFERS:
		return failed, verdict(s, c) + ": " + differs
	}
	return unknown, verdict(s, c) + ": " + unchecked
}

func printChecks(w io.Writer, list []check) error {
	signs := map[string]string{passed: "√", unknown: "‼", failed: "×"}
	category, result := "", "√"
	for _, c := range list {
		if c.Category != category {
			if category != "" {
				fmt.Fprintln(w)
			}
			category = c.Category
			fmt.Fprintln(w, category)
		}
		fmt.Fprintf(w, "  %s %s\n", signs[c.Result], c.Name)
		if c.Hint != "" {
			fmt.Fprintf(w, "      %s\n", c.Hint)
		}
		if c.Result == failed {
			result = "×"
		}
	}
	_, err := fmt.Fprintf(w, "\nall together: %s\n", result)
	return err
}
