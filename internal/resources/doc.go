// Package resources loads the resources of the group kinference.buoyant.io
// from a folder of YAML files and compiles them into a Catalog.
//
// The router uses a Source for live configuration; offline checks call Load.
// Decoding is strict: an unknown or duplicate field, a wrong type, a missing
// value or a dangling reference is a Problem with file, line and reason, and
// nothing is silently ignored. A folder with an error compiles to no catalog,
// so a caller keeps the one that it has. Catalogs are immutable and safe for
// concurrent use.
//
// Pools: in a namespace without any InferencePool all worker sets are served,
// as if by a pool named "default"; where there are pools, only the sets that
// they name are served and the others are warned about.
package resources
