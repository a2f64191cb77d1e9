package kvindex

import (
	"strconv"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// root is the hash that the first block of a sequence follows.
func root(e *vllm.Event) kvhash.Hash {
	lora := e.LoRAName
	if lora == "" && e.LoRAID >= 0 {
		// Engines before 2025-12 give only the adapter's number.
		lora = strconv.FormatInt(e.LoRAID, 10)
	}
	salt := ""
	if len(e.ExtraKeys) > 0 {
		if i := saltIndex(e, e.ExtraKeys[0]); i >= 0 {
			salt = e.ExtraKeys[0][i].Text
		}
	}
	return kvhash.Root(lora, salt)
}

// saltIndex finds the salt among the extra keys of a sequence's first block;
// -1 for none. The engine writes the adapter's name, then images, then the
// salt, then digests; names and salt are bare strings, so only their order
// tells an adapter from a salt of the same name.
func saltIndex(e *vllm.Event, keys []vllm.ExtraKey) int {
	for i := len(keys) - 1; i >= 0; i-- {
		if bare(keys[i]) {
			if i == loraIndex(e, keys) {
				return -1
			}
			return i
		}
	}
	return -1
}

// loraIndex finds the adapter's name among the extra keys of a block; -1 for none.
func loraIndex(e *vllm.Event, keys []vllm.ExtraKey) int {
	if len(keys) > 0 && e.LoRAName != "" && bare(keys[0]) && keys[0].Text == e.LoRAName {
		return 0
	}
	return -1
}

func bare(k vllm.ExtraKey) bool { return !k.HasOffset && k.Bytes == nil }

// next is the own hash of block i of a stored event, which follows parent.
func next(parent kvhash.Hash, e *vllm.Event, i int) kvhash.Hash {
	if i < len(e.ExtraKeys) && len(e.ExtraKeys[i]) > 0 {
		parent = extra(parent, e, i)
	}
	return kvhash.Next(parent, e.Tokens[i*e.BlockSize:(i+1)*e.BlockSize])
}

// extra mixes in what besides tokens is in the block. Adapter and salt are in
// the root already.
func extra(h kvhash.Hash, e *vllm.Event, i int) kvhash.Hash {
	keys := e.ExtraKeys[i]
	lora, salt := loraIndex(e, keys), -1
	if i == 0 && isFirst(e) {
		salt = saltIndex(e, keys)
	}
	for j, k := range keys {
		switch {
		case j == lora || j == salt:
		case k.HasOffset:
			h = kvhash.Extra(h, k.Text+"\x00"+strconv.FormatInt(k.Offset, 10))
		case k.Bytes != nil:
			h = kvhash.Extra(h, string(k.Bytes))
		default:
			h = kvhash.Extra(h, k.Text)
		}
	}
	return h
}

// isFirst tells whether the event starts a sequence.
func isFirst(e *vllm.Event) bool { return !e.HasParent }
