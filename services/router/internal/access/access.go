// Package access decides who may call the admin API.
//
// A caller shows a bearer token. Sources know tokens: a file of hashed static
// tokens (Tokens), the Kubernetes API (Kubernetes), and one secret that the all in
// one binary makes for itself (Secret). The first source that knows the token
// answers. Nobody is let in without one, and a source that cannot be asked lets
// nobody in. Tokens are compared by their SHA-256 and never kept, logged or sent
// back. Everything here is safe for concurrent use.
package access

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
)

// Permission is what a call needs.
type Permission struct {
	// Resource such as decisions, and Verb as Kubernetes has it: get, watch, create,
	// update, delete.
	Resource, Verb string
}

// Role is what a static token may do.
type Role string

// The roles. Operate includes Read.
const (
	Read    Role = "read"
	Operate Role = "operate"
)

// Role is the least role that has the permission.
func (p Permission) Role() Role {
	switch p.Verb {
	case "get", "list", "watch":
		return Read
	}
	return Operate
}

// allows tells whether a role has a permission.
func (r Role) allows(p Permission) bool { return r == Operate || r == p.Role() }

// Caller is who holds a token.
type Caller struct {
	// Name for the audit log: of the static token, or the user in Kubernetes.
	Name string
	// Source is what knows the token: file, kubernetes or local.
	Source string

	allowed func(ctx context.Context, p Permission) (bool, error)
}

// Errors of Check.
var (
	// ErrUnknown: no source knows the token.
	ErrUnknown = errors.New("the token is unknown")
	// ErrDenied: the token is known and not allowed to.
	ErrDenied = errors.New("the token does not allow this")
	// ErrAway: a source that may know it cannot be asked now.
	ErrAway = errors.New("the token cannot be checked now")
)

// Source knows some tokens.
type Source interface {
	// Lookup finds the caller of a token: nil if it is not known here, ErrAway if
	// that cannot be found out.
	Lookup(ctx context.Context, token string) (*Caller, error)
}

// maxToken bounds a token in bytes; those of Kubernetes have about 1 kB.
const maxToken = 16 << 10

// Sources are asked one after the other.
type Sources []Source

// Check finds the caller of a token and whether it has a permission. The caller is
// nil unless its token is known; the error is one of those above.
func (s Sources) Check(ctx context.Context, token string, p Permission) (*Caller, error) {
	if token == "" || len(token) > maxToken {
		return nil, ErrUnknown
	}
	away := false
	for _, source := range s {
		c, err := source.Lookup(ctx, token)
		if err != nil {
			away = true
			continue
		}
		if c == nil {
			continue
		}
		switch ok, err := c.allowed(ctx, p); {
		case err != nil:
			return c, ErrAway
		case !ok:
			return c, ErrDenied
		}
		return c, nil
	}
	if away {
		return nil, ErrAway
	}
	return nil, ErrUnknown
}

// Secret is a source of one token that may do all.
type Secret string

// Lookup implements Source.
func (s Secret) Lookup(_ context.Context, token string) (*Caller, error) {
	a, b := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(s))
	if s == "" || subtle.ConstantTimeCompare(a[:], b[:]) != 1 {
		return nil, nil
	}
	return static("local", "local", Operate), nil
}

func static(name, source string, r Role) *Caller {
	return &Caller{Name: name, Source: source, allowed: func(_ context.Context, p Permission) (bool, error) { return r.allows(p), nil }}
}
