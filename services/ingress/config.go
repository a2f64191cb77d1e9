package ingress

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"time"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/rpc"
)

// Config are the settings of an operator. The zero value of a field means its
// default.
type Config struct {
	// Listen is the address of the OpenAI endpoint. Ignored if Listener is set.
	Listen string
	// Listener is an open port to serve on.
	Listener net.Listener
	// RouterURL is where the routers are, LimiterURL the limiters, as rpc.Client
	// takes it.
	RouterURL, LimiterURL string

	// MaxBody bounds a request body in bytes, MaxBodies all bodies in memory
	// together, MaxHeader the headers of a request, MaxDepth the nesting of
	// its JSON.
	MaxBody, MaxBodies   int64
	MaxHeader, MaxDepth  int
	MaxAnswer            int64 // bytes of an answer that is no stream
	MaxEvent             int   // bytes of one event of a stream
	MaxConnectionStreams int   // requests at once on one HTTP/2 connection
	// MaxConnections bounds the connections of clients; 0: half of the files that the
	// process may open, at most 65,536.
	MaxConnections int

	// BodyTimeout is for the client to send a body, RouteTimeout for the
	// router to decide, and QueueTimeout what a request may wait there beyond it:
	// policies say how long each one does.
	BodyTimeout, RouteTimeout, QueueTimeout time.Duration
	// ConnectTimeout, FirstByteTimeout (of streams, until content),
	// IdleTimeout (of streams, between events) and TotalTimeout bound a worker,
	// WriteTimeout a client that does not read.
	ConnectTimeout, FirstByteTimeout, IdleTimeout, TotalTimeout, WriteTimeout time.Duration
	// PingInterval is how long a stream may send nothing until a comment or a
	// ping keeps it alive, also before its first content.
	PingInterval time.Duration
	// KeepAlive closes idle connections to workers. vLLM does so after 5 s.
	KeepAlive time.Duration
	// WorkerConnections is how many idle connections to keep for each worker.
	WorkerConnections int

	// TokenCacheBytes bounds the cache of prompt prefixes, for each tokenizer.
	TokenCacheBytes int
	// PromptTimeout bounds how long a worker is asked for token ids, and
	// PromptRetry is how long to wait after it could not tell.
	PromptTimeout, PromptRetry time.Duration
	// ParityInterval is the time between two checks that a worker makes the
	// same token ids.
	ParityInterval time.Duration

	// NATSURL is where usage events go; empty: nowhere. UsageDir is the folder in
	// which they wait, of this process alone, and UsageBytes bounds it. UsageSync
	// is how soon they are safe from a loss of power.
	NATSURL, UsageDir string
	// NATS is how to get into it.
	NATS       bus.Access
	UsageBytes int64
	UsageSync  time.Duration
	// UsageReplicas, UsageMaxAge and UsageStreamBytes are those of the stream,
	// where this process makes it.
	UsageReplicas    int
	UsageMaxAge      time.Duration
	UsageStreamBytes int64

	// TrustedProxyHeader is the header by which a proxy on the same machine or in
	// the same Pod says whose certificate a client has; empty: none is believed.
	// TrustDomain is the one that such identities must be of.
	TrustedProxyHeader, TrustDomain string
	// RequireBackend serves nobody while there is no GatewayBackend.
	RequireBackend bool
	// ProviderCredentials is the folder of providers' Secrets, each as
	// <namespace>/<name>/<key>. ProviderPrivate are the blocks of addresses,
	// comma separated, at which providers may be although they are not public.
	ProviderCredentials, ProviderPrivate string
	// ProviderSecrets reads Secrets that are not in the folder from the Kubernetes
	// API.
	ProviderSecrets bool
	// MediaURLDomains are the domains, comma separated, from which engines may fetch
	// pictures, sound and video that a request names by URL; * is any public host,
	// empty: media comes as data only.
	MediaURLDomains string
	// CacheSaltFile has the secret that cache salts are made with, the same at
	// every ingress; empty: one of this process alone.
	CacheSaltFile string

	// ClassifierURL is where the classifier is, asked only where policies read tags.
	// ClassifyTimeout is its time for a short prompt, to which 200 µs for each KB are
	// added; ClassifyConcurrency how many prompts are with it at once, ClassifyBytes
	// how much of one is sent.
	ClassifierURL       string
	ClassifyTimeout     time.Duration
	ClassifyConcurrency int
	ClassifyBytes       int

	// LimiterTimeout bounds the wait for the limiter. LimitTTL is when what was
	// reserved is given back after the death of this process, LimitLeaseTTL when
	// shares of buckets are.
	LimiterTimeout, LimitTTL, LimitLeaseTTL time.Duration
	// LimitNoLeases asks the limiter for each request.
	LimitNoLeases bool
	// LimitExact reserves all output that a request asks for, whatever was learned.
	LimitExact bool
	// LimitReplicas is the number of ingress processes that share limits while the
	// limiter is away and has not told it.
	LimitReplicas int
	// LimitSpill is a file for settlements that do not fit in memory.
	LimitSpill string
}

