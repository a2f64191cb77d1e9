// Package kube reads the resources of Kinference, and the Pods behind them, from
// the Kubernetes API.
//
// The router runs a Source where it has no folder of YAML; both feed the same
// compiler (internal/resources). Two packages below this one stand on it:
// status writes what became of each resource, admission refuses wrong ones.
//
// A Source keeps copies by list and watch, so it goes on with what it knows
// while the API is away and catches up when it is back. One bad resource never
// holds up the others: the last version of it that was good is served, by the
// uid of the resource, until there is a better one. A right that is lacking is
// a Problem that names it; what only adds capacity (worker sets, providers,
// Pods) may be missing, but no catalog is made before all that restricts
// (policies, pools, tenants, gateway backends) has been read once.
//
// A Source is safe for concurrent use. What it hands out is shared and must not
// be changed.
package kube
