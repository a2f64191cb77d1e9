// Package chat renders a chat request's messages and tools to the prompt text that vLLM would render, from the model's own
// Jinja chat template, so that its token ids can be known before a worker sees the request.
//
// The ingress calls it for every chat request whose model has a local template, fleetsim for its simulated workers. It applies
// vLLM's own normalisation of messages first. A Template is immutable and safe for concurrent use.
//
// A request that a template or vLLM would refuse gives an *Error, whose text is for the client. ErrMedia and ErrUnsure say that
// only the engine can render the request. Any other error is a fault of the template.
//
// Templates come from operators, not from clients: a template may loop as long as it likes, but what a client sends is bounded
// in depth, and output is bounded in size.
package chat
