// Package charts holds the Helm charts of this folder, for kinfctl to install and for
// releases to pack. Its files do not change while a process runs, and may be read by
// many at once.
package charts

import (
	"bytes"
	"embed"
	"path"
)

// Files are the charts without their READMEs: FOLDER/Chart.yaml, values and templates.
//
//go:embed */Chart.yaml */values*.yaml */values.schema.json */templates/*
var Files embed.FS

// unreleased is the version that stands in the files.
const unreleased = "0.1.0"

// Version is that of the charts and of the images that they run. The linker sets it
// for a release (-X); it is not changed later.
var Version = unreleased

// Read returns one of Files as charts of that version have it.
func Read(name, version string) ([]byte, error) {
	data, err := Files.ReadFile(name)
	if err == nil && path.Base(name) == "Chart.yaml" {
		data = bytes.ReplaceAll(data, []byte("ersion: "+unreleased), []byte("ersion: "+version))
	}
	return data, err
}
