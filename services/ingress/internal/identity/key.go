package identity

import (
	"crypto/sha256"
	"crypto/subtle"
	"time"

	"github.com/kinference/kinference/internal/apikey"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// keyring has the API keys of a namespace, by id.
type keyring map[string]*keyEntry

type keyEntry struct {
	tenant *catalog.Tenant
	key    *routerv1.Key
}

// nobody stands for a key that does not exist, so that looking for one takes as
// long as finding one.
var nobody = &keyEntry{key: &routerv1.Key{Sha256: make([]byte, sha256.Size)}}

// find returns the entry of an API key, or why there is none.
func (k keyring) find(now time.Time, key string) (*keyEntry, *Refusal) {
	id, ok := apikey.Parse(key)
	if !ok {
		return nil, because("malformed")
	}
	entry := k[id]
	if entry == nil {
		entry = nobody
	}
	sum := apikey.Hash(key)
	equal := subtle.ConstantTimeCompare(sum[:], entry.key.GetSha256()) == 1
	switch {
	case !equal:
		return nil, because("unknown_key")
	case entry.key.GetRevoked():
		return nil, because("revoked")
	case entry.key.GetExpiresUnix() != 0 && now.Unix() >= entry.key.GetExpiresUnix():
		return nil, because("expired")
	}
	return entry, nil
}

// user is whom a key was made for.
func (e *keyEntry) user() string {
	if u := e.key.GetUser(); u != "" {
		return u
	}
	return "key:" + e.key.GetId()
}

// same compares two credentials in a time that tells nothing of them.
func same(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}