// Flags implements daemon.Service.
func (c *Config) Flags(fs *flag.FlagSet) {
	c.defaults()
	fs.StringVar(&c.Listen, "listen", c.Listen, "address of the OpenAI endpoint")
	fs.StringVar(&c.RouterURL, "router-url", c.RouterURL, "URLs of the routers, or one of a name with several addresses: one of them is asked, and the next one when it fails")
	fs.StringVar(&c.LimiterURL, "limiter-url", c.LimiterURL, "URLs of the limiters, likewise; asked only for requests that have limits")
	fs.StringVar(&c.ClassifierURL, "classifier-url", c.ClassifierURL, "URLs of the classifiers, likewise; asked only where some policy that could apply reads tags")
	fs.DurationVar(&c.ClassifyTimeout, "classify-timeout", c.ClassifyTimeout, "time for the classifier to tag a short prompt, and 200µs more for each KB; then tags are unknown")
	fs.IntVar(&c.ClassifyConcurrency, "classify-concurrency", c.ClassifyConcurrency, "prompts that are with the classifier at once; others wait for their turn as long as they have time")
	fs.IntVar(&c.ClassifyBytes, "classify-bytes", c.ClassifyBytes, "bytes of a prompt that are sent to the classifier; of a longer one tags that were not found are unknown")
	fs.DurationVar(&c.LimiterTimeout, "limiter-timeout", c.LimiterTimeout, "time for the limiter to decide; then onUnavailable of each limit holds")
	fs.DurationVar(&c.LimitTTL, "limit-ttl", c.LimitTTL, "time after which what was reserved is given back when this process dies")
	fs.BoolVar(&c.LimitNoLeases, "limit-no-leases", c.LimitNoLeases, "ask the limiter for each request instead of spending shares of limits: exact, and slower")
	fs.DurationVar(&c.LimitLeaseTTL, "limit-lease-ttl", c.LimitLeaseTTL, "time after which shares of limits are given back when this process dies")
	fs.BoolVar(&c.LimitExact, "limit-exact", c.LimitExact, "reserve all output that a request asks for, even if the tenant's answers are far shorter")
	fs.IntVar(&c.LimitReplicas, "limit-replicas", c.LimitReplicas, "ingress processes that share a limit while the limiter is away and has not told how many there are")
	fs.StringVar(&c.LimitSpill, "limit-spill", c.LimitSpill, "file for settlements that do not fit in memory while the limiter is away; empty: they are dropped and counted")
	fs.StringVar(&c.NATSURL, "nats-url", c.NATSURL, "URLs of NATS for usage events, comma separated; empty: there are no events")
	c.NATS.Flags(fs)
	fs.StringVar(&c.UsageDir, "usage-dir", c.UsageDir, "folder of this process alone in which usage events wait for NATS; empty: a temporary one, which nobody reads after the process was killed")
	fs.Int64Var(&c.UsageBytes, "usage-bytes", c.UsageBytes, "bytes of usage events that may wait; beyond it they are dropped and counted")
	fs.DurationVar(&c.UsageSync, "usage-sync", c.UsageSync, "time until usage events are safe from a loss of power")
	fs.IntVar(&c.UsageReplicas, "usage-replicas", c.UsageReplicas, "replicas of the stream of usage events, where this process makes it")
	fs.DurationVar(&c.UsageMaxAge, "usage-max-age", c.UsageMaxAge, "how long the stream keeps usage events, where this process makes it")
	fs.Int64Var(&c.UsageStreamBytes, "usage-stream-bytes", c.UsageStreamBytes, "bytes of the stream of usage events, where this process makes it")
	fs.StringVar(&c.TrustedProxyHeader, "trusted-proxy-header", c.TrustedProxyHeader, "header by which a proxy on this machine says whose certificate a client has: l5d-client-id or x-forwarded-client-cert; empty: none is believed")
	fs.StringVar(&c.TrustDomain, "trust-domain", c.TrustDomain, "trust domain of the identities in that header")
	fs.BoolVar(&c.RequireBackend, "require-backend", c.RequireBackend, "serve nobody while there is no GatewayBackend, instead of everybody")
	fs.StringVar(&c.ProviderCredentials, "provider-credentials-dir", c.ProviderCredentials, "folder with the Secrets of providers, mounted as <namespace>/<name>/<key>; read again when they change")
	fs.BoolVar(&c.ProviderSecrets, "provider-secrets", c.ProviderSecrets, "get the Secrets of providers that are not in that folder from the Kubernetes API: those with the label kinference.buoyant.io/provider-credentials=true, by name")
	fs.StringVar(&c.ProviderPrivate, "provider-private-networks", c.ProviderPrivate, "blocks of addresses such as 10.0.0.0/8, comma separated, that providers may be at although they are not public; empty: none")
	fs.StringVar(&c.MediaURLDomains, "media-url-domains", c.MediaURLDomains, "domains, comma separated, from which engines may fetch pictures, sound and video by https URL; *: any host whose addresses are public, which engines have to check again; empty: data URLs only")
	fs.StringVar(&c.CacheSaltFile, "cache-salt-file", c.CacheSaltFile, "file with the secret that keeps the prefix caches of tenants apart, the same at every ingress; empty: one of this process alone")
	fs.Int64Var(&c.MaxBody, "max-body", c.MaxBody, "longest request body in bytes")
	fs.Int64Var(&c.MaxBodies, "max-bodies", c.MaxBodies, "bytes of all request bodies in memory together")
	fs.IntVar(&c.MaxHeader, "max-header", c.MaxHeader, "longest request header in bytes")
	fs.IntVar(&c.MaxDepth, "max-depth", c.MaxDepth, "deepest nesting of a request's JSON")
	fs.Int64Var(&c.MaxAnswer, "max-answer", c.MaxAnswer, "longest answer that is no stream, in bytes")
	fs.IntVar(&c.MaxEvent, "max-event", c.MaxEvent, "longest event of a stream in bytes")
	fs.IntVar(&c.MaxConnectionStreams, "max-connection-streams", c.MaxConnectionStreams, "requests at once on one HTTP/2 connection")
	fs.IntVar(&c.MaxConnections, "max-connections", c.MaxConnections, "connections of clients at once; 0: half of the files that the process may open, at most 65536")
	fs.DurationVar(&c.BodyTimeout, "body-timeout", c.BodyTimeout, "time for a client to send its body")
	fs.DurationVar(&c.RouteTimeout, "route-timeout", c.RouteTimeout, "time for the router to decide")
	fs.DurationVar(&c.QueueTimeout, "queue-timeout", c.QueueTimeout, "time that a request may wait in the router's queue beyond that; policies say how long each one does")
	fs.DurationVar(&c.ConnectTimeout, "connect-timeout", c.ConnectTimeout, "time to connect to a worker")
	fs.DurationVar(&c.FirstByteTimeout, "first-byte-timeout", c.FirstByteTimeout, "time for a worker to send a stream's first content; then another one is tried")
	fs.DurationVar(&c.IdleTimeout, "idle-timeout", c.IdleTimeout, "time between two events of a stream")
	fs.DurationVar(&c.TotalTimeout, "total-timeout", c.TotalTimeout, "time for a whole request")
	fs.DurationVar(&c.WriteTimeout, "write-timeout", c.WriteTimeout, "time for a client to read what was sent")
	fs.DurationVar(&c.PingInterval, "ping-interval", c.PingInterval, "time without an event after which a stream sends a comment or a ping, also while it waits for its first one; clients give up after 15s and more")
	fs.DurationVar(&c.KeepAlive, "keep-alive", c.KeepAlive, "idle time of connections to workers; below the workers' own, which is 5s for vLLM")
	fs.IntVar(&c.WorkerConnections, "worker-connections", c.WorkerConnections, "idle connections kept for each worker")
	fs.IntVar(&c.TokenCacheBytes, "token-cache", c.TokenCacheBytes, "bytes of the cache of tokenised prompt prefixes, for each tokenizer")
	fs.DurationVar(&c.PromptTimeout, "prompt-timeout", c.PromptTimeout, "time to ask a worker for token ids where no tokenizer is configured")
	fs.DurationVar(&c.PromptRetry, "prompt-retry", c.PromptRetry, "time until a worker that could not tell token ids, or a tokenizer that did not load, is tried again")
	fs.DurationVar(&c.ParityInterval, "parity-interval", c.ParityInterval, "time between two checks that a worker makes the same token ids as the local tokenizer")
}

