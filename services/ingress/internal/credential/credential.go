// Package credential reads the keys that providers are paid with.
//
// A [Store] has them in a folder, <namespace>/<name of the Secret>/<key of the
// Secret>, which is how Kubernetes mounts Secrets into a Pod. Ingress then needs no
// right to read Secrets: a break-in sees those that were mounted, and no others. The
// kubelet replaces the files when the Secret changes, and each is read anew when it
// was read more than a second ago. Pods can mount Secrets of their own namespace
// only; for others [Kubernetes] gets labelled ones by name from the API. [Role] has
// keys that AWS gives to the identity of the Pod, and [Tokens] the tokens that Azure
// and Databricks give for it, or for the client of a Secret.
//
// With each of them keys rotate without a restart, and one that is gone is not used
// any more. All are safe for concurrent use. Errors name Secrets and files, never
// what is in them.
package credential

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

const (
	// fresh is how long what was read is used.
	fresh = time.Second
	// maxFile bounds a key, maxKept the Secrets whose keys are kept in memory.
	maxFile, maxKept = 64 << 10, 1024
)

// Store reads credentials. Make it with New.
type Store struct {
	dir  string
	now  func() time.Time
	mu   sync.Mutex
	kept map[string]entry
}

type entry struct {
	keys provider.Credentials
	err  error
	at   time.Time
}

// New makes a Store of the Secrets in a folder; empty: there are none.
func New(dir string) *Store { return &Store{dir: dir, now: time.Now, kept: map[string]entry{}} }

// name is what a namespace or a Secret may be called.
var name = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

// Secret returns the keys of a Secret, named namespace/name.
func (s *Store) Secret(_ context.Context, secret string) (provider.Credentials, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if e, ok := s.kept[secret]; ok && now.Sub(e.at) < fresh && !now.Before(e.at) {
		return e.keys, e.err
	}
	if len(s.kept) >= maxKept {
		clear(s.kept)
	}
	e := entry{at: now}
	e.keys, e.err = s.read(secret)
	s.kept[secret] = e
	return e.keys, e.err
}

func (s *Store) read(secret string) (c provider.Credentials, err error) {
	if s.dir == "" {
		return c, errors.New("there is no folder of credentials")
	}
	namespace, base, ok := strings.Cut(secret, "/")
	if !ok || !name.MatchString(namespace) || !name.MatchString(base) {
		return c, errors.New("a Secret is named namespace/name")
	}
	// Nothing outside of the folder is read, wherever links in it lead.
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return c, fmt.Errorf("open folder of credentials: %w", err)
	}
	defer root.Close()
	found := false
	for key, to := range members(&c) {
		text, err := readFile(root, filepath.Join(namespace, base, key))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return provider.Credentials{}, err
		}
		*to, found = strings.TrimSpace(text), true
	}
	if !found {
		return c, fmt.Errorf("%s has none of apiKey, accessKeyId, secretAccessKey, clientId", secret)
	}
	return c, nil
}

// members are the keys that a Secret may have.
func members(c *provider.Credentials) map[string]*string {
	return map[string]*string{
		"apiKey": &c.APIKey, "accessKeyId": &c.AccessKeyID, "secretAccessKey": &c.SecretAccessKey, "sessionToken": &c.SessionToken,
		"clientId": &c.ClientID, "clientSecret": &c.ClientSecret,
	}
}

func readFile(root *os.Root, path string) (string, error) {
	f, err := root.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = errors.New(path + " is too long for a key")
	}
	return string(text), err
}
