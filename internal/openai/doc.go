// Package openai is the OpenAI dialect on the wire: request bodies, stream
// events, usage and errors.
//
// Ingress reads requests with it and edits them in place, because bodies carry
// members that no typed struct knows (vLLM's own, a vendor's, tomorrow's), and
// decoding and encoding again would lose them, the precision of numbers and
// the order of keys. Nothing here does I/O beyond the io.Reader given to
// [Reader], nothing is shared, so values may be used by one goroutine at a
// time. Faulty input comes back as an error that names the place, never as a
// panic, and never quotes the text of a prompt.
package openai
