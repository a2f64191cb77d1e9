// Package salt makes the cache salts that keep prefix caches of tenants apart.
//
// An engine mixes the salt of a request into the hash of its first block, so that
// only requests of one salt share cached blocks: who cannot share cannot measure
// what others have asked. A salt is an HMAC of who may share, so that nobody can
// make one who does not know the secret. Every ingress in front of the same
// engines must have the same secret, or they share nothing. Functions are pure and
// safe for concurrent use.
package salt

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

const (
	// least and most are the sizes of a secret in bytes.
	least, most = 32, 4096
)

// Secret is what salts are made with.
type Secret []byte

// New returns a random secret, for one process alone.
func New() Secret {
	s := make(Secret, least)
	rand.Read(s) // never fails
	return s
}

// Read reads a secret from a file, without white space around it.
func Read(path string) (Secret, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read the secret of cache salts: %w", err)
	case info.Size() > most:
		return nil, fmt.Errorf("the secret of cache salts in %s has more than %d bytes", path, most)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the secret of cache salts: %w", err)
	}
	text := strings.TrimSpace(string(data))
	if len(text) < least {
		return nil, fmt.Errorf("the secret of cache salts in %s has %d bytes: at least %d are needed, such as from openssl rand -hex 32", path, len(text), least)
	}
	return Secret(text), nil
}

// Keep makes a secret in a file that nobody else may read, unless it is there. Of
// several that try at once all get the same.
func Keep(path string) error {
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".salt-*")
	if err != nil {
		return fmt.Errorf("make the secret of cache salts: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.WriteString(base64.RawURLEncoding.EncodeToString(New()) + "\n")
	if err == nil {
		err = f.Sync() // a loss of power must not leave an empty one, which none could start with
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Link(f.Name(), path)
	}
	if err != nil && !os.IsExist(err) {
		return fmt.Errorf("make the secret of cache salts: %w", err)
	}
	return nil
}

// Salt is that of a group of requests, which fields name. Fields are told apart by
// their lengths: a, bc and ab, c are two groups.
func (s Secret) Salt(fields ...string) string {
	mac := hmac.New(sha256.New, s)
	var n [8]byte
	for _, f := range fields {
		binary.BigEndian.PutUint64(n[:], uint64(len(f)))
		mac.Write(n[:])
		mac.Write([]byte(f))
	}
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
