package admission

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// Serve serves the webhook on l until ctx is done, with the certificate and key
// of two PEM files. They are read again when they have changed, as a mounted
// Secret does; when the new ones are no pair the old ones stay.
func Serve(ctx context.Context, l net.Listener, w *Webhook, certFile, keyFile string) error {
	log := w.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	pair := &keyPair{cert: certFile, key: keyFile, log: log}
	if _, err := pair.get(nil); err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(Path, w)
	srv := &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: pair.get},
	}
	done := make(chan error, 1)
	go func() { done <- srv.ServeTLS(l, "", "") }()
	select {
	case err := <-done:
		return fmt.Errorf("serve the admission webhook: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		srv.Close()
	}
	if err := <-done; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// keyPair is a certificate that is read again when its files have changed.
type keyPair struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex
	loaded *tls.Certificate
	// of is what the files looked like; also those that were refused.
	of [2]stamp
}

type stamp struct {
	at   time.Time
	size int64
}

// get is called for each handshake.
func (p *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := [2]stamp{look(p.cert), look(p.key)}
	if p.loaded != nil && now == p.of {
		return p.loaded, nil
	}
	pair, err := tls.LoadX509KeyPair(p.cert, p.key)
	switch {
	case err == nil:
		if p.loaded != nil {
			p.log.Info("certificate of the admission webhook was changed")
		}
		p.loaded = &pair
	case p.loaded == nil:
		return nil, fmt.Errorf("read the certificate of the admission webhook: %w", err)
	default:
		p.log.Error("the new certificate of the admission webhook is of no use: the old one stays", "error", err.Error())
	}
	p.of = now
	return p.loaded, nil
}

// look returns what tells one version of a file from another. Stat follows the
// links by which a Secret is swapped.
func look(path string) stamp {
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}
	}
	return stamp{info.ModTime(), info.Size()}
}
