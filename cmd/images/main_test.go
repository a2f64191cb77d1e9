package main

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/oci"
)

const root = "../.."

// copied is the repository at another place, as another machine would have it: what
// the Dockerfile's context has.
func copied(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(root, "deploy/Dockerfile.dockerignore"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, line := range strings.Fields(string(raw)) {
		path, ok := strings.CutPrefix(line, "!")
		if !ok {
			continue
		}
		from, to := filepath.Join(root, path), filepath.Join(dir, path)
		info, err := os.Stat(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if info.IsDir() {
			err = os.CopyFS(to, os.DirFS(from))
		} else {
			var data []byte
			if data, err = os.ReadFile(from); err == nil {
				err = os.WriteFile(to, data, 0o644)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// The same sources give the same image, wherever they are. It reads as both kinds of
// engines want it, and holds a static program for a user that is not root.
func TestReproducible(t *testing.T) {
	authorities := filepath.Join(t.TempDir(), "ca.crt")
	if err := os.WriteFile(authorities, []byte("-----BEGIN CERTIFICATE-----\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var outs []string
	for _, from := range []string{root, copied(t)} {
		out := t.TempDir()
		outs = append(outs, out)
		if err := run(t.Context(), []string{"-root", from, "-out", out, "-services", "limiter", "-platforms", "linux/amd64", "-authorities", authorities, "-created", "1700000000"}, io.Discard); err != nil {
			t.Fatal(err)
		}
	}
	read := func(out, name string) []byte {
		t.Helper()
		raw, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	for _, name := range []string{"digests.txt", "SHA256SUMS", "limiter.tar", "limiter-linux-amd64.spdx.json"} {
		if !bytes.Equal(read(outs[0], name), read(outs[1], name)) {
			t.Errorf("%s differs between two places", name)
		}
	}
	a, err := oci.Read(bytes.NewReader(read(outs[0], "limiter.tar")))
	if err != nil {
		t.Fatal(err)
	}
	if want := "ghcr.io/kinference/limiter:0.1.0"; a.Ref != want || string(read(outs[0], "digests.txt")) != want+"@"+a.Digest+"\n" {
		t.Errorf("it is %s@%s; digests.txt says %s", a.Ref, a.Digest, read(outs[0], "digests.txt"))
	}
	img := a.Images[0]
	if img.User != "65532:65532" || img.Labels["org.opencontainers.image.title"] != "kinference-limiter" || img.Labels["org.opencontainers.image.version"] != "0.1.0" {
		t.Errorf("user %s, labels %v", img.User, img.Labels)
	}
	files := map[string][]byte{}
	var names []string
	for _, l := range img.Layers {
		for _, f := range l {
			files[f.Path] = f.Data
			names = append(names, f.Path)
		}
	}
	if diff := cmp.Diff([]string{"etc/group", "etc/passwd", "etc/ssl/certs/ca-certificates.crt", "service", "usr/share/sbom/service.spdx.json"}, names); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	program, err := elf.NewFile(bytes.NewReader(files["service"]))
	if err != nil {
		t.Fatal(err)
	}
	if libs, err := program.ImportedLibraries(); err != nil || len(libs) > 0 {
		t.Errorf("it needs %v (%v), want a static program", libs, err)
	}
	var doc struct {
		Packages []struct {
			Name      string
			Checksums []struct{ ChecksumValue string }
		}
	}
	if err := json.Unmarshal(files["usr/share/sbom/service.spdx.json"], &doc); err != nil {
		t.Fatal(err)
	}
	sums := map[string]int{}
	for _, p := range doc.Packages {
		sums[p.Name] = len(p.Checksums)
	}
	if len(doc.Packages) < 20 || sums["github.com/redis/go-redis/v9"] != 1 || sums["kinference-limiter"] != 1 {
		t.Errorf("%d packages: %v", len(doc.Packages), sums)
	}
	t.Logf("%d bytes of program, %d packages", len(files["service"]), len(doc.Packages))
}

func TestRefused(t *testing.T) {
	for _, tc := range []struct{ flag, value, want string }{
		{"services", "none", "no such program"}, {"platforms", "linux", "OS/ARCHITECTURE"}, {"created", "yesterday", "created"}, {"authorities", "none", "authorities"},
	} {
		// The last one wins.
		args := []string{"-root", root, "-out", t.TempDir(), "-authorities", "main.go", "-services", "limiter", "-" + tc.flag, tc.value}
		if err := run(t.Context(), args, io.Discard); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s %s: got %v, want %q", tc.flag, tc.value, err, tc.want)
		}
	}
}
