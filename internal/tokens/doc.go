// Package tokens turns text into token ids exactly as the model's own tokenizer does, from the same tokenizer.json that the
// engine loads: byte-level BPE with the pre-tokenizer patterns of Qwen, Llama 3, gpt-oss and DeepSeek.
//
// The ingress calls it for every prompt (ids are hashed into KV-cache block hashes), fleetsim for its simulated workers.
// Anything in a tokenizer.json that this package does not implement is refused by Load with an error that names it: a wrong
// id would silently cost every cache hit behind it.
//
// A Tokenizer and a PrefixCache are safe for concurrent use; a Decoder belongs to one stream. Encoding never fails: bytes
// that are not UTF-8 become U+FFFD, as they do in a JSON decoder before the engine.
package tokens
