package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/proto/gen/kinference/admin/v1/adminv1connect"
)

func keysCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "keys", Short: "Make, list and revoke API keys of tenants"}
	cmd.AddCommand(createKeyCommand(), listKeysCommand(), revokeKeyCommand())
	return cmd
}

// keyFlags are common to all commands about keys: through the admin API, or offline
// on a folder.
func keyFlags(cmd *cobra.Command) (*output, *admin, *string) {
	out, a := outputFlag(cmd), adminFlags(cmd)
	config := cmd.Flags().String("config", "", "folder of resources to work on, without a running router")
	return out, a, config
}

func createKeyCommand() *cobra.Command {
	var r adminv1.CreateKeyRequest
	var lifetime time.Duration
	cmd := &cobra.Command{
		Use:   "create NAMESPACE/TENANT",
		Short: "Make an API key, which is shown this once",
		Args:  cobra.ExactArgs(1),
	}
	cmd.Flags().StringVar(&r.User, "user", "", "whom it is for, as usage and limits name them; empty: the key stands for itself")
	cmd.Flags().StringVar(&r.Description, "description", "", "what it is for, for people")
	cmd.Flags().DurationVar(&lifetime, "lifetime", 0, "how long it is good, such as 720h; 0: until it is revoked")
	out, a, config := keyFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r.Tenant = args[0]
		if lifetime != 0 {
			r.Lifetime = durationpb.New(lifetime)
		}
		var resp *adminv1.CreateKeyResponse
		var err error
		if *config != "" {
			resp, err = createOffline(cmd.Context(), *config, &r)
		} else {
			resp, err = ask(cmd.Context(), a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.CreateKeyResponse, error) {
				return c.CreateKey(ctx, &r)
			})
		}
		if err != nil {
			return err
		}
		if *out == "table" {
			fmt.Fprintf(cmd.ErrOrStderr(), "Key %s of %s, written to the Secret %s. It is shown this once:\n", resp.Record.GetId(), resp.Record.GetTenant(), resp.Record.GetSecret())
			sayForce(cmd.ErrOrStderr(), *config, resp.InForce)
		}
		return out.print(cmd.OutOrStdout(), resp, func(w io.Writer) error {
			_, err := fmt.Fprintln(w, resp.Key)
			return err
		})
	}
	return cmd
}

func listKeysCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list [NAMESPACE/TENANT]",
		Short: "List API keys by what is stored of them, which is not the keys",
		Args:  cobra.MaximumNArgs(1),
	}
	out, a, config := keyFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r := &adminv1.ListKeysRequest{Tenant: strings.Join(args, "")}
		var resp *adminv1.ListKeysResponse
		var err error
		if *config != "" {
			resp, err = listOffline(*config, r)
		} else {
			resp, err = ask(cmd.Context(), a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.ListKeysResponse, error) {
				return c.ListKeys(ctx, r)
			})
		}
		if err != nil {
			return err
		}
		return out.print(cmd.OutOrStdout(), resp, func(w io.Writer) error { return printKeys(w, resp.Keys, time.Now()) })
	}
	return cmd
}

func revokeKeyCommand() *cobra.Command {
	var r adminv1.RevokeKeyRequest
	cmd := &cobra.Command{
		Use:   "revoke ID",
		Short: "End an API key for good",
		Args:  cobra.ExactArgs(1),
	}
	cmd.Flags().StringVar(&r.Tenant, "tenant", "", "tenant of the key, as NAMESPACE/TENANT; empty: whoever has it")
	out, a, config := keyFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r.Id = args[0]
		if id, ok := apikey.Parse(r.Id); ok { // one that leaked may be all that is known
			r.Id = id
		}
		if !apikey.ValidID(r.Id) {
			return usageError{errors.New("want the id of a key, which kinfctl keys list shows, or the whole key")}
		}
		var resp *adminv1.RevokeKeyResponse
		var err error
		if *config != "" {
			resp, err = revokeOffline(cmd.Context(), *config, &r)
		} else {
			resp, err = ask(cmd.Context(), a, func(ctx context.Context, c adminv1connect.AdminServiceClient) (*adminv1.RevokeKeyResponse, error) {
				return c.RevokeKey(ctx, &r)
			})
		}
		if err != nil {
			return err
		}
		if *out == "table" {
			sayForce(cmd.ErrOrStderr(), *config, resp.InForce)
		}
		return out.print(cmd.OutOrStdout(), resp, func(w io.Writer) error { return printKeys(w, []*adminv1.Key{resp.Record}, time.Now()) })
	}
	return cmd
}

// sayForce warns of a change that is written and not served.
func sayForce(w io.Writer, config string, inForce bool) {
	if config == "" && !inForce {
		fmt.Fprintln(w, "WARNING: the router does not serve this change yet. Look at kinfctl check: something may be wrong with the resources.")
	}
}

