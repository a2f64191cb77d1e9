// Package schedule picks the worker that will answer a request soonest.
//
// It keeps a ledger of the requests in flight, predicts for every candidate
// worker the time to first token (TTFT), ranks the candidates by a Policy,
// books the first one, and learns each worker's speed from what then happens.
// services/router calls it for live traffic; the virtual-time benchmarks call
// the same code with a simulated clock.
//
// The prediction for a prompt of L tokens of which worker w holds h:
//
//	TTFT = max(Wq, Wkv) + T(h, L) * S
//
// where Wq is the prefill work ahead of us in w's queue (our own requests
// from the ledger, other clients' from scraped gauges), Wkv the time until
// enough KV pages are free, T the time to prefill the uncached tokens on an
// engine of w's accelerator class beside its running decodes, and S the
// learned slowness of w. Prompts on their way to w count as cached there.
//
// The package is pure: no I/O, no goroutines, and the time is an argument.
// Everything is deterministic for a seed and a sequence of calls. All methods
// of Scheduler are safe for concurrent use; one mutex guards the state. Bad
// input (unknown requests, reports in odd order, stale samples) is ignored,
// and whatever a caller forgets to finish leaves the ledger after a lease.
package schedule
