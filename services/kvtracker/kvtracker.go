// Package kvtracker is the kvtracker service: it tells which worker holds which
// KV-cache blocks, and how loaded each worker is.
//
// It has two modes, run as two deployments of one binary. The relay reads the
// engines (KV events over ZMQ, /metrics) and publishes what they say to NATS;
// any number of trackers consume it and answer Match and WatchWorkers from
// memory. Run blocks until its context is done; NATS, the router and the
// engines may be absent at any time.
package kvtracker

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
	"github.com/kinference/kinference/services/kvtracker/internal/relay"
	"github.com/kinference/kinference/services/kvtracker/internal/tracker"
)

// Mode tells which half of the service a process is.
type Mode string

// Modes.
const (
	ModeTracker Mode = "tracker"
	ModeRelay   Mode = "relay"
)

// Config of the service. Zero values take the defaults that the flags show.
type Config struct {
	// Mode of the process; default ModeTracker.
	Mode Mode
	// Listen is the address of the RPC port (tracker).
	Listen string
	// Listener is an open RPC port; Listen is then ignored.
	Listener net.Listener
	// NATSURL lists the NATS servers, comma separated.
	NATSURL string
	// NATS is how to get into it.
	NATS bus.Access
	// RouterURL is where the relay watches the catalog of workers.
	RouterURL string
	// ScrapeInterval is how often the relay reads each worker's metrics.
	ScrapeInterval time.Duration
	// StreamFile keeps the stream of KV events on NATS's disk. StreamMaxAge and
	// StreamMaxBytes bound it, StreamReplicas is its copies in a NATS cluster.
	// They hold for a stream that is made; one that exists is left as it is.
	StreamFile     bool
	StreamMaxAge   time.Duration
	StreamMaxBytes int64
	StreamReplicas int
	// SnapshotInterval is the time between two snapshots of the index (tracker). A negative
	// one: none are made or read.
	SnapshotInterval time.Duration
	// Snapshot names the snapshot; each of several shards adds its own number.
	Snapshot string
	// Shards is over how many trackers the worker sets are spread, and Shard the number of
	// this one (tracker). What is left when Shard is divided by Shards is what it holds, so
	// that Pods of a StatefulSet are shards and replicas by their ordinals.
	Shards, Shard int
}

// Service is the kvtracker service.
type Service struct{ Config }

var _ daemon.Service = (*Service)(nil)

const (
	defaultNATSURL        = "nats://127.0.0.1:4222"
	defaultRouterURL      = "http://127.0.0.1:7102"
	defaultListen         = "127.0.0.1:7103"
	defaultScrapeInterval = 250 * time.Millisecond
	defaultMaxAge         = 24 * time.Hour
	defaultMaxBytes       = 1 << 30
	defaultSnapshot       = "index"
	defaultSnapshots      = time.Minute
	maxShards             = 1024
)

// Flags declares the settings.
func (s *Service) Flags(fs *flag.FlagSet) {
	fs.StringVar((*string)(&s.Mode), "mode", string(ModeTracker), "tracker: answer from the index; relay: read the workers and publish")
	fs.StringVar(&s.Listen, "listen", defaultListen, "address of the RPC port (tracker)")
	fs.StringVar(&s.NATSURL, "nats-url", defaultNATSURL, "NATS servers, comma separated")
	s.NATS.Flags(fs)
	fs.StringVar(&s.RouterURL, "router-url", defaultRouterURL, "URLs of the routers, with commas between them, whose catalog names the workers (relay)")
	fs.DurationVar(&s.ScrapeInterval, "scrape-interval", defaultScrapeInterval, "time between two reads of a worker's metrics (relay)")
	fs.BoolVar(&s.StreamFile, "stream-file", false, "keep the stream of KV events on NATS's disk instead of in its memory")
	fs.DurationVar(&s.StreamMaxAge, "stream-max-age", defaultMaxAge, "age at which KV events leave the stream")
	fs.Int64Var(&s.StreamMaxBytes, "stream-max-bytes", defaultMaxBytes, "size of the stream in bytes beyond which the oldest events leave it")
	fs.IntVar(&s.StreamReplicas, "stream-replicas", 1, "copies of the stream in a NATS cluster")
	fs.DurationVar(&s.SnapshotInterval, "snapshot-interval", defaultSnapshots, "time between two snapshots of the index in NATS's object store; negative: none (tracker)")
	fs.StringVar(&s.Snapshot, "snapshot", defaultSnapshot, "name of the snapshot, which trackers that hold the same index share; shards add their number (tracker)")
	fs.IntVar(&s.Shards, "shards", 1, "number of shards over which the worker sets are spread (tracker)")
	fs.IntVar(&s.Shard, "shard", 0, "number of this tracker, from 0; from shards on they are replicas, such as the ordinals of Pods (tracker)")
}