func (c *Config) defaults() {
	or(&c.Listen, "127.0.0.1:8080")
	or(&c.RouterURL, "http://127.0.0.1:7102")
	or(&c.TrustDomain, "cluster.local")
	or(&c.LimiterURL, "http://127.0.0.1:7104")
	or(&c.ClassifierURL, "http://127.0.0.1:7105")
	or(&c.ClassifyTimeout, 50*time.Millisecond)
	or(&c.ClassifyConcurrency, 64)
	or(&c.ClassifyBytes, 8<<20)
	or(&c.UsageBytes, 1<<30)
	or(&c.UsageSync, time.Second)
	or(&c.UsageReplicas, 1)
	or(&c.UsageMaxAge, 30*24*time.Hour)
	or(&c.UsageStreamBytes, 8<<30)
	or(&c.LimiterTimeout, 50*time.Millisecond)
	or(&c.LimitTTL, 30*time.Second)
	or(&c.LimitLeaseTTL, 3*time.Second)
	or(&c.LimitReplicas, 1)
	or(&c.MaxBody, 16<<20)
	or(&c.MaxBodies, 1<<30)
	or(&c.MaxHeader, 64<<10)
	or(&c.MaxDepth, 64)
	or(&c.MaxAnswer, 64<<20)
	or(&c.MaxEvent, 8<<20)
	or(&c.MaxConnectionStreams, 250)
	or(&c.BodyTimeout, 30*time.Second)
	or(&c.RouteTimeout, 10*time.Second)
	or(&c.QueueTimeout, 10*time.Minute)
	or(&c.ConnectTimeout, 2*time.Second)
	or(&c.FirstByteTimeout, 5*time.Minute)
	or(&c.IdleTimeout, time.Minute)
	or(&c.TotalTimeout, 30*time.Minute)
	or(&c.WriteTimeout, 30*time.Second)
	or(&c.PingInterval, 10*time.Second)
	or(&c.KeepAlive, 4*time.Second)
	or(&c.WorkerConnections, 1024)
	or(&c.TokenCacheBytes, 256<<20)
	or(&c.PromptTimeout, 250*time.Millisecond)
	or(&c.PromptRetry, 30*time.Second)
	or(&c.ParityInterval, 10*time.Minute)
}

