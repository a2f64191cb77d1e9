package oci

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// maxBlob bounds what Read takes of one blob, packed or not.
const maxBlob = 1 << 30

// Archive is a tar file that Read has checked.
type Archive struct {
	// Digest is that of the index of all platforms.
	Digest string
	// Ref is the name under which `docker load` puts the first of them.
	Ref    string
	Images []Image
}

// Read reads what Write wrote and checks all of it: each blob is what its digest and
// size say, each reference leads somewhere, each layer unpacks to what the
// configuration names, and both forms of the archive lead to the same image.
func Read(r io.Reader) (*Archive, error) {
	blobs := map[string][]byte{}
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("oci: %w", err)
		}
		data, err := io.ReadAll(io.LimitReader(t, maxBlob+1))
		if err != nil {
			return nil, fmt.Errorf("oci: read %s: %w", h.Name, err)
		}
		if len(data) > maxBlob {
			return nil, fmt.Errorf("oci: %s is too large", h.Name)
		}
		blobs[h.Name] = data
	}
	out, err := check(blobs)
	if err != nil {
		return nil, fmt.Errorf("oci: %w", err)
	}
	return out, nil
}

func check(blobs map[string][]byte) (*Archive, error) {
	var layout struct{ ImageLayoutVersion string }
	if err := json.Unmarshal(blobs["oci-layout"], &layout); err != nil || layout.ImageLayoutVersion != "1.0.0" {
		return nil, errors.New("it is no image layout")
	}
	blob := func(d descriptor) ([]byte, error) {
		data, ok := blobs[blobPath(d.Digest)]
		if !ok || d.Digest != digestOf(data) || d.Size != int64(len(data)) {
			return nil, fmt.Errorf("blob %s is missing or another one", d.Digest)
		}
		return data, nil
	}
	read := func(d descriptor, mediaType string, v any) error {
		data, err := blob(d)
		if err == nil && d.MediaType != mediaType {
			err = fmt.Errorf("%s is %s, want %s", d.Digest, d.MediaType, mediaType)
		}
		if err != nil {
			return err
		}
		return json.Unmarshal(data, v)
	}
	var top, all index
	if err := json.Unmarshal(blobs["index.json"], &top); err != nil || len(top.Manifests) != 1 {
		return nil, errors.New("index.json does not name one index")
	}
	if err := read(top.Manifests[0], typeIndex, &all); err != nil {
		return nil, err
	}
	out := &Archive{Digest: top.Manifests[0].Digest}
	var docker []dockerManifest
	if err := json.Unmarshal(blobs["manifest.json"], &docker); err != nil || len(docker) != 1 || len(docker[0].RepoTags) != 1 {
		return nil, errors.New("manifest.json does not name one image")
	}
	out.Ref = docker[0].RepoTags[0]
	for i, d := range all.Manifests {
		var m manifest
		var c config
		if err := read(d, typeManifest, &m); err != nil {
			return nil, err
		}
		if err := read(m.Config, typeConfig, &c); err != nil {
			return nil, err
		}
		if d.Platform == nil || d.Platform.OS != c.OS || d.Platform.Architecture != c.Architecture || len(m.Layers) != len(c.RootFS.DiffIDs) {
			return nil, fmt.Errorf("manifest %s does not fit its configuration", d.Digest)
		}
		img := Image{
			OS: c.OS, Architecture: c.Architecture, User: c.Config.User, Entrypoint: c.Config.Entrypoint, Env: c.Config.Env, Labels: c.Config.Labels, Created: c.Created,
		}
		var paths []string
		for n, l := range m.Layers {
			paths = append(paths, blobPath(l.Digest))
			data, err := blob(l)
			if err != nil {
				return nil, err
			}
			files, err := unpack(data, c.RootFS.DiffIDs[n])
			if err != nil {
				return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
			}
			img.Layers = append(img.Layers, files)
		}
		if i == 0 && (docker[0].Config != blobPath(m.Config.Digest) || fmt.Sprint(docker[0].Layers) != fmt.Sprint(paths)) {
			return nil, errors.New("manifest.json names another image than index.json")
		}
		out.Images = append(out.Images, img)
	}
	return out, nil
}

func unpack(packed []byte, diffID string) (out []File, err error) {
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		return nil, err
	}
	plain, err := io.ReadAll(io.LimitReader(z, maxBlob))
	if err != nil {
		return nil, err
	}
	if diffID != digestOf(plain) {
		return nil, errors.New("it unpacks to something else")
	}
	t := tar.NewReader(bytes.NewReader(plain))
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(t)
		if err != nil {
			return nil, err
		}
		out = append(out, File{Path: h.Name, Mode: h.Mode, Data: data})
	}
}