// Validate lists all faults of the configuration.
func (c *Config) Validate() error {
	var faults []error
	if c.Mode != "" && c.Mode != ModeTracker && c.Mode != ModeRelay {
		faults = append(faults, fmt.Errorf("mode %q: want tracker or relay", c.Mode))
	}
	if c.ScrapeInterval < 0 {
		faults = append(faults, errors.New("scrape-interval is negative"))
	}
	if c.StreamMaxAge < 0 || c.StreamMaxBytes < 0 {
		faults = append(faults, errors.New("stream-max-age or stream-max-bytes is negative"))
	}
	if c.StreamReplicas < 0 || c.StreamReplicas > 5 {
		faults = append(faults, errors.New("stream-replicas is not from 1 to 5"))
	}
	if c.Shards < 0 || c.Shards > maxShards || c.Shard < 0 {
		faults = append(faults, fmt.Errorf("shards, shard: want 1 to %d, and a number from 0", maxShards))
	}
	return errors.Join(faults...)
}

func (c *Config) shard() tracker.Shard {
	n := max(c.Shards, 1)
	return tracker.Shard{Index: c.Shard % n, Count: n}
}

func (c *Config) stream() bus.StreamSettings {
	return bus.StreamSettings{File: c.StreamFile, MaxAge: c.StreamMaxAge, MaxBytes: c.StreamMaxBytes, Replicas: c.StreamReplicas}
}

func (c *Config) snapshots() tracker.Snapshots {
	out := tracker.Snapshots{Name: cmp.Or(c.Snapshot, defaultSnapshot), Interval: cmp.Or(c.SnapshotInterval, defaultSnapshots)}
	if s := c.shard(); s.Count > 1 {
		out.Whole = out.Name
		out.Name = fmt.Sprintf("%s-%d-of-%d", out.Whole, s.Index, s.Count)
	}
	return out
}

// Run serves until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	if err := s.Validate(); err != nil {
		return err
	}
	conn, err := bus.Connect(ctx, cmp.Or(s.NATSURL, defaultNATSURL), "kvtracker-"+string(cmp.Or(s.Mode, ModeTracker)), s.NATS.Options()...)
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	if s.Mode == ModeRelay {
		return relay.Run(ctx, relay.Config{
			Bus:            conn,
			RouterURL:      cmp.Or(s.RouterURL, defaultRouterURL),
			ScrapeInterval: cmp.Or(s.ScrapeInterval, defaultScrapeInterval),
			Stream:         s.stream(),
		})
	}
	return s.track(ctx, conn)
}

// track is Run of a tracker.
func (s *Service) track(ctx context.Context, conn *bus.Conn) error {
	l, err := rpc.Listen(s.Listener, cmp.Or(s.Listen, defaultListen))
	if err != nil {
		return err
	}
	t, err := tracker.New(ctx, s.shard())
	if err != nil {
		return errors.Join(err, l.Close())
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return t.Run(ctx, conn, s.stream(), s.snapshots()) })
	g.Go(func() error {
		return rpc.Serve(ctx, l, rpc.Mount[kvtrackerv1connect.KVTrackerServiceHandler](ctx, t, kvtrackerv1connect.NewKVTrackerServiceHandler))
	})
	return g.Wait()
}