func or[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// Validate joins all faults of the settings.
func (c *Config) Validate() error {
	var faults []error
	for name, v := range map[string]string{"router-url": c.RouterURL, "limiter-url": c.LimiterURL, "classifier-url": c.ClassifierURL} {
		if err := rpc.CheckURLs(v); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", name, err))
		}
	}
	for name, v := range map[string]int64{
		"max-body": c.MaxBody, "max-bodies": c.MaxBodies, "max-header": int64(c.MaxHeader), "max-depth": int64(c.MaxDepth), "max-answer": c.MaxAnswer,
		"max-event": int64(c.MaxEvent), "max-connection-streams": int64(c.MaxConnectionStreams), "max-connections": int64(c.MaxConnections), "body-timeout": int64(c.BodyTimeout),
		"route-timeout": int64(c.RouteTimeout), "queue-timeout": int64(c.QueueTimeout), "connect-timeout": int64(c.ConnectTimeout), "first-byte-timeout": int64(c.FirstByteTimeout),
		"idle-timeout": int64(c.IdleTimeout), "total-timeout": int64(c.TotalTimeout), "write-timeout": int64(c.WriteTimeout), "ping-interval": int64(c.PingInterval), "keep-alive": int64(c.KeepAlive),
		"worker-connections": int64(c.WorkerConnections), "token-cache": int64(c.TokenCacheBytes), "prompt-timeout": int64(c.PromptTimeout), "prompt-retry": int64(c.PromptRetry),
		"parity-interval": int64(c.ParityInterval), "limiter-timeout": int64(c.LimiterTimeout), "limit-ttl": int64(c.LimitTTL), "limit-lease-ttl": int64(c.LimitLeaseTTL),
		"classify-timeout": int64(c.ClassifyTimeout), "classify-concurrency": int64(c.ClassifyConcurrency), "classify-bytes": int64(c.ClassifyBytes),
		"limit-replicas": int64(c.LimitReplicas), "usage-bytes": c.UsageBytes, "usage-sync": int64(c.UsageSync), "usage-replicas": int64(c.UsageReplicas),
		"usage-max-age": int64(c.UsageMaxAge), "usage-stream-bytes": c.UsageStreamBytes,
	} {
		if v < 0 {
			faults = append(faults, fmt.Errorf("%s is negative", name))
		}
	}
	_, err := privateNetworks(c.ProviderPrivate)
	faults = append(faults, c.validateIdentity(), err)
	if c.MaxBodies < c.MaxBody {
		faults = append(faults, errors.New("max-bodies is below max-body"))
	}
	return errors.Join(faults...)
}
