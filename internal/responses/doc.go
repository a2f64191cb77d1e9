// Package responses is OpenAI's Responses API on the wire, and its translation
// to chat completions.
//
// Ingress puts it in front of the workers' chat route, as it does with the
// Messages API: vLLM has a route of this name, but it ignores the rank that a
// request is sent to, and older ones lack it. [Request] reads a body and writes
// it as a chat body, [Stream] makes the events of the answer, [AppendResponse]
// an answer in one piece. Nothing is stored: what needs a store is refused, and
// every answer says store: false. All of it is pure; a value may be used by one
// goroutine at a time. Faulty input comes back as an error that names the place
// and never quotes a prompt.
package responses
