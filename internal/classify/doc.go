// Package classify tags prompts: personal data, secrets, injection, complexity, language, code, modality, length and tags of
// one's own. It is pure Go, reads each byte a bounded number of times, and never says "false" of what it has not read.
//
// The classifier service calls it, and whoever wants the answer without a hop (ingress) may too. A prompt comes in as parts
// with roles; each part is normalised with a byte-exact map of offsets (normalise.go), its hidden text is decoded within bounds
// (decode.go), and one list of tokens (token.go) feeds the detectors. What a part yields does not depend on its neighbours, so
// it is cached by a keyed hash (cache.go): the next turn of a conversation costs only what is new. Seams between parts are read
// a second time, joined. merge.go makes tags out of findings and coverage.
//
// A Classifier does not change and is safe for concurrent use; its cache locks for moments only. Classify does not fail: every
// limit, panic, deadline or undecodable byte makes the tags it touches unknown and names the cause. No result, error or panic
// value carries text of the prompt.
package classify
