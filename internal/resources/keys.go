package resources

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/apikey"
)

// KeyWriter writes records of API keys to where the resources are from: *KeyFolder
// or *kube.KeySecrets.
type KeyWriter interface {
	// Put changes or adds one record of a Secret: change gets those that there are,
	// and returns the one to write. It may be called more than once.
	Put(ctx context.Context, namespace, secret string, change func([]apikey.Record) (apikey.Record, error)) error
}

var _ KeyWriter = (*KeyFolder)(nil)

// Errors of CreateKey and RevokeKey.
var (
	ErrNoSecret = errors.New("the tenant names no Secret for API keys: give it spec.identities with an apiKeySecretRef")
	ErrNoKey    = errors.New("there is no such key")
	ErrKeyForm  = errors.New("want a user and a description of at most 253 printable characters, and a lifetime of 1s to 87600h")
)

// KeySecrets are the Secrets that a tenant names for its API keys, without
// namespace.
func (t *Tenant) KeySecrets() []string {
	var out []string
	for _, id := range t.Spec.Identities {
		if id.APIKeySecretRef != nil {
			out = append(out, string(id.APIKeySecretRef.Name))
		}
	}
	return out
}

// TenantNamed returns the tenant namespace/name; nil if there is none.
func (c *Catalog) TenantNamed(name string) *Tenant {
	for _, t := range c.Tenants {
		if t.Name == name {
			return t
		}
	}
	return nil
}

// maxLifetime bounds how long a key may be good.
const maxLifetime = 87600 * time.Hour

// CreateKey makes a key of a tenant and writes its record to the first Secret that
// the tenant names. What r has of user, description and times holds. The key is
// nowhere but in the answer.
func CreateKey(ctx context.Context, w KeyWriter, t *Tenant, r apikey.Record, lifetime time.Duration) (key, secret string, made apikey.Record, err error) {
	secrets := t.KeySecrets()
	if len(secrets) == 0 {
		return "", "", made, ErrNoSecret
	}
	if lifetime != 0 && (lifetime < time.Second || lifetime > maxLifetime) {
		return "", "", made, ErrKeyForm
	}
	key, r.ID = apikey.New()
	r.SHA256, r.Created = apikey.Hash(key), r.Created.UTC().Truncate(time.Second)
	if lifetime != 0 {
		r.Expires = r.Created.Add(lifetime)
	}
	if made, err = apikey.Decode(r.ID, r.Encode()); err != nil {
		return "", "", made, ErrKeyForm
	}
	namespace, _, _ := strings.Cut(t.Name, "/")
	err = w.Put(ctx, namespace, secrets[0], func([]apikey.Record) (apikey.Record, error) { return made, nil })
	if err != nil {
		return "", "", apikey.Record{}, err
	}
	return key, secrets[0], made, nil
}

// RevokeKey ends a key of a tenant. Revoking it again changes nothing.
func RevokeKey(ctx context.Context, w KeyWriter, t *Tenant, id string, now time.Time) (secret string, revoked apikey.Record, err error) {
	namespace, _, _ := strings.Cut(t.Name, "/")
	for _, secret := range t.KeySecrets() {
		err := w.Put(ctx, namespace, secret, func(records []apikey.Record) (apikey.Record, error) {
			for _, r := range records {
				if r.ID != id {
					continue
				}
				if r.Revoked.IsZero() {
					r.Revoked = now.UTC().Truncate(time.Second)
				}
				revoked = r
				return r, nil
			}
			return apikey.Record{}, ErrNoKey
		})
		if !errors.Is(err, ErrNoKey) {
			return secret, revoked, err
		}
	}
	return "", apikey.Record{}, fmt.Errorf("%w among those of InferenceTenant %s", ErrNoKey, t.Name)
}
