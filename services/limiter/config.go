package limiter

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Config of the service. Zero values take the defaults that the flags show.
type Config struct {
	// Listen is the address of the RPC port.
	Listen string
	// Listener is an open RPC port; Listen is then ignored.
	Listener net.Listener

	// RedisAddrs lists host:port of Redis, comma separated: one server, some
	// nodes of a Cluster, or Sentinels. Empty: the store is in memory, which is
	// right for one limiter only.
	RedisAddrs string
	// RedisMode is single, cluster or sentinel.
	RedisMode string
	// RedisMaster is the name of the primary that the Sentinels watch.
	RedisMaster string
	// RedisDB is the database of a single server or a Sentinel's primary.
	RedisDB int
	// RedisUser and the password in RedisPasswordFile log in. Without the file
	// the password is that of the environment (PasswordEnv), if any.
	RedisUser         string
	RedisPasswordFile string
	// RedisTLS encrypts; RedisCAFile has the authorities (default: the system's),
	// RedisCertFile and RedisKeyFile the certificate of the limiter.
	RedisTLS                                 bool
	RedisCAFile, RedisCertFile, RedisKeyFile string
	// RedisTimeout is the longest that one call takes, connecting included.
	RedisTimeout time.Duration
	// RedisPool is the number of connections to each server.
	RedisPool int
	// BreakerFailures in a row stop all calls for BreakerPause; then one tries.
	BreakerFailures int
	BreakerPause    time.Duration

	// MemoryMax bounds what the store in memory holds.
	MemoryMax int64
}

// PasswordEnv is the variable that has the password of Redis.
const PasswordEnv = "KINFERENCE_LIMITER_REDIS_PASSWORD"

// Modes of Redis.
const (
	ModeSingle   = "single"
	ModeCluster  = "cluster"
	ModeSentinel = "sentinel"
)

const (
	defaultListen          = "127.0.0.1:7104"
	defaultTimeout         = 25 * time.Millisecond
	maxTimeout             = 50 * time.Millisecond
	defaultPool            = 32
	reloadInterval         = 500 * time.Millisecond // of a cluster's slots
	defaultBreakerFailures = 5
	defaultBreakerPause    = 500 * time.Millisecond
)

// Flags declares the settings.
func (s *Service) Flags(fs *flag.FlagSet) {
	fs.StringVar(&s.Listen, "listen", defaultListen, "address of the RPC port")
	fs.StringVar(&s.RedisAddrs, "redis-addrs", "", "host:port of Redis, comma separated; empty: count in memory, for one limiter only")
	fs.StringVar(&s.RedisMode, "redis-mode", ModeSingle, "single, cluster or sentinel")
	fs.StringVar(&s.RedisMaster, "redis-master", "", "name of the primary that the sentinels watch")
	fs.IntVar(&s.RedisDB, "redis-db", 0, "database (not of a cluster)")
	fs.StringVar(&s.RedisUser, "redis-user", "", "user of Redis")
	fs.StringVar(&s.RedisPasswordFile, "redis-password-file", "", "file with the password of Redis; without it "+PasswordEnv)
	fs.BoolVar(&s.RedisTLS, "redis-tls", false, "encrypt connections to Redis")
	fs.StringVar(&s.RedisCAFile, "redis-ca-file", "", "PEM file of the authorities of Redis; empty: the system's")
	fs.StringVar(&s.RedisCertFile, "redis-cert-file", "", "PEM file of the limiter's certificate")
	fs.StringVar(&s.RedisKeyFile, "redis-key-file", "", "PEM file of its key")
	fs.DurationVar(&s.RedisTimeout, "redis-timeout", defaultTimeout, "longest time of one call to Redis, at most 50ms")
	fs.IntVar(&s.RedisPool, "redis-pool", defaultPool, "connections to each Redis server")
	fs.IntVar(&s.BreakerFailures, "breaker-failures", defaultBreakerFailures, "failures in a row after which Redis is not asked for a while")
	fs.DurationVar(&s.BreakerPause, "breaker-pause", defaultBreakerPause, "how long it is not asked")
	fs.Int64Var(&s.MemoryMax, "memory-max", 0, "most buckets, reservations and shares in memory; 0: a million")
}

