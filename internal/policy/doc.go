// Package policy decides by declared rules which endpoints may serve a request.
//
// internal/resources compiles each InferencePolicy with Compile; the router
// gathers those of a pool in a Set and calls Evaluate for each request, and
// kinfctl calls the same code for explain, validate and replay. Evaluate is a
// pure function of the request and of what the caller knows of the fleet: no
// I/O, no clock, no randomness but the request's seed. Compiled values do not
// change and are safe for concurrent use. Faults are found when a policy is
// compiled; the only thing that can go wrong later is a CEL expression on a
// value that is not there, which never lets a request pass a restriction.
package policy
