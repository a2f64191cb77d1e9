package admission

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/kinference/kinference/internal/tlsfile"
)

// Serve serves the webhook on l until ctx is done, with the certificate and key
// of two PEM files. They are read again when they have changed, as a mounted
// Secret does; when the new ones are no pair the old ones stay: see tlsfile.
func Serve(ctx context.Context, l net.Listener, w *Webhook, certFile, keyFile string) error {
	log := w.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	following, unfollow := context.WithCancel(ctx)
	defer unfollow()
	src, err := tlsfile.Open(following, tlsfile.Files{Cert: certFile, Key: keyFile}, log)
	if err != nil {
		return fmt.Errorf("admission webhook: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle(Path, w)
	srv := &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: 2 * time.Minute, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		TLSConfig: src.Server(false),
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
