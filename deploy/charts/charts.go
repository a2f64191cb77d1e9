// Package charts holds the Helm charts of this folder, for kinfctl to install. Its
// files do not change while a process runs, and may be read by many at once.
package charts

import "embed"

// Files are the charts without their READMEs: FOLDER/Chart.yaml, values and templates.
//
//go:embed */Chart.yaml */values*.yaml */values.schema.json */templates/*
var Files embed.FS
