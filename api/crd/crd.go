// Package crd carries the CustomResourceDefinitions of the group
// kinference.buoyant.io, as generated from the types of api/v1alpha1.
//
// internal/resources reads the schemas from them, so that files are checked as
// the Kubernetes API checks them; tests install them.
package crd

import "embed"

// Files holds one YAML file for each kind.
//
//go:embed *.yaml
var Files embed.FS
