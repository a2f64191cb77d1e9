package credential

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

const (
	// Label is on each Secret that may be used for providers. Without it whoever
	// may write an InferenceProvider could send any Secret of the namespace to a
	// server of their own.
	Label = "kinference.buoyant.io/provider-credentials"
	// readAgain is how long what the API said is used, and stale how long the last
	// good answer is while the API cannot be reached.
	readAgain, stale = 10 * time.Second, 10 * time.Minute
	// podFolder is where a Pod finds its identity for the API.
	podFolder = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// Kubernetes reads Secrets one by one, by name, from the Kubernetes API. It needs
// the right to get those that it is meant to read, never to list or watch any.
// Make it with NewKubernetes. It is safe for concurrent use.
type Kubernetes struct {
	url    string
	folder string // with token and ca.crt
	client *http.Client
	now    func() time.Time

	mu   sync.Mutex
	kept map[string]*known
}

// known is what is known of one Secret. Its lock is held while it is asked for.
type known struct {
	mu   sync.Mutex
	keys provider.Credentials
	err  error
	at   time.Time // of the last try
	good time.Time // of the last answer
}

// NewKubernetes makes a Kubernetes for the cluster that the Pod runs in.
func NewKubernetes() (*Kubernetes, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("read provider Secrets by the Kubernetes API: this is no Pod")
	}
	return newKubernetes("https://"+net.JoinHostPort(host, port), podFolder)
}

func newKubernetes(url, folder string) (*Kubernetes, error) {
	ca, err := os.ReadFile(filepath.Join(folder, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("read certificate of the Kubernetes API: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("read certificate of the Kubernetes API: there is none")
	}
	return &Kubernetes{url: url, folder: folder, now: time.Now, kept: map[string]*known{}, client: &http.Client{
		Timeout:       5 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport:     &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, IdleConnTimeout: time.Minute, TLSHandshakeTimeout: 5 * time.Second},
	}}, nil
}

// Close closes idle connections.
func (k *Kubernetes) Close() { k.client.CloseIdleConnections() }

// Secret returns the keys of a Secret, named namespace/name.
func (k *Kubernetes) Secret(ctx context.Context, secret string) (provider.Credentials, error) {
	k.mu.Lock()
	e := k.kept[secret]
	if e == nil {
		if len(k.kept) >= maxKept {
			clear(k.kept)
		}
		e = &known{}
		k.kept[secret] = e
	}
	k.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	now := k.now()
	if !e.at.IsZero() && now.Sub(e.at) < readAgain {
		return e.keys, e.err
	}
	keys, reached, err := k.read(ctx, secret)
	switch {
	case ctx.Err() != nil: // the request ended, which says nothing
		if e.good.IsZero() {
			return keys, err
		}
	case err == nil:
		e.keys, e.err, e.at, e.good = keys, nil, now, now
	case !reached && !e.good.IsZero() && now.Sub(e.good) < stale:
		e.at = now
	default:
		e.keys, e.err, e.at, e.good = provider.Credentials{}, err, now, time.Time{}
	}
	return e.keys, e.err
}

// read asks the API. reached says that it was there and has decided.
func (k *Kubernetes) read(ctx context.Context, secret string) (c provider.Credentials, reached bool, err error) {
	namespace, base, ok := strings.Cut(secret, "/")
	if !ok || !name.MatchString(namespace) || !name.MatchString(base) {
		return c, true, errors.New("a Secret is named namespace/name")
	}
	token, err := os.ReadFile(filepath.Join(k.folder, "token")) // rotated by the kubelet
	if err != nil {
		return c, false, fmt.Errorf("read token for the Kubernetes API: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, k.url+"/api/v1/namespaces/"+namespace+"/secrets/"+base, nil)
	if err != nil {
		return c, true, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	req.Header.Set("Accept", "application/json")
	resp, err := k.client.Do(req)
	if err != nil {
		return c, false, fmt.Errorf("get Secret: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 2<<20)) // a Secret is at most 1 MiB
	if err != nil {
		return c, false, fmt.Errorf("get Secret: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return c, resp.StatusCode < 500 && resp.StatusCode != http.StatusTooManyRequests, fmt.Errorf("get Secret %s: status %d", secret, resp.StatusCode)
	}
	var in struct {
		Metadata struct{ Labels map[string]string }
		Data     map[string][]byte
	}
	if json.Unmarshal(body, &in) != nil {
		return c, true, fmt.Errorf("get Secret %s: the answer is no Secret", secret)
	}
	if in.Metadata.Labels[Label] != "true" {
		return c, true, fmt.Errorf("Secret %s is not labelled %s: \"true\"", secret, Label)
	}
	found := false
	for key, to := range members(&c) {
		if text := in.Data[key]; len(text) > 0 && len(text) <= maxFile {
			*to, found = strings.TrimSpace(string(text)), true
		}
	}
	if !found {
		return c, true, fmt.Errorf("%s has none of apiKey, accessKeyId, secretAccessKey, clientId", secret)
	}
	return c, true, nil
}
