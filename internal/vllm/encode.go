package vllm

// AppendBatch appends b to dst as an engine of version v would write it, and
// returns the extended slice. Fields that v does not know are left out. Events
// of no known kind are left out too.
func AppendBatch(dst []byte, b *Batch, v Version) []byte {
	n := 0
	for i := range b.Events {
		if b.Events[i].Kind.known() {
			n++
		}
	}
	dst = appendArray(dst, 3)
	dst = appendFloat(dst, b.TS)
	dst = appendArray(dst, n)
	for i := range b.Events {
		switch e := &b.Events[i]; {
		case !e.Kind.known():
		case v.AtLeast(V0_24):
			dst = appendEventMap(dst, e, v)
		default:
			dst = appendEventArray(dst, e, v)
		}
	}
	if b.Rank < 0 {
		return appendNil(dst)
	}
	return appendInt(dst, int64(b.Rank))
}

func (k Kind) known() bool { return k >= BlockStored && k <= AllBlocksCleared }

// arrayFields is the number of fields after the tag, by version; msgspec writes
// all of them, nil or not.
func arrayFields(k Kind, v Version) int {
	stored, removed := 5, 1
	if v.AtLeast(V0_11) {
		stored, removed = 6, 2
	}
	if v.AtLeast(V0_14) {
		stored = 7
	}
	if v.AtLeast(V0_19) {
		stored = 8
	}
	if v.AtLeast(V0_20) {
		stored, removed = 9, 3
	}
	if v.AtLeast(V0_23) {
		stored = 11
	}
	switch k {
	case BlockStored:
		return stored
	case BlockRemoved:
		return removed
	}
	return 0
}

func appendEventArray(dst []byte, e *Event, v Version) []byte {
	layout := storedLayout
	if e.Kind == BlockRemoved {
		layout = removedLayout
	}
	n := arrayFields(e.Kind, v)
	dst = appendArray(dst, 1+n)
	dst = appendText(dst, e.Kind.String())
	for _, f := range layout[:n] {
		dst = appendField(dst, e, f)
	}
	return dst
}

// mapFields lists the fields of the map form in order. Those marked optional are
// left out when absent, the others are written as nil.
var storedMap, removedMap = []mapField{
	{"block_hashes", fieldHashes, false},
	{"parent_block_hash", fieldParent, false},
	{"token_ids", fieldTokens, false},
	{"block_size", fieldBlockSize, false},
	{"lora_id", fieldLoRAID, false},
	{"medium", fieldMedium, false},
	{"lora_name", fieldLoRAName, false},
	{"extra_keys", fieldExtraKeys, true},
	{"group_idx", fieldGroup, true},
	{"kv_cache_spec_kind", fieldSpecKind, true},
	{"kv_cache_spec_sliding_window", fieldWindow, true},
	{"locality", fieldLocality, true},
}, []mapField{
	{"block_hashes", fieldHashes, false},
	{"medium", fieldMedium, false},
	{"group_idx", fieldGroup, true},
	{"locality", fieldLocality, true},
	{"remaining_copy_counts", fieldCopies, true},
}

type mapField struct {
	name     string
	field    field
	optional bool
}

func appendEventMap(dst []byte, e *Event, v Version) []byte {
	var fields []mapField
	switch e.Kind {
	case BlockStored:
		fields = storedMap
	case BlockRemoved:
		fields = removedMap
	}
	omit := func(f mapField) bool {
		return f.optional && (absent(e, f.field) || f.field == fieldLocality && !v.AtLeast(V0_26))
	}
	n := 1
	for _, f := range fields {
		if !omit(f) {
			n++
		}
	}
	dst = appendMap(dst, n)
	dst = appendText(dst, "type")
	dst = appendText(dst, e.Kind.String())
	for _, f := range fields {
		if !omit(f) {
			dst = appendText(dst, f.name)
			dst = appendField(dst, e, f.field)
		}
	}
	return dst
}

func absent(e *Event, f field) bool {
	switch f {
	case fieldParent:
		return !e.HasParent
	case fieldLoRAID:
		return e.LoRAID < 0
	case fieldMedium:
		return e.Medium == ""
	case fieldLoRAName:
		return e.LoRAName == ""
	case fieldExtraKeys:
		return len(e.ExtraKeys) == 0
	case fieldGroup:
		return e.Group < 0
	case fieldSpecKind:
		return e.SpecKind == ""
	case fieldWindow:
		return e.SlidingWindow <= 0
	case fieldLocality:
		return e.Locality == ""
	case fieldCopies:
		return len(e.RemainingCopies) == 0
	}
	return false
}

func appendField(dst []byte, e *Event, f field) []byte {
	if absent(e, f) {
		return appendNil(dst)
	}
	switch f {
	case fieldHashes:
		dst = appendArray(dst, len(e.Hashes))
		for _, h := range e.Hashes {
			dst = appendUint(dst, h)
		}
	case fieldParent:
		dst = appendUint(dst, e.Parent)
	case fieldTokens:
		dst = appendArray(dst, len(e.Tokens))
		for _, t := range e.Tokens {
			dst = appendUint(dst, uint64(t))
		}
	case fieldBlockSize:
		dst = appendInt(dst, int64(e.BlockSize))
	case fieldLoRAID:
		dst = appendInt(dst, e.LoRAID)
	case fieldMedium:
		dst = appendText(dst, e.Medium)
	case fieldLoRAName:
		dst = appendText(dst, e.LoRAName)
	case fieldExtraKeys:
		dst = appendArray(dst, len(e.ExtraKeys))
		for _, keys := range e.ExtraKeys {
			dst = appendExtraKeys(dst, keys)
		}
	case fieldGroup:
		dst = appendInt(dst, int64(e.Group))
	case fieldSpecKind:
		dst = appendText(dst, e.SpecKind)
	case fieldWindow:
		dst = appendInt(dst, int64(e.SlidingWindow))
	case fieldLocality:
		dst = appendText(dst, e.Locality)
	case fieldCopies:
		dst = appendArray(dst, len(e.RemainingCopies))
		for _, n := range e.RemainingCopies {
			dst = appendInt(dst, int64(n))
		}
	}
	return dst
}

func appendExtraKeys(dst []byte, keys []ExtraKey) []byte {
	if len(keys) == 0 {
		return appendNil(dst)
	}
	dst = appendArray(dst, len(keys))
	for _, k := range keys {
		if k.HasOffset {
			dst = appendArray(dst, 2)
		}
		if k.Bytes != nil {
			dst = appendBin(dst, k.Bytes)
		} else {
			dst = appendText(dst, k.Text)
		}
		if k.HasOffset {
			dst = appendInt(dst, k.Offset)
		}
	}
	return dst
}
