// Command images builds the images of all services as files that container engines
// and registries' tools read, without an engine: each is a static program, the public
// certificate authorities, a user that is not root, and a list of what it was built of.
// The same sources, Go and authorities give the same bytes on every machine. `images
// charts` packs the charts, of which the same holds.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kinference/kinference/deploy/charts"
	"github.com/kinference/kinference/internal/oci"
)

// chartsVersion is the variable by which kinfctl knows what it installs.
const chartsVersion = "github.com/kinference/kinference/deploy/charts.Version"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1) //nolint:gocritic // nothing is open
	}
}

// settings of a build.
type settings struct {
	root, out, registry, version, authorities, created string
	services, platforms                                string
}

func run(ctx context.Context, args []string, w io.Writer) error {
	if len(args) > 0 && args[0] == "charts" {
		return packageCharts(args[1:])
	}
	var s settings
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.StringVar(&s.root, "root", ".", "the repository")
	fs.StringVar(&s.out, "out", "out/images", "folder for what is written")
	fs.StringVar(&s.registry, "registry", "ghcr.io/kinference", "registry and path of the images' names")
	fs.StringVar(&s.version, "version", charts.Version, "version, which is their tag")
	fs.StringVar(&s.authorities, "authorities", "/etc/ssl/certs/ca-certificates.crt", "PEM file with the public certificate authorities")
	fs.StringVar(&s.created, "created", os.Getenv("SOURCE_DATE_EPOCH"), "time of the images in seconds since 1970; empty: 0")
	fs.StringVar(&s.services, "services", "ingress,router,kvtracker,limiter,classifier,accounting,kinference,kinfctl", "programs, comma separated")
	fs.StringVar(&s.platforms, "platforms", "linux/amd64,linux/arm64", "platforms, comma separated; docker load takes the first")
	if err := fs.Parse(args); err != nil {
		return err
	}
	at, err := s.at()
	if err != nil {
		return err
	}
	authorities, err := os.ReadFile(s.authorities)
	if err != nil {
		return fmt.Errorf("read the public certificate authorities: %w", err)
	}
	if err := os.MkdirAll(s.out, 0o755); err != nil {
		return err
	}
	var digests, sums strings.Builder
	for _, service := range strings.Split(s.services, ",") {
		if err := s.build(ctx, service, authorities, at, &digests, &sums); err != nil {
			return fmt.Errorf("%s: %w", service, err)
		}
	}
	if _, err := io.WriteString(w, digests.String()); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(s.out, "digests.txt"), []byte(digests.String()), 0o644),
		os.WriteFile(filepath.Join(s.out, "SHA256SUMS"), []byte(sums.String()), 0o644))
}

// at is the time that created names.
func (s *settings) at() (time.Time, error) {
	if s.created == "" {
		return time.Unix(0, 0), nil
	}
	seconds, err := strconv.ParseInt(s.created, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("created: %w", err)
	}
	return time.Unix(seconds, 0), nil
}

// build writes SERVICE.tar and a list of what each program was built of.
func (s *settings) build(ctx context.Context, service string, authorities []byte, at time.Time, digests, sums io.Writer) error {
	pkg := ""
	for _, dir := range []string{"services/" + service + "/cmd/" + service, "cmd/" + service} {
		if _, err := os.Stat(filepath.Join(s.root, dir)); err == nil {
			pkg = "./" + dir
		}
	}
	if pkg == "" {
		return errors.New("there is no such program")
	}
	base := []oci.File{
		{Path: "etc/group", Mode: 0o644, Data: []byte("root:x:0:\nnonroot:x:65532:\n")},
		{Path: "etc/passwd", Mode: 0o644, Data: []byte("root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin\n")},
		{Path: "etc/ssl/certs/ca-certificates.crt", Mode: 0o644, Data: authorities},
	}
	var images []oci.Image
	for _, p := range strings.Split(s.platforms, ",") {
		goos, arch, ok := strings.Cut(p, "/")
		if !ok {
			return fmt.Errorf("platform %q: want OS/ARCHITECTURE", p)
		}
		program, sbom, err := s.compile(ctx, service, pkg, goos, arch, at)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s-%s-%s.spdx.json", service, goos, arch)
		if err := s.write(name, sbom, sums); err != nil {
			return err
		}
		images = append(images, oci.Image{
			OS: goos, Architecture: arch, User: "65532:65532", Entrypoint: []string{"/service"}, Created: at,
			Env: []string{"PATH=/", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"},
			Labels: map[string]string{
				"org.opencontainers.image.title": "kinference-" + service, "org.opencontainers.image.version": s.version, "org.opencontainers.image.licenses": "Apache-2.0",
				"org.opencontainers.image.description": service + " of Kinference, the inference control plane for Kubernetes and vLLM",
				"org.opencontainers.image.created":     at.UTC().Format(time.RFC3339),
			},
			Layers: [][]oci.File{base, {{Path: "service", Mode: 0o755, Data: program}, {Path: "usr/share/sbom/service.spdx.json", Mode: 0o644, Data: sbom}}},
		})
	}
	var tar bytes.Buffer
	ref := s.registry + "/" + service + ":" + s.version
	digest, err := oci.Write(&tar, ref, images...)
	if err != nil {
		return err
	}
	// What was written is what will be read.
	a, err := oci.Read(bytes.NewReader(tar.Bytes()))
	if err != nil {
		return fmt.Errorf("read the image that was written: %w", err)
	}
	if a.Digest != digest {
		return fmt.Errorf("the image reads as %s, written was %s", a.Digest, digest)
	}
	if _, err := fmt.Fprintf(digests, "%s@%s\n", ref, digest); err != nil {
		return err
	}
	return s.write(service+".tar", tar.Bytes(), sums)
}

// write writes a file and its line in SHA256SUMS.
func (s *settings) write(name string, data []byte, sums io.Writer) error {
	sum := sha256.Sum256(data)
	if _, err := fmt.Fprintf(sums, "%s  %s\n", hex.EncodeToString(sum[:]), name); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(s.out, name), data, 0o644)
}

// compile builds a program and lists what it was built of.
func (s *settings) compile(ctx context.Context, service, pkg, goos, arch string, at time.Time) (program, sbom []byte, err error) {
	dir, err := os.MkdirTemp("", "kinference-image-")
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // scratch
	bin := filepath.Join(dir, "service")
	// Time zones are in the program: a scratch image has none.
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-tags", "timetzdata", "-ldflags", "-s -w -buildid= -X "+chartsVersion+"="+s.version, "-o", bin, pkg)
	cmd.Dir = s.root
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GOFLAGS=") }), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+arch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("go build: %w\n%s", err, out)
	}
	if program, err = os.ReadFile(bin); err != nil {
		return nil, nil, err
	}
	sum := sha256.Sum256(program)
	sbom, err = oci.SBOM(bin, "kinference-"+service, s.version, hex.EncodeToString(sum[:]), at)
	return program, sbom, err
}
