// Package tlsfile makes TLS configurations of certificates in files that change
// while a process runs, such as those of a mounted Secret that cert-manager renews.
//
// internal/daemon and kinfctl open one Source for a process, internal/rpc serves and
// dials with it; the admission webhook, which has a certificate of its own, opens
// another. Files are read when they change;
// what is of no use is logged, and the last good ones stay. A connection keeps what
// it began with. A Source is safe for concurrent use.
package tlsfile

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Files are paths of PEM files; each may be empty.
type Files struct {
	// Cert and Key are a certificate, with intermediate ones behind it, and its key.
	Cert, Key string
	// CA are the authorities of peers. Empty: those of the system.
	CA string
}

// Validate lists what is wrong with the paths themselves.
func (f Files) Validate() error {
	if (f.Cert == "") != (f.Key == "") {
		return errors.New("a certificate and its key go together")
	}
	return nil
}

const (
	// settle is how long files are left alone after a change: a certificate and its
	// key are two files.
	settle = 100 * time.Millisecond
	// recheck finds changes that a file system does not tell of.
	recheck = time.Minute
)

// content is what the files held at one time. It does not change.
type content struct {
	pair  *tls.Certificate // nil: none
	roots *x509.CertPool   // nil: the system's
}

// Source is the newest good content of Files.
type Source struct {
	files Files
	now   atomic.Pointer[content]
	// seen is the certificate and the authorities as last read, of follow alone.
	seen string
}

// Open reads the files and follows them until ctx is done. It fails if one of them
// cannot be read or is of no use: a process must not start without what it shall
// guard itself with.
func Open(ctx context.Context, f Files, log *slog.Logger) (*Source, error) {
	if err := f.Validate(); err != nil {
		return nil, err
	}
	s := &Source{files: f}
	if _, err := s.read(); err != nil {
		return nil, err
	}
	// Without it they are read each minute.
	w, err := fsnotify.NewWatcher()
	if err == nil {
		// Folders: a Secret changes by one symbolic link beside its files.
		for _, path := range []string{f.Cert, f.Key, f.CA} {
			if path != "" {
				err = errors.Join(err, w.Add(filepath.Dir(path)))
			}
		}
	} else {
		w = &fsnotify.Watcher{} // which says nothing
	}
	if err != nil {
		log.Warn("certificates are read by the minute only", "err", err)
	}
	go s.follow(ctx, w, log)
	return s, nil
}

func (s *Source) follow(ctx context.Context, w *fsnotify.Watcher, log *slog.Logger) {
	if w.Events != nil {
		defer w.Close()
	}
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	due := time.NewTimer(recheck)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Events:
			due.Reset(settle)
			continue
		case err := <-w.Errors: // such as changes that were too many to tell
			log.Warn("a change of certificates may have been missed: they are read again", "err", err)
			due.Reset(settle)
			continue
		case <-due.C:
		case <-tick.C:
		}
		switch changed, err := s.read(); {
		case err != nil:
			log.Error("certificates are of no use: the last good ones stay", "err", err)
		case changed:
			log.Info("certificates changed", "not_after", s.NotAfter())
		}
	}
}

// read takes over what the files hold, if it is good and new.
func (s *Source) read() (changed bool, err error) {
	var c content
	var seen string
	if s.files.Cert != "" {
		crt, err := os.ReadFile(s.files.Cert)
		if err != nil {
			return false, fmt.Errorf("read certificate: %w", err)
		}
		key, err := os.ReadFile(s.files.Key)
		if err != nil {
			return false, fmt.Errorf("read key of the certificate: %w", err)
		}
		pair, err := tls.X509KeyPair(crt, key)
		if err != nil {
			return false, fmt.Errorf("certificate %s: %w", s.files.Cert, err)
		}
		c.pair, seen = &pair, string(crt)
	}
	if s.files.CA != "" {
		pem, err := os.ReadFile(s.files.CA)
		if err != nil {
			return false, fmt.Errorf("read authorities: %w", err)
		}
		c.roots = x509.NewCertPool()
		if !c.roots.AppendCertsFromPEM(pem) {
			return false, fmt.Errorf("%s has no certificate", s.files.CA)
		}
		seen += "\n" + string(pem)
	}
	if s.now.Load() != nil && seen == s.seen {
		return false, nil
	}
	s.seen = seen
	s.now.Store(&c)
	return true, nil
}

// HasCertificate tells whether there is one to serve with.
func (s *Source) HasCertificate() bool { return s.files.Cert != "" }

// NotAfter is when the certificate ends; zero without one.
func (s *Source) NotAfter() time.Time {
	c := s.now.Load()
	if c.pair == nil {
		return time.Time{}
	}
	return c.pair.Leaf.NotAfter
}

// Server is the configuration of a server of HTTP/2 and HTTP/1.1. With callers it
// talks only to who shows a certificate that the authorities have signed.
func (s *Source) Server(callers bool) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := s.now.Load()
			if c.pair == nil {
				return nil, errors.New("there is no certificate")
			}
			out := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*c.pair}, NextProtos: []string{"h2", "http/1.1"}}
			if callers {
				out.ClientAuth, out.ClientCAs = tls.RequireAndVerifyClientCert, c.roots
				if c.roots == nil {
					return nil, errors.New("there are no authorities of callers")
				}
			}
			return out, nil
		},
	}
}

// Client is the configuration for one connection to the server name, which is a
// host name or an address.
func (s *Source) Client(name string) *tls.Config {
	c := s.now.Load()
	out := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: name, RootCAs: c.roots}
	if c.pair != nil {
		out.Certificates = []tls.Certificate{*c.pair}
	}
	return out
}
