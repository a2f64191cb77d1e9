package oci_test

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/oci"
)

func images() []oci.Image {
	at := time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	var out []oci.Image
	for _, arch := range []string{"amd64", "arm64"} {
		out = append(out, oci.Image{
			OS: "linux", Architecture: arch, User: "65532:65532", Entrypoint: []string{"/service"}, Env: []string{"PATH=/"}, Created: at,
			Labels: map[string]string{"org.opencontainers.image.title": "kinference-router", "a": "b"},
			Layers: [][]oci.File{
				{{Path: "etc/passwd", Mode: 0o644, Data: []byte("root")}, {Path: "etc/ssl/certs/ca.crt", Mode: 0o644, Data: []byte("pem")}},
				{{Path: "service", Mode: 0o755, Data: []byte(arch)}},
			},
		})
	}
	return out
}

func TestWriteRead(t *testing.T) {
	const ref = "registry:5000/kinference/router:0.1.0"
	var first, second bytes.Buffer
	digest, err := oci.Write(&first, ref, images()...)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := oci.Write(&second, ref, images()...); err != nil || again != digest || !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Errorf("written twice it is another one: %s and %s, %v", digest, again, err)
	}
	a, err := oci.Read(&second)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&oci.Archive{Digest: digest, Ref: ref, Images: images()}, a); diff != "" {
		t.Errorf("read is not what was written (-want +got):\n%s", diff)
	}
	// Each bit counts, but those of the file's padding and times.
	raw := first.Bytes()
	for _, at := range []string{`"imageLayoutVersion"`, `"sha256:`, `"Entrypoint"`, `"Config":"blobs`, "\x1f\x8b"} {
		i := bytes.Index(raw, []byte(at))
		if i < 0 {
			t.Fatalf("there is no %q", at)
		}
		bad := bytes.Clone(raw)
		bad[i+len(at)+2] ^= 1
		if _, err := oci.Read(bytes.NewReader(bad)); err == nil {
			t.Errorf("changed behind %q: want an error", at)
		}
	}
	if _, err := oci.Read(bytes.NewReader(raw[:len(raw)/2])); err == nil {
		t.Error("half of it: want an error")
	}
}

func TestRefused(t *testing.T) {
	for name, change := range map[string]func(*oci.Image){
		"absolute": func(i *oci.Image) { i.Layers[0][0].Path = "/etc/passwd" },
		"above":    func(i *oci.Image) { i.Layers[0][0].Path = "../passwd" },
		"unclean":  func(i *oci.Image) { i.Layers[0][0].Path = "etc//passwd" },
	} {
		all := images()
		change(&all[0])
		if _, err := oci.Write(&bytes.Buffer{}, "router:1", all...); err == nil {
			t.Errorf("%s: want an error", name)
		}
	}
	if _, err := oci.Write(&bytes.Buffer{}, "router:1"); err == nil {
		t.Error("without an image: want an error")
	}
}

// A test has no modules in it: those of a program are looked at in cmd/images.
func TestSBOM(t *testing.T) {
	raw, err := oci.SBOM(os.Args[0], "kinference-test", "0.1.0", strings.Repeat("0", 64), time.Unix(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		SPDXVersion   string
		Packages      []struct{ SPDXID, Name, VersionInfo string }
		Relationships []struct{ RelationshipType, RelatedSpdxElement string }
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, p := range doc.Packages {
		found[p.Name] = p.VersionInfo
	}
	if doc.SPDXVersion != "SPDX-2.3" || found["kinference-test"] != "0.1.0" || found["stdlib"] == "" {
		t.Errorf("names %v", found)
	}
	if len(doc.Relationships) != len(doc.Packages) {
		t.Errorf("%d relationships of %d packages", len(doc.Relationships), len(doc.Packages))
	}
	if _, err := oci.SBOM(os.DevNull, "x", "1", "", time.Time{}); err == nil {
		t.Error("no program: want an error")
	}
}
