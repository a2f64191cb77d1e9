package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/cmd/stack"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/services/router"
)

func serveCommand() *cobra.Command {
	var o stack.Options
	var level string
	cmd := &cobra.Command{
		Use:   "serve (--config DIR | --kubeconfig FILE)",
		Short: "Serve an OpenAI endpoint in front of the workers that resources describe",
		Long: `Serve an OpenAI endpoint in front of vLLM workers that run already.

DIR holds InferenceWorkerSet and InferencePool resources in YAML; changes are
picked up while serving, and a broken file keeps the last good state.

FILE says how to reach a Kubernetes API that has the resources; workers are then
the Pods that they select, which must be reachable from here, and the status of
each resource says what became of it. Replicas know each other by Leases in the
namespace kinference.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.LogLevel.UnmarshalText([]byte(level)); err != nil {
				return fmt.Errorf("log-level: %w", err)
			}
			// A running router waits for its folder to be mended; whoever starts
			// one by hand wants to hear of it now.
			if o.ConfigDir != "" {
				if _, problems := resources.Load(o.ConfigDir); problems.Err() != nil {
					return fmt.Errorf("load %s: %w", o.ConfigDir, problems.Err())
				}
			}
			o.Output = cmd.ErrOrStderr()
			s, err := stack.Start(cmd.Context(), o)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "endpoint %s/v1\nadmin    %s\nrouter   %s\nconsole  %s\n\nfor kinfctl:\n  export KINFERENCE_ADMIN=%s KINFERENCE_ADMIN_TOKEN_FILE=%s\n  export KINFERENCE_ACCOUNTING=%s\n",
				s.URL(), s.AdminURL(), s.RouterURL(), s.ConsoleURL(), s.AdminAPIURL(), s.AdminTokenFile(), s.AccountingURL())
			select {
			case err = <-s.Failed():
			case <-cmd.Context().Done():
			}
			if stopErr := s.Stop(); err == nil {
				err = stopErr
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.ProviderCredentials, "provider-credentials-dir", "", "folder with the Secrets of providers, as <namespace>/<name>/<key>; read again when they change")
	f.StringVar(&o.ProviderPrivate, "provider-private-networks", "", "blocks of addresses, comma separated, that providers may be at although they are not public; empty: this machine itself")
	f.StringVar(&o.ConfigDir, "config", "", "folder of resources")
	f.StringVar(&o.Kubeconfig, "kubeconfig", "", "file that says how to reach the Kubernetes API with the resources, in place of --config")
	f.StringVar(&o.Listen, "listen", "127.0.0.1:8080", "address of the public endpoint")
	f.StringVar(&o.AdminListen, "admin-listen", "127.0.0.1:9990", "address of /livez, /readyz and /metrics")
	f.StringVar(&o.AdminAPIListen, "admin-api-listen", router.DefaultAdminAPI, "address of the admin API, for kinfctl")
	f.StringVar(&o.AdminTokens, "admin-tokens", "", "file of further tokens that the admin API lets in: a line for each with NAME, ROLE (read or operate) and SHA256")
	f.StringVar(&o.AdminAudit, "admin-audit", "", "file to which the admin API appends who changed what; empty: standard error")
	f.StringVar(&o.RouterListen, "router-listen", "127.0.0.1:7102", "address of the router's RPC port")
	f.StringVar(&o.AccountingListen, "accounting-listen", "127.0.0.1:7106", "address of accounting's RPC port, for kinfctl usage")
	f.StringVar(&o.Ledger, "ledger", "", "place of the ledger of usage: the path of a SQLite file, or a postgres:// URL; empty: a file in the data folder")
	f.StringVar(&o.DataDir, "data", "", "folder for JetStream's files, usage events, the ledger and the admin token; empty: temporary")
	f.StringVar(&o.NATSURL, "nats-url", "", "existing NATS server; empty: embedded")
	f.StringVar(&o.Policy, "policy", "", "scheduling policy: k2 (default), predictedttft, leastrequests, roundrobin, connection, random, or one of those in docs/benchmarks")
	f.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.LogFormat, "log-format", "text", "json or text")
	f.DurationVar(&o.DrainTimeout, "drain-timeout", daemon.DefaultDrainTimeout, "time for requests to finish after a stop signal")
	cmd.MarkFlagsOneRequired("config", "kubeconfig")
	cmd.MarkFlagsMutuallyExclusive("config", "kubeconfig")
	return cmd
}
