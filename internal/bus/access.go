package bus

import (
	"errors"
	"flag"

	"github.com/nats-io/nats.go"
)

// Access is how to get into a NATS that asks for more than a password in its URL.
// The files are read anew for each connection, because they are renewed.
type Access struct {
	// CA has the authorities of the servers. Empty: the system's.
	CA string
	// Cert and Key are shown to the servers.
	Cert, Key string
	// Creds has a JWT and its seed, as `nsc generate creds` writes them.
	Creds string
}

// Flags declares the settings, which are the same for all services that use NATS.
func (a *Access) Flags(fs *flag.FlagSet) {
	fs.StringVar(&a.CA, "nats-ca-file", a.CA, "PEM file with the authorities of NATS, whose connections are then encrypted; empty: the system's, for tls:// URLs")
	fs.StringVar(&a.Cert, "nats-cert-file", a.Cert, "PEM file with a certificate to show to NATS")
	fs.StringVar(&a.Key, "nats-key-file", a.Key, "PEM file with its key")
	fs.StringVar(&a.Creds, "nats-creds-file", a.Creds, "file with credentials for NATS (a JWT and its seed)")
}

// Options are those for Connect, which fails if a file is of no use.
func (a *Access) Options() []nats.Option {
	var out []nats.Option
	if a.CA != "" {
		out = append(out, nats.RootCAs(a.CA))
	}
	if (a.Cert == "") != (a.Key == "") {
		return []nats.Option{func(*nats.Options) error { return errors.New("nats-cert-file and nats-key-file go together") }}
	}
	if a.Cert != "" {
		out = append(out, nats.ClientCert(a.Cert, a.Key))
	}
	if a.Creds != "" {
		out = append(out, nats.UserCredentials(a.Creds))
	}
	return out
}
