package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/kinference/kinference/deploy/charts"
)

// packageCharts writes the charts that are released as NAME-VERSION.tgz, as `helm
// package` does, but with the same bytes each time.
func packageCharts(args []string) error {
	var s settings
	f := flag.NewFlagSet("images charts", flag.ContinueOnError)
	f.StringVar(&s.out, "out", "out/images", "folder for what is written")
	f.StringVar(&s.version, "version", charts.Version, "version of the charts and of the images that they run")
	f.StringVar(&s.created, "created", os.Getenv("SOURCE_DATE_EPOCH"), "time of the files in seconds since 1970; empty: 0")
	if err := f.Parse(args); err != nil {
		return err
	}
	at, err := s.at()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(s.out, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"kinference", "kinference-crds"} {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		t := tar.NewWriter(z)
		err := pack(t, name, name, s.version, at)
		if err == nil {
			err = t.Close()
		}
		if err == nil {
			err = z.Close()
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(s.out, name+"-"+s.version+".tgz"), b.Bytes(), 0o644)
		}
		if err != nil {
			return fmt.Errorf("chart %s: %w", name, err)
		}
	}
	return nil
}

// pack adds a chart below the folder to, and the charts that it depends on.
func pack(t *tar.Writer, chart, to, version string, at time.Time) error {
	var meta struct{ Dependencies []struct{ Name string } }
	err := fs.WalkDir(charts.Files, chart, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := charts.Read(file, version)
		if err != nil {
			return err
		}
		if file == chart+"/Chart.yaml" {
			if err := yaml.Unmarshal(data, &meta); err != nil {
				return err
			}
		}
		h := &tar.Header{Typeflag: tar.TypeReg, Name: path.Join(to, strings.TrimPrefix(file, chart)), Mode: 0o644, Size: int64(len(data)), ModTime: at, Format: tar.FormatUSTAR}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err = t.Write(data)
		return err
	})
	for _, d := range meta.Dependencies {
		if err == nil {
			err = pack(t, d.Name, path.Join(to, "charts", d.Name), version, at)
		}
	}
	return err
}