func printKeys(w io.Writer, keys []*adminv1.Key, now time.Time) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tTENANT\tUSER\tSTATE\tCREATED\tEXPIRES\tSECRET\tDESCRIPTION")
	day := func(unix int64, none string) string {
		if unix == 0 {
			return none
		}
		return time.Unix(unix, 0).UTC().Format(time.DateTime)
	}
	for _, k := range keys {
		state := "good"
		switch {
		case k.RevokedUnix != 0:
			state = "revoked"
		case k.ExpiresUnix != 0 && now.Unix() >= k.ExpiresUnix:
			state = "expired"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", k.Id, k.Tenant, cmp.Or(k.User, "-"), state, day(k.CreatedUnix, "-"), day(k.ExpiresUnix, "never"), cmp.Or(k.Secret, "-"), k.Description)
	}
	return t.Flush()
}

// offline reads a folder. What is wrong in it does not keep keys from being managed.
func offline(dir string) (*resources.Catalog, error) {
	catalog, problems := resources.Options{Elsewhere: true, Partial: true}.Load(dir)
	if catalog == nil {
		return nil, problems.Err()
	}
	return catalog, nil
}

func offlineTenant(dir, name string) (*resources.Tenant, error) {
	catalog, err := offline(dir)
	if err != nil {
		return nil, err
	}
	t := catalog.TenantNamed(name)
	if t == nil {
		return nil, fmt.Errorf("there is no InferenceTenant %q in %s: want NAMESPACE/TENANT of one without errors", name, dir)
	}
	return t, nil
}

func createOffline(ctx context.Context, dir string, r *adminv1.CreateKeyRequest) (*adminv1.CreateKeyResponse, error) {
	t, err := offlineTenant(dir, r.Tenant)
	if err != nil {
		return nil, err
	}
	w := &resources.KeyFolder{Dir: dir}
	key, secret, made, err := resources.CreateKey(ctx, w, t, apikey.Record{User: r.User, Description: r.Description, Created: time.Now()}, r.Lifetime.AsDuration())
	if err != nil {
		return nil, err
	}
	return &adminv1.CreateKeyResponse{Key: key, Record: keyOf(t, &made, secret)}, nil
}

func listOffline(dir string, r *adminv1.ListKeysRequest) (*adminv1.ListKeysResponse, error) {
	catalog, err := offline(dir)
	if err != nil {
		return nil, err
	}
	out := &adminv1.ListKeysResponse{}
	for _, t := range catalog.Tenants {
		for i := range t.Keys {
			if r.Tenant == "" || r.Tenant == t.Name {
				out.Keys = append(out.Keys, keyOf(t, &t.Keys[i], ""))
			}
		}
	}
	slices.SortFunc(out.Keys, func(a, b *adminv1.Key) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Id, b.Id))
	})
	return out, nil
}

func revokeOffline(ctx context.Context, dir string, r *adminv1.RevokeKeyRequest) (*adminv1.RevokeKeyResponse, error) {
	name := r.Tenant
	if name == "" {
		all, err := listOffline(dir, &adminv1.ListKeysRequest{})
		if err != nil {
			return nil, err
		}
		for _, k := range all.Keys {
			switch {
			case k.Id == r.Id && name != "":
				return nil, usageError{errors.New("tenants of several namespaces have a key of this id: name the tenant with --tenant")}
			case k.Id == r.Id:
				name = k.Tenant
			}
		}
		if name == "" {
			return nil, resources.ErrNoKey
		}
	}
	t, err := offlineTenant(dir, name)
	if err != nil {
		return nil, err
	}
	secret, revoked, err := resources.RevokeKey(ctx, &resources.KeyFolder{Dir: dir}, t, r.Id, time.Now())
	if err != nil {
		return nil, err
	}
	return &adminv1.RevokeKeyResponse{Record: keyOf(t, &revoked, secret)}, nil
}

// keyOf is what may be known of a key.
func keyOf(t *resources.Tenant, r *apikey.Record, secret string) *adminv1.Key {
	unix := func(t time.Time) int64 {
		if t.IsZero() {
			return 0
		}
		return t.Unix()
	}
	if secrets := t.KeySecrets(); secret == "" && len(secrets) == 1 {
		secret = secrets[0]
	}
	k := &adminv1.Key{
		Id: r.ID, Tenant: t.Name, User: r.User, Description: r.Description, CreatedUnix: unix(r.Created), ExpiresUnix: unix(r.Expires), RevokedUnix: unix(r.Revoked),
	}
	if secret != "" {
		namespace, _, _ := strings.Cut(t.Name, "/")
		k.Secret = namespace + "/" + secret
	}
	return k
}
