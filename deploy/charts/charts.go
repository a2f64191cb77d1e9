// Package charts holds the Helm charts of this folder, for kinfctl to install. Its
// files do not change while a process runs, and may be read by many at once.
package charts

import "embed"

// Files are the charts without their READMEs: FOLDER/Chart.yaml, values and templates.
//
//go:embed */Chart.yaml */values*.yaml */values.schema.json */templates/*
var Files embed.FS

// Order names the folders so that a chart comes behind those that it depends on. The
// definitions, kinference-crds, depend on nothing and are installed first.
var Order = []string{
	"lib", "ingress", "router", "kvtracker", "relay", "limiter", "classifier", "accounting", "nats", "redis", "kinference", "kinference-crds",
}
