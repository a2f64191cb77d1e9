// Package schedule decides which worker answers a request, and when it is sent
// there.
//
// services/router calls it for live traffic; the virtual-time benchmarks call the
// same code with a simulated clock. It keeps a ledger of the requests in flight,
// predicts for every candidate worker the time to first token (TTFT), and learns
// from what then happens. What it does with the predictions is up to a Policy.
//
// # Prediction
//
// For a prompt of L tokens of which worker w holds h:
//
//	TTFT = max(Wq, Wkv) + T(h, L) * S
//
// where Wq is the prefill work ahead of us in w's queue (our own requests from
// the ledger, those of other routers as they tell, other clients' from scraped
// gauges), Wkv the time until enough KV pages are free, T the time to prefill the
// uncached tokens on an engine of w's accelerator class beside its running
// decodes, and S the learned slowness of w. Prompts on their way to w count as
// cached there.
//
// # K2
//
// The default policy, K2, differs from others in that it waits. Requests Enter a
// line, and each Pass dispatches those whose best worker can begin within a
// moment: what has been sent to an engine can neither be reordered nor go
// elsewhere, and evicts what others in line need. Best is the worker with the
// least
//
//	J = TTFT + P * (held + beta*B) + E
//
// P is the prefill on that worker, held the number of other requests in line that
// it would delay, B that of the decoders that it would stall, and E the time to
// compute again what it would push out of the cache. A prompt that is new settles
// where memory is left, among workers that are about as good, and is not computed
// twice at a time to save a moment. The line goes by class of service, then by tenant,
// the one that got least first, then by age and size, and does not push out what a
// conversation needs that goes on in a moment; the rules of a pass are at
// Scheduler.next. Constants and evidence are in docs/decisions/0011-routing.md. All
// other policies dispatch at once.
//
// # Where to read on
//
//	schedule.go  types, deciding at once (Decide), reports of what happened
//	line.go      the line: Enter, Refresh, Leave, Line
//	pass.go      a pass over it
//	key.go       its order: classes, tenants, age
//	k2.go        constants, ranking; home.go where new prefixes settle
//	policy.go    all policies, ties, reasons; peers*.go those of other products
//	estimate.go  predictions: of a worker (view), of a request there (pair)
//	pages.go     KV pages in use, and when they come free
//	mirror.go    what a worker's cache would evict next
//	blocks.go    chains of block hashes, and what two have in common
//	ledger.go    requests in flight; speed.go, output.go what is learned
//	returns.go   who comes back: the next turns of conversations
//	remote.go    several routers; afar.go who waits at the others
//
// # Rules
//
// The package is pure: no I/O, no goroutines, and the time is an argument.
// Everything is deterministic for a seed and a sequence of calls. All methods of
// Scheduler are safe for concurrent use; one mutex guards the state, and Choose
// is called under it. Inside, times are seconds of model time (clock). Bad input
// (unknown requests, reports in odd order, stale samples, nonsense from other
// routers) is ignored, everything that grows is bounded, and whatever a caller
// forgets to finish leaves the ledger after a lease.
package schedule
