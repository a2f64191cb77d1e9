// Package classifier is the classifier service: it tags prompts by personal data, secrets, injection, complexity and more, in
// microseconds a KB.
//
// ingress calls it while it renders and tokenises, with a deadline; a caller without an answer must take every tag as unknown.
// The work itself is in internal/classify, which a caller may link instead. Run blocks until its context is done. A call beyond
// the bound of concurrency is refused at once with a delay: a queue here would only eat the callers' deadlines. Nothing that the
// service logs, counts or answers holds text of a prompt.
package classifier

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
)

// Config of the service. Zero values take the defaults that the flags show.
type Config struct {
	// Listen is the address of the RPC port.
	Listen string
	// Listener is an open RPC port; Listen is then ignored.
	Listener net.Listener
	// Profile of thresholds: default or strict.
	Profile string
	// MaxBytes of text that one call reads.
	MaxBytes int
	// CacheBytes of the conversation cache; negative: none.
	CacheBytes int
	// Concurrency is how many prompts are read at once; 0: one for each CPU.
	Concurrency int
	// Timeout of one call, below the caller's own deadline.
	Timeout time.Duration
	// ConfigDir holds the resources with custom tags; empty: none.
	ConfigDir string
	// RouterURL is where the router is, whose catalog has the custom tags; empty: it
	// is not asked. Give one of both.
	RouterURL string
	// CalibrationFile replaces the calibration of complexity; empty: the embedded one.
	CalibrationFile string
}

// Service is the classifier service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

const (
	defaultListen  = "127.0.0.1:7105"
	defaultTimeout = 250 * time.Millisecond
)

// Flags declares the settings.
func (s *Service) Flags(fs *flag.FlagSet) {
	fs.StringVar(&s.Listen, "listen", defaultListen, "address of the RPC port")
	fs.StringVar(&s.Profile, "profile", classify.ProfileDefault, "thresholds where a call names none: default or strict")
	fs.IntVar(&s.MaxBytes, "max-bytes", classify.DefaultMaxBytes, "bytes of text that one call reads; what is beyond is unknown")
	fs.IntVar(&s.CacheBytes, "cache-bytes", classify.DefaultCacheBytes, "bytes of the conversation cache; -1 for none")
	fs.IntVar(&s.Concurrency, "concurrency", 0, "prompts that are read at once; 0: one for each CPU")
	fs.DurationVar(&s.Timeout, "timeout", defaultTimeout, "time for one call; what was not read by then is unknown")
	fs.StringVar(&s.ConfigDir, "config-dir", "", "folder of resources whose policies define custom tags; empty: none")
	fs.StringVar(&s.RouterURL, "router-url", "", "URLs of the routers, with commas between them, whose catalog has the custom tags, in place of --config-dir; empty: none")
	fs.StringVar(&s.CalibrationFile, "calibration-file", "", "calibration of complexity that kinfctl classifier calibrate wrote; empty: the embedded one")
}

// Validate lists all faults of the configuration.
func (c *Config) Validate() error {
	var faults []error
	if c.Profile != "" && c.Profile != classify.ProfileDefault && c.Profile != classify.ProfileStrict {
		faults = append(faults, fmt.Errorf("profile %q: want default or strict", c.Profile))
	}
	if c.ConfigDir != "" && c.RouterURL != "" {
		faults = append(faults, errors.New("give config-dir or router-url, not both"))
	}
	if c.MaxBytes < 0 || c.Concurrency < 0 || c.Timeout < 0 {
		faults = append(faults, errors.New("max-bytes, concurrency or timeout is negative"))
	}
	return errors.Join(faults...)
}

// Run serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	if err := s.Validate(); err != nil {
		return err
	}
	set := classify.Settings{Profile: s.Profile, MaxBytes: s.MaxBytes, CacheBytes: s.CacheBytes}
	if s.CalibrationFile != "" {
		c, err := classify.ReadCalibration(s.CalibrationFile)
		if err != nil {
			return err
		}
		set.Complexity = c
	}
	c, err := classify.New(set)
	if err != nil {
		return err
	}
	l, err := rpc.Listen(s.Listener, cmp.Or(s.Listen, defaultListen))
	if err != nil {
		return err
	}
	srv := &server{c: c, slots: make(chan struct{}, cmp.Or(s.Concurrency, runtime.GOMAXPROCS(0))), timeout: cmp.Or(s.Timeout, defaultTimeout)}
	srv.m = newMetrics(ctx, c)
	g, ctx := errgroup.WithContext(ctx)
	if s.ConfigDir != "" {
		source := resources.NewSource(s.ConfigDir, func(c *resources.Catalog, _ resources.Problems) { srv.use(ctx, c) })
		g.Go(func() error { return source.Run(ctx) })
	}
	if s.RouterURL != "" {
		g.Go(func() error { srv.follow(ctx, s.RouterURL); return nil })
	}
	g.Go(func() error {
		daemon.Ready(ctx, true)
		return rpc.Serve(ctx, l, rpc.Mount[classifierv1connect.ClassifierServiceHandler](ctx, srv, handler))
	})
	return g.Wait()
}

func handler(s classifierv1connect.ClassifierServiceHandler, options ...connect.HandlerOption) (string, http.Handler) {
	return classifierv1connect.NewClassifierServiceHandler(s, append(options, connect.WithCodec(quiet{"json"}), connect.WithCodec(quiet{"json; charset=utf-8"}))...)
}
