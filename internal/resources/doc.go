// Package resources checks the resources of the group kinference.buoyant.io and
// compiles them into a Catalog.
//
// The router uses a Source for live configuration from a folder of YAML, and
// Options.Compile for what it reads from the Kubernetes API; admission calls
// ValidateObject, and offline checks Options.Load: all the same code. A
// resource is first held against the schema of its definition (api/crd) as the
// Kubernetes API does, rules and defaults included; then follows what only code
// can say: policies, references, hierarchies, names that clash. An unknown or
// duplicate field, a wrong type or a missing value is a Problem with file, line
// and reason, and nothing is silently ignored. A reference to something that is
// not there is a warning, because a folder may be a part of a whole. A folder
// with an error compiles to no catalog, so that a caller keeps the one that it
// has. Catalogs are immutable and safe for concurrent use.
//
// Pools: in a namespace without any InferencePool all its worker sets and
// providers are served, as if by a pool named "default"; where there are pools,
// only what they name is served, and there is a warning about the rest.
package resources
