package router

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	"github.com/kinference/kinference/services/router/internal/admin"
)

// inForce is how long a change of keys may take to be in the catalog before the
// caller is told that it is not yet.
const inForce = 5 * time.Second

var _ admin.Keys = view{}

// ListKeys implements admin.Keys.
func (v view) ListKeys(r *adminv1.ListKeysRequest) (*adminv1.ListKeysResponse, error) {
	out := &adminv1.ListKeysResponse{}
	version, _ := v.s.catalog.Current()
	if version == nil {
		return out, nil
	}
	if r.GetTenant() != "" && version.Resources.TenantNamed(r.GetTenant()) == nil {
		return nil, admin.ErrNoTenant
	}
	for _, t := range version.Resources.Tenants {
		if r.GetTenant() != "" && t.Name != r.GetTenant() {
			continue
		}
		for i := range t.Keys {
			out.Keys = append(out.Keys, keyOf(t, &t.Keys[i], ""))
		}
	}
	slices.SortFunc(out.Keys, func(a, b *adminv1.Key) int {
		return cmp.Or(strings.Compare(a.Tenant, b.Tenant), strings.Compare(a.Id, b.Id))
	})
	return out, nil
}

// CreateKey implements admin.Keys.
func (v view) CreateKey(ctx context.Context, r *adminv1.CreateKeyRequest) (*adminv1.CreateKeyResponse, error) {
	t, err := v.tenant(r.GetTenant())
	if err != nil {
		return nil, err
	}
	if v.s.keys == nil {
		return nil, errNoWriter
	}
	if r.GetLifetime() != nil && r.GetLifetime().AsDuration() <= 0 {
		return nil, resources.ErrKeyForm
	}
	key, secret, made, err := resources.CreateKey(ctx, v.s.keys, t, apikey.Record{User: r.GetUser(), Description: r.GetDescription(), Created: v.s.now()}, r.GetLifetime().AsDuration())
	if err != nil {
		return nil, err
	}
	return &adminv1.CreateKeyResponse{Key: key, Record: keyOf(t, &made, secret), InForce: v.has(ctx, t.Name, made.ID, func(apikey.Record) bool { return true })}, nil
}

// RevokeKey implements admin.Keys.
func (v view) RevokeKey(ctx context.Context, r *adminv1.RevokeKeyRequest) (*adminv1.RevokeKeyResponse, error) {
	name := r.GetTenant()
	if name == "" {
		all, err := v.ListKeys(&adminv1.ListKeysRequest{})
		if err != nil {
			return nil, err
		}
		for _, k := range all.Keys {
			if k.Id == r.GetId() && name != "" {
				return nil, errTwoKeys
			}
			if k.Id == r.GetId() {
				name = k.Tenant
			}
		}
		if name == "" {
			return nil, resources.ErrNoKey
		}
	}
	t, err := v.tenant(name)
	if err != nil {
		return nil, err
	}
	if v.s.keys == nil {
		return nil, errNoWriter
	}
	secret, revoked, err := resources.RevokeKey(ctx, v.s.keys, t, r.GetId(), v.s.now())
	if err != nil {
		return nil, err
	}
	return &adminv1.RevokeKeyResponse{
		Record:  keyOf(t, &revoked, secret),
		InForce: v.has(ctx, name, r.GetId(), func(r apikey.Record) bool { return !r.Revoked.IsZero() }),
	}, nil
}

var (
	errTwoKeys  = errors.New("tenants of several namespaces have a key of this id: name the tenant")
	errNoWriter = errors.New("keys cannot be written here")
)

func (v view) tenant(name string) (*resources.Tenant, error) {
	version, _ := v.s.catalog.Current()
	if version == nil {
		return nil, admin.ErrNoTenant
	}
	t := version.Resources.TenantNamed(name)
	if t == nil {
		return nil, admin.ErrNoTenant
	}
	return t, nil
}

// has waits a while for a catalog in which a key is as it should be.
func (v view) has(ctx context.Context, tenant, id string, good func(apikey.Record) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, inForce)
	defer cancel()
	for {
		version, changed := v.s.catalog.Current()
		if t := version.Resources.TenantNamed(tenant); t != nil && slices.ContainsFunc(t.Keys, func(r apikey.Record) bool { return r.ID == id && good(r) }) {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// keyOf is what may be known of a key. secret is where its record is; empty: not
// known.
func keyOf(t *resources.Tenant, r *apikey.Record, secret string) *adminv1.Key {
	unix := func(t time.Time) int64 {
		if t.IsZero() {
			return 0
		}
		return t.Unix()
	}
	k := &adminv1.Key{
		Id: r.ID, Tenant: t.Name, User: r.User, Description: r.Description,
		CreatedUnix: unix(r.Created), ExpiresUnix: unix(r.Expires), RevokedUnix: unix(r.Revoked),
	}
	if secrets := t.KeySecrets(); secret == "" && len(secrets) == 1 {
		secret = secrets[0]
	}
	if secret != "" {
		namespace, _, _ := strings.Cut(t.Name, "/")
		k.Secret = namespace + "/" + secret
	}
	return k
}
