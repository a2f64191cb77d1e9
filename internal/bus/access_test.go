package bus_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
)

// guarded starts a server that lets in whom o does.
func guarded(t *testing.T, o *server.Options) (url string) {
	t.Helper()
	o.Host, o.Port, o.NoSigs, o.NoLog = "127.0.0.1", server.RANDOM_PORT, true, true
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(30 * time.Second) {
		t.Fatal("NATS does not start")
	}
	return s.Addr().String()
}

// A NATS that asks for a password, for certificates of its clients and for signed
// credentials lets in who has them, and nobody else.
func TestAccess(t *testing.T) {
	dir := t.TempDir()
	authority, ours, others := testenv.NewAuthority(t, "nats"), filepath.Join(dir, "ours"), filepath.Join(dir, "others")
	authority.Secret(t, ours)
	testenv.NewAuthority(t, "other").Secret(t, others)
	pair, err := tls.LoadX509KeyPair(filepath.Join(ours, "tls.crt"), filepath.Join(ours, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.PEM)
	secure := func() *tls.Config {
		return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	mutual := secure()
	mutual.ClientAuth, mutual.ClientCAs = tls.RequireAndVerifyClientCert, roots
	password := guarded(t, &server.Options{TLSConfig: secure(), Username: "user", Password: "secret"})
	certificates := guarded(t, &server.Options{TLSConfig: mutual, TLSVerify: true})
	operator, creds := signed(t, dir)
	credentials := guarded(t, operator)

	ca := bus.Access{CA: filepath.Join(ours, "ca.crt")}
	with := func(dir string) bus.Access {
		return bus.Access{CA: ca.CA, Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key")}
	}
	for _, tc := range []struct {
		name, url string
		access    bus.Access
		want      bool
	}{
		{"password", "tls://user:secret@" + password, ca, true},
		{"password, TLS by the file alone", "nats://user:secret@" + password, ca, true},
		{"wrong password", "tls://user:guess@" + password, ca, false},
		{"no password", "tls://" + password, ca, false},
		{"another authority", "tls://user:secret@" + password, bus.Access{CA: filepath.Join(others, "ca.crt")}, false},
		{"the system's authorities", "tls://user:secret@" + password, bus.Access{}, false},
		{"certificate", "tls://" + certificates, with(ours), true},
		{"no certificate", "tls://" + certificates, ca, false},
		{"certificate of another authority", "tls://" + certificates, with(others), false},
		{"credentials", "nats://" + credentials, bus.Access{Creds: creds}, true},
		{"no credentials", "nats://" + credentials, bus.Access{}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			conn, err := bus.Connect(t.Context(), tc.url, "test", tc.access.Options()...)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			deadline := time.Now().Add(30 * time.Second)
			tick := time.NewTicker(5 * time.Millisecond)
			defer tick.Stop()
			for !conn.Connected() && conn.NATS().LastError() == nil && time.Now().Before(deadline) {
				<-tick.C
			}
			if got := conn.Connected(); got != tc.want {
				t.Errorf("connected: %v (%v), want %v", got, conn.NATS().LastError(), tc.want)
			}
		})
	}

	for _, bad := range []bus.Access{{CA: filepath.Join(dir, "none")}, {Cert: with(ours).Cert}, {Cert: creds, Key: creds}} {
		if conn, err := bus.Connect(context.Background(), "tls://"+password, "test", bad.Options()...); err == nil {
			conn.Close()
			t.Errorf("%+v: want an error", bad)
		}
	}
}

// signed is a server that asks for credentials, and a file with some.
func signed(t *testing.T, dir string) (o *server.Options, creds string) {
	t.Helper()
	key := func(make func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		k, err := make()
		if err != nil {
			t.Fatal(err)
		}
		public, err := k.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return k, public
	}
	encoded := func(text string, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	operator, operatorID := key(nkeys.CreateOperator)
	account, accountID := key(nkeys.CreateAccount)
	user, userID := key(nkeys.CreateUser)
	oc := jwt.NewOperatorClaims(operatorID)
	if _, err := oc.Encode(operator); err != nil {
		t.Fatal(err)
	}
	resolver := &server.MemAccResolver{}
	if err := resolver.Store(accountID, encoded(jwt.NewAccountClaims(accountID).Encode(operator))); err != nil {
		t.Fatal(err)
	}
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.FormatUserConfig(encoded(jwt.NewUserClaims(userID).Encode(account)), seed)
	if err != nil {
		t.Fatal(err)
	}
	creds = filepath.Join(dir, "user.creds")
	if err := os.WriteFile(creds, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return &server.Options{TrustedOperators: []*jwt.OperatorClaims{oc}, AccountResolver: resolver}, creds
}

func TestAccessFlags(t *testing.T) {
	var a bus.Access
	fs := flag.NewFlagSet("x", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	a.Flags(fs)
	if err := fs.Parse(strings.Fields("--nats-ca-file a --nats-cert-file b --nats-key-file c --nats-creds-file d")); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(a), "{a b c d}"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
