// Package anthropic is Anthropic's Messages API on the wire, and its
// translation to and from OpenAI's chat completions.
//
// Ingress puts it in front of the workers' chat route: [Request] reads a body
// and writes it as a chat body, [Stream] turns the chunks of the answer into
// the events of a Messages stream, [AppendMessage] does the same for an answer
// in one piece. The other direction ([AppendMessages], [ChatStream],
// [AppendChat]) lets clients of OpenAI's API use a provider that speaks this
// one. Everything here is pure: no I/O, no clock, no state that is shared, so
// the same conversation always becomes the same bytes and its next turn begins
// with them. A value may be used by one goroutine at a time. Faulty input
// comes back as an error that names the place and never quotes a prompt.
package anthropic
