// Package oci writes container images without a container engine: an OCI image
// layout in one tar file, which `docker load`, `podman load`, `skopeo copy
// oci-archive:` and registries' tools read. The same input gives the same bytes.
//
// cmd/images builds the release with it; Read checks what was written. Functions keep
// no state and may be called at the same time.
package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"
)

// Media types of the image specification.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// File is one of an image, owned by root. Its parents are made as needed.
type File struct {
	Path string // from the root, without a slash before
	Mode int64
	Data []byte
}

// Image is what runs on one platform.
type Image struct {
	OS, Architecture string
	User             string // as in 65532:65532
	Entrypoint       []string
	Env              []string
	Labels           map[string]string
	Created          time.Time
	Layers           [][]File
}

// descriptor names a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int64             `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type config struct {
	Created      time.Time `json:"created"`
	Architecture string    `json:"architecture"`
	OS           string    `json:"os"`
	Config       struct {
		User       string            `json:"User,omitempty"`
		Env        []string          `json:"Env,omitempty"`
		Entrypoint []string          `json:"Entrypoint,omitempty"`
		Labels     map[string]string `json:"Labels,omitempty"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
	History []history `json:"history"`
}

type history struct {
	Created   time.Time `json:"created"`
	CreatedBy string    `json:"created_by"`
}

// dockerManifest is how `docker load` before version 25 finds an image.
type dockerManifest struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// archive collects what goes into the tar file.
type archive struct {
	blobs map[string][]byte
	order []string
}

func (a *archive) add(mediaType string, data []byte) descriptor {
	digest := digestOf(data)
	if _, ok := a.blobs[digest]; !ok {
		a.blobs[digest] = data
		a.order = append(a.order, digest)
	}
	return descriptor{MediaType: mediaType, Digest: digest, Size: int64(len(data))}
}

func (a *archive) addJSON(mediaType string, v any) (descriptor, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return descriptor{}, err
	}
	return a.add(mediaType, data), nil
}

// Write writes the images, one for each platform, under the name ref
// (registry/name:tag). It returns the digest that a registry will know them by.
func Write(w io.Writer, ref string, images ...Image) (digest string, err error) {
	if len(images) == 0 || !strings.Contains(ref, ":") {
		return "", errors.New("oci: want a name with a tag, and an image")
	}
	a := &archive{blobs: map[string][]byte{}}
	all := index{SchemaVersion: 2, MediaType: typeIndex}
	var docker []dockerManifest
	for _, img := range images {
		d, m, err := a.image(img)
		if err != nil {
			return "", fmt.Errorf("oci: %s/%s: %w", img.OS, img.Architecture, err)
		}
		all.Manifests = append(all.Manifests, d)
		if docker == nil { // it knows no platforms
			docker = []dockerManifest{{Config: blobPath(m.Config.Digest), RepoTags: []string{ref}}}
			for _, l := range m.Layers {
				docker[0].Layers = append(docker[0].Layers, blobPath(l.Digest))
			}
		}
	}
	top, err := a.addJSON(typeIndex, all)
	if err != nil {
		return "", err
	}
	top.Annotations = map[string]string{"io.containerd.image.name": ref, "org.opencontainers.image.ref.name": ref[strings.LastIndexByte(ref, ':')+1:]}
	t := tar.NewWriter(w)
	put := func(name string, data []byte) {
		if err == nil {
			err = entry(t, File{Path: name, Mode: 0o644, Data: data}, time.Unix(0, 0))
		}
	}
	putJSON := func(name string, v any) {
		data, bad := json.Marshal(v)
		err = errors.Join(err, bad)
		put(name, data)
	}
	putJSON("oci-layout", map[string]string{"imageLayoutVersion": "1.0.0"})
	for _, digest := range a.order {
		put(blobPath(digest), a.blobs[digest])
	}
	putJSON("index.json", index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{top}})
	putJSON("manifest.json", docker)
	if err == nil {
		err = t.Close()
	}
	return top.Digest, err
}

func digestOf(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

func blobPath(digest string) string { return "blobs/" + strings.Replace(digest, ":", "/", 1) }

// image adds the blobs of one image.
func (a *archive) image(img Image) (descriptor, manifest, error) {
	m := manifest{SchemaVersion: 2, MediaType: typeManifest, Annotations: img.Labels}
	c := config{Created: img.Created.UTC(), Architecture: img.Architecture, OS: img.OS}
	c.Config.User, c.Config.Env, c.Config.Entrypoint, c.Config.Labels = img.User, img.Env, img.Entrypoint, img.Labels
	c.RootFS.Type = "layers"
	for _, files := range img.Layers {
		plain, packed, err := layer(files, img.Created)
		if err != nil {
			return descriptor{}, m, err
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digestOf(plain))
		c.History = append(c.History, history{Created: c.Created, CreatedBy: "kinference images"})
		m.Layers = append(m.Layers, a.add(typeLayer, packed))
	}
	var err error
	if m.Config, err = a.addJSON(typeConfig, c); err != nil {
		return descriptor{}, m, err
	}
	d, err := a.addJSON(typeManifest, m)
	d.Platform = &platform{Architecture: img.Architecture, OS: img.OS}
	return d, m, err
}

// layer is a tar file of files, and the same compressed.
func layer(files []File, at time.Time) (plain, packed []byte, err error) {
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	made := map[string]bool{".": true}
	for _, f := range files {
		if f.Path != path.Clean(f.Path) || path.IsAbs(f.Path) || strings.HasPrefix(f.Path, "..") {
			return nil, nil, fmt.Errorf("path %q is not one from the root", f.Path)
		}
		var parents []string
		for dir := path.Dir(f.Path); !made[dir]; dir = path.Dir(dir) {
			made[dir] = true
			parents = append(parents, dir)
		}
		for _, dir := range slices.Backward(parents) {
			if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at, Format: tar.FormatPAX}); err != nil {
				return nil, nil, err
			}
		}
		if err := entry(t, f, at); err != nil {
			return nil, nil, err
		}
	}
	if err := t.Close(); err != nil {
		return nil, nil, err
	}
	var z bytes.Buffer
	g := gzip.NewWriter(&z) // without a name or a time in its header
	if _, err := g.Write(b.Bytes()); err != nil {
		return nil, nil, err
	}
	err = g.Close()
	return b.Bytes(), z.Bytes(), err
}

func entry(t *tar.Writer, f File, at time.Time) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: f.Mode, Size: int64(len(f.Data)), ModTime: at.Truncate(time.Second), Format: tar.FormatUSTAR}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := t.Write(f.Data)
	return err
}
