package limiter_test

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/services/limiter"
)

// A Redis that asks for TLS, a certificate, a user and a password lets in who has
// them all, and nobody else.
func TestRedisTLS(t *testing.T) {
	t.Parallel()
	ours, others := filepath.Join(t.TempDir(), "ours"), filepath.Join(t.TempDir(), "others")
	testenv.NewAuthority(t, "redis").Secret(t, ours)
	testenv.NewAuthority(t, "other").Secret(t, others)
	l := testenv.Listen(t)
	addr := l.Addr().String()
	_ = l.Close()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	r := testenv.Redis(t, "--tls-port", port, "--tls-cert-file", filepath.Join(ours, "tls.crt"), "--tls-key-file", filepath.Join(ours, "tls.key"),
		"--tls-ca-cert-file", filepath.Join(ours, "ca.crt"), "--tls-auth-clients", "yes")
	if out, err := r.CLI("acl", "setuser", "kinference", "on", ">open sesame", "~*", "+@all"); err != nil {
		t.Fatal(err, out)
	}
	if out, err := r.CLI("acl", "setuser", "default", "resetpass", "off"); err != nil {
		t.Fatal(err, out)
	}
	password := filepath.Join(t.TempDir(), "password")
	write(t, password, "open sesame")
	right := limiter.Config{
		RedisAddrs: addr, RedisUser: "kinference", RedisPasswordFile: password, RedisTLS: true, RedisTimeout: 50 * time.Millisecond,
		RedisCAFile: filepath.Join(ours, "ca.crt"), RedisCertFile: filepath.Join(ours, "tls.crt"), RedisKeyFile: filepath.Join(ours, "tls.key"),
	}
	ask := func(c limiter.Config) (*limiterv1.ReserveResponse, error) {
		client, _ := serve(t, c)
		var answer *limiterv1.ReserveResponse
		var err error
		// The first handshake may take longer than a call has.
		for range 20 {
			answer, err = client.Reserve(t.Context(), &limiterv1.ReserveRequest{Organisation: "o", RequestId: "a", Charges: []*limiterv1.Charge{{Bucket: window("w", 10, time.Second), Amount: 1}}})
			if err == nil {
				break
			}
		}
		return answer, err
	}
	until(t, "answer", func() bool {
		answer, err := ask(right)
		return err == nil && answer.Granted
	})
	for name, change := range map[string]func(*limiter.Config){
		"clear text": func(c *limiter.Config) {
			c.RedisTLS, c.RedisCAFile, c.RedisCertFile, c.RedisKeyFile = false, "", "", ""
		},
		"no certificate":    func(c *limiter.Config) { c.RedisCertFile, c.RedisKeyFile = "", "" },
		"another authority": func(c *limiter.Config) { c.RedisCAFile = filepath.Join(others, "ca.crt") },
		"another's certificate": func(c *limiter.Config) {
			c.RedisCertFile, c.RedisKeyFile = filepath.Join(others, "tls.crt"), filepath.Join(others, "tls.key")
		},
		"another user": func(c *limiter.Config) { c.RedisUser = "" },
	} {
		c := right
		change(&c)
		if _, err := ask(c); connect.CodeOf(err) != connect.CodeUnavailable {
			t.Errorf("%s: got %v, want unavailable", name, err)
		}
	}
}
