// Package tag asks the classifier what a prompt is: it takes the prompt apart into parts with roles, calls with a deadline, a
// bound on calls at once and a circuit breaker, and checks the answer before anything believes it.
//
// ingress calls it, beside the making of prompts. All but the parts of a prompt is safe for concurrent use. It does not fail:
// whatever goes wrong makes tags unknown, with a code for the reason, and policies say what holds of unknown tags. Nothing that
// it returns, counts or logs holds text of a prompt.
package tag
