package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
)

const (
	// jwksTime bounds a request for an issuer's keys.
	jwksTime = 5 * time.Second
	// jwksPause is the shortest time between two requests to an issuer, whatever
	// kids tokens name and whatever it answers.
	jwksPause = 10 * time.Second
	// jwksFresh is the age at which keys are asked for again beside the requests,
	// jwksLast the one at which they are not believed any more: an issuer that is
	// away does not lock everybody out at once.
	jwksFresh, jwksLast = 10 * time.Minute, 2 * time.Hour
	// jwksBytes and jwksKeys bound an answer, jwksSilly the size of an RSA modulus
	// in bits, whose check costs the square of it.
	jwksBytes, jwksKeys, jwksSilly = 1 << 20, 100, 8192
)

var errNoKeys = errors.New("the issuer's keys are not known")

// keySet keeps the keys of one issuer. Use keySets.
type keySet struct {
	uri  string
	sets *keySets

	mu      sync.Mutex
	keys    []jose.JSONWebKey
	got     time.Time     // when keys were read; zero: never
	asked   time.Time     // when they were last asked for; zero: never
	pending chan struct{} // closed when the request under way is over; nil: none is
}

// find returns the keys that may have signed a token: those with its kid, or all
// of them where it names none. A kid that is not known has the issuer asked, at
// most once within jwksPause; meanwhile there is no such key.
func (s *keySet) find(ctx context.Context, kid string) ([]jose.JSONWebKey, error) {
	for try := 0; ; try++ {
		s.mu.Lock()
		now := s.sets.now()
		known := !s.got.IsZero() && now.Sub(s.got) < jwksLast
		found := match(s.keys, kid)
		if known && now.Sub(s.got) >= jwksFresh {
			s.refresh(now)
		}
		if known && len(found) > 0 {
			s.mu.Unlock()
			return found, nil
		}
		s.refresh(now)
		pending := s.pending
		s.mu.Unlock()
		if pending == nil || try == 1 {
			if !known {
				return nil, errNoKeys
			}
			return nil, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-pending:
		}
	}
}

func match(keys []jose.JSONWebKey, kid string) []jose.JSONWebKey {
	if kid == "" {
		return keys
	}
	for i := range keys {
		if keys[i].KeyID == kid {
			return keys[i : i+1]
		}
	}
	return nil
}

// refresh begins to ask the issuer unless that was done a moment ago. The caller
// holds mu.
func (s *keySet) refresh(now time.Time) {
	if s.pending != nil || !s.asked.IsZero() && now.Sub(s.asked) < jwksPause {
		return
	}
	s.asked, s.pending = now, make(chan struct{})
	s.sets.tasks.Go(func() {
		keys, err := s.sets.fetch(s.uri)
		s.mu.Lock()
		defer s.mu.Unlock()
		if err == nil {
			s.keys, s.got = keys, s.sets.now()
		} else {
			s.sets.log.Warn("keys of an issuer cannot be read", "uri", s.uri, "err", err)
		}
		close(s.pending)
		s.pending = nil
	})
}

// keySets has a keySet for each issuer.
type keySets struct {
	ctx    context.Context
	client *http.Client
	log    *slog.Logger
	now    func() time.Time
	tasks  sync.WaitGroup

	mu   sync.Mutex
	sets map[string]*keySet // by URI
}

func newKeySets(ctx context.Context, log *slog.Logger, now func() time.Time) *keySets {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost, transport.MaxResponseHeaderBytes = 1, 64<<10
	return &keySets{ctx: ctx, log: log, now: now, sets: map[string]*keySet{}, client: &http.Client{
		Transport: transport, Timeout: jwksTime,
		// The address is pinned: where an answer points to is somebody else's.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// set returns that of a URI.
func (k *keySets) set(uri string) *keySet {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.sets[uri]
	if s == nil {
		s = &keySet{uri: uri, sets: k}
		k.sets[uri] = s
	}
	return s
}

// keep forgets those whose URI is not used any more.
func (k *keySets) keep(uris map[string]bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for uri := range k.sets {
		if !uris[uri] {
			delete(k.sets, uri)
		}
	}
}

// close waits for requests to issuers, which end with the context.
func (k *keySets) close() {
	k.tasks.Wait()
	k.client.CloseIdleConnections()
}

// fetch reads the keys that signatures may be made with. The answer is never
// part of an error.
func (k *keySets) fetch(uri string) ([]jose.JSONWebKey, error) {
	req, err := http.NewRequestWithContext(k.ctx, http.MethodGet, uri, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	answer, err := k.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d", answer.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, jwksBytes+1))
	switch {
	case err != nil:
		return nil, err
	case len(body) > jwksBytes:
		return nil, errors.New("the answer is too long")
	}
	var list struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if json.Unmarshal(body, &list) != nil || list.Keys == nil {
		return nil, errors.New("the answer is no key set")
	}
	var keys []jose.JSONWebKey
	for _, raw := range list.Keys {
		var key jose.JSONWebKey
		// A key of a sort that we do not know is none of our business.
		if key.UnmarshalJSON(raw) == nil && usable(&key) && len(keys) < jwksKeys {
			keys = append(keys, key.Public())
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("the answer has no key that can be used")
	}
	return keys, nil
}

// usable reports whether signatures by a key count: it is not a secret that both
// sides share, and strong enough.
func usable(key *jose.JSONWebKey) bool {
	if key.Use != "" && key.Use != "sig" {
		return false
	}
	switch k := key.Public().Key.(type) {
	case *rsa.PublicKey:
		return k.N.BitLen() >= 2048 && k.N.BitLen() <= jwksSilly
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return true
	}
	return false
}