func (c *Config) addrs() []string {
	return strings.FieldsFunc(c.RedisAddrs, func(r rune) bool { return r == ',' || r == ' ' })
}

// Validate lists all faults of the configuration.
func (c *Config) Validate() error {
	var faults []error
	fault := func(bad bool, format string, a ...any) {
		if bad {
			faults = append(faults, fmt.Errorf(format, a...))
		}
	}
	mode := cmp.Or(c.RedisMode, ModeSingle)
	fault(mode != ModeSingle && mode != ModeCluster && mode != ModeSentinel, "redis-mode %q: want single, cluster or sentinel", c.RedisMode)
	for _, addr := range c.addrs() {
		_, _, err := net.SplitHostPort(addr)
		fault(err != nil, "redis-addrs: %q is not host:port", addr)
	}
	fault(mode == ModeSingle && len(c.addrs()) > 1, "redis-addrs: a single server has one address; want redis-mode cluster or sentinel?")
	fault(mode != ModeSingle && len(c.addrs()) == 0, "redis-mode %s needs redis-addrs", mode)
	fault((mode == ModeSentinel) != (c.RedisMaster != ""), "redis-master goes with redis-mode sentinel")
	fault(mode == ModeCluster && c.RedisDB != 0, "redis-db: a cluster has database 0 only")
	fault(c.RedisDB < 0, "redis-db is negative")
	fault((c.RedisCertFile == "") != (c.RedisKeyFile == ""), "redis-cert-file and redis-key-file go together")
	fault(!c.RedisTLS && (c.RedisCAFile != "" || c.RedisCertFile != ""), "redis-ca-file and redis-cert-file need redis-tls")
	fault(c.RedisTimeout < 0 || c.RedisTimeout > maxTimeout, "redis-timeout %v: want at most %v", c.RedisTimeout, maxTimeout)
	fault(c.RedisPool < 0 || c.BreakerFailures < 0 || c.BreakerPause < 0 || c.MemoryMax < 0, "redis-pool, breaker-failures, breaker-pause or memory-max is negative")
	return errors.Join(faults...)
}

// client connects to Redis; nothing is sent yet.
func (c *Config) client() (goredis.UniversalClient, error) {
	password := os.Getenv(PasswordEnv)
	if c.RedisPasswordFile != "" {
		data, err := os.ReadFile(c.RedisPasswordFile)
		if err != nil {
			return nil, fmt.Errorf("read password of Redis: %w", err)
		}
		password = strings.TrimRight(string(data), "\r\n")
	}
	secure, err := c.tls()
	if err != nil {
		return nil, err
	}
	timeout := cmp.Or(c.RedisTimeout, defaultTimeout)
	o := &goredis.UniversalOptions{
		Addrs: c.addrs(), MasterName: c.RedisMaster, DB: c.RedisDB, Username: c.RedisUser, Password: password, TLSConfig: secure,
		DialTimeout: timeout, ReadTimeout: timeout, WriteTimeout: timeout, PoolTimeout: timeout,
		ContextTimeoutEnabled: true, PoolSize: cmp.Or(c.RedisPool, defaultPool),
		// The caller repeats what failed, with the same id. Redirections of a
		// cluster are followed within the timeout.
		MaxRetries: -1, MaxRedirects: 3, DialerRetries: 1,
		// One trip less for each connection.
		DisableIdentity: true, MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	switch c.RedisMode {
	case ModeCluster:
		cluster := o.Cluster()
		// A primary that died says no more where its slots went.
		cluster.ClusterStateReloadInterval = reloadInterval
		return goredis.NewClusterClient(cluster), nil
	case ModeSentinel:
		return goredis.NewFailoverClient(o.Failover()), nil
	}
	return goredis.NewClient(o.Simple()), nil
}

func (c *Config) tls() (*tls.Config, error) {
	if !c.RedisTLS {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.RedisCAFile != "" {
		pem, err := os.ReadFile(c.RedisCAFile)
		if err != nil {
			return nil, fmt.Errorf("read authorities of Redis: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("redis-ca-file %s has no certificate", c.RedisCAFile)
		}
	}
	if c.RedisCertFile != "" {
		// Read anew for each connection, because they are renewed.
		t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			cert, err := tls.LoadX509KeyPair(c.RedisCertFile, c.RedisKeyFile)
			return &cert, err
		}
	}
	return t, nil
}
