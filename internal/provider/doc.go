// Package provider is how requests leave the cluster: from a chat body, which
// is what the gateway has of every request, to what a third-party provider
// takes, and from its answer back to chat completions.
//
// Ingress calls it for each attempt at a provider. [Target.Prepare] makes the
// HTTP request, [Request.Whole] and [Request.Stream] turn its answer into the
// form of OpenAI's API, and [Request.Refused] an error answer into one of ours.
// What only engines in the cluster know, and whatever names a tenant, is left
// out; of the provider's error texts nothing that could tell about its account
// with us is passed on. Usage is always as OpenAI counts it: input includes
// what was read from a cache, whatever the provider's own way is.
//
// Everything here is pure but for the reading of the stream that it is given: no
// clock, no network, nothing shared. A Target may be used by many goroutines,
// the reader of a stream by one.
package provider
