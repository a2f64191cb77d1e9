package vllm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// Bounds of what Decode accepts. A step of a real engine stays far below: 16k
// tokens and a few thousand events.
const (
	// MaxPayload is the largest batch in bytes.
	MaxPayload = 16 << 20
	// MaxEvents is the largest number of events in a batch.
	MaxEvents = 1 << 16
	// MaxBlocks is the largest number of blocks in one event.
	MaxBlocks = 1 << 20
	// maxKeys bounds the extra keys of one block.
	maxKeys = 1 << 10
	// maxText bounds names, media, salts and identifiers in bytes.
	maxText = 64 << 10
	// maxRank bounds a data-parallel rank.
	maxRank = 1 << 16
	// maxInterned bounds the strings that a Decoder remembers.
	maxInterned = 1 << 10
)

// ErrTooLarge is returned for a batch beyond MaxPayload or MaxEvents.
var ErrTooLarge = errors.New("event batch too large")

// errMalformed is returned for a batch that is no msgpack or no event batch.
var errMalformed = errors.New("malformed event batch")

// Decoder decodes event batches. It keeps memory between calls, so that decoding
// allocates nothing once warm. The zero value is ready. Not safe for concurrent
// use.
type Decoder struct {
	interned map[string]string
}

// Decode decodes one msgpack batch of any vLLM version into b, reusing the
// memory of b; what b held before is overwritten. Events come as arrays or as
// maps, and so does the batch, of two, three or more elements. Unknown fields
// are ignored; events with unknown tags or with malformed known fields are left
// out and counted in b.Skipped. An error means that the batch as a whole cannot
// be read; b then holds no events.
func (d *Decoder) Decode(payload []byte, b *Batch) error {
	b.TS, b.Rank, b.Skipped, b.Events = 0, -1, 0, b.Events[:0]
	if len(payload) > MaxPayload {
		return fmt.Errorf("%w: %d bytes", ErrTooLarge, len(payload))
	}
	r := reader{p: payload}
	err := d.batch(&r, b)
	if err == nil && r.i != len(payload) {
		err = fmt.Errorf("%w: %d bytes after the batch", errMalformed, len(payload)-r.i)
	}
	if err != nil {
		b.Events = b.Events[:0]
	}
	return err
}

func (d *Decoder) batch(r *reader, b *Batch) error {
	n, isMap, ok := r.container()
	if !ok {
		return fmt.Errorf("%w: no array or map at the start", errMalformed)
	}
	seen := false
	for i := range n {
		field := i
		if isMap {
			key, ok := r.text()
			if !ok {
				return fmt.Errorf("%w: key at byte %d", errMalformed, r.i)
			}
			switch string(key) {
			case "ts":
				field = 0
			case "events":
				field = 1
			case "data_parallel_rank":
				field = 2
			default:
				field = 3
			}
		}
		switch field {
		case 0:
			if b.TS, ok = r.number(); !ok {
				return fmt.Errorf("%w: time at byte %d", errMalformed, r.i)
			}
		case 1:
			if seen {
				return fmt.Errorf("%w: two lists of events", errMalformed)
			}
			seen = true
			if err := d.events(r, b); err != nil {
				return err
			}
		case 2:
			if r.nil() {
				break
			}
			rank, ok := r.int()
			if !ok || rank < 0 || rank > maxRank {
				return fmt.Errorf("%w: rank at byte %d", errMalformed, r.i)
			}
			b.Rank = int(rank)
		default:
			if !r.skip() {
				return fmt.Errorf("%w: truncated", errMalformed)
			}
		}
	}
	if !seen {
		return fmt.Errorf("%w: no events", errMalformed)
	}
	return nil
}

func (d *Decoder) events(r *reader, b *Batch) error {
	n, isMap, ok := r.container()
	if !ok || isMap {
		return fmt.Errorf("%w: events at byte %d", errMalformed, r.i)
	}
	if n > MaxEvents {
		return fmt.Errorf("%w: %d events", ErrTooLarge, n)
	}
	for range n {
		start := r.i
		if len(b.Events) < cap(b.Events) {
			b.Events = b.Events[:len(b.Events)+1]
		} else {
			b.Events = append(b.Events, Event{})
		}
		e := &b.Events[len(b.Events)-1]
		e.reset()
		if d.event(r, e) {
			continue
		}
		// Only now, because it reads the bytes twice, find the event's end.
		b.Events = b.Events[:len(b.Events)-1]
		b.Skipped++
		r.i = start
		if !r.skip() {
			return fmt.Errorf("%w: truncated in an event", errMalformed)
		}
	}
	return nil
}

// field numbers the fields of all events. Arrays are read through the two
// layouts below, maps through fieldNames.
type field uint8

const (
	fieldUnknown field = iota
	fieldType
	fieldHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldSpecKind
	fieldWindow
	fieldLocality
	fieldCopies
)

// The order of fields after the tag; vLLM only ever appends.
var (
	storedLayout = []field{
		fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID, fieldMedium, fieldLoRAName,
		fieldExtraKeys, fieldGroup, fieldSpecKind, fieldWindow, fieldLocality,
	}
	removedLayout = []field{fieldHashes, fieldMedium, fieldGroup, fieldLocality, fieldCopies}
)

func fieldByName(name []byte) field {
	switch string(name) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldSpecKind
	case "kv_cache_spec_sliding_window":
		return fieldWindow
	case "locality":
		return fieldLocality
	case "remaining_copy_counts":
		return fieldCopies
	}
	return fieldUnknown
}

func kindByTag(tag []byte) Kind {
	switch string(tag) {
	case "BlockStored":
		return BlockStored
	case "BlockRemoved":
		return BlockRemoved
	case "AllBlocksCleared":
		return AllBlocksCleared
	}
	return 0
}

// event reads one event; false means to skip it.
func (d *Decoder) event(r *reader, e *Event) bool {
	n, isMap, ok := r.container()
	if !ok || n == 0 {
		return false
	}
	var have uint32
	var layout []field
	if !isMap {
		tag, ok := r.text()
		if !ok {
			return false
		}
		switch e.Kind = kindByTag(tag); e.Kind {
		case BlockStored:
			layout = storedLayout
		case BlockRemoved:
			layout = removedLayout
		case 0:
			return false
		}
		n--
	}
	for i := range n {
		f := fieldUnknown
		if isMap {
			key, ok := r.text()
			if !ok {
				return false
			}
			f = fieldByName(key)
		} else if i < len(layout) {
			f = layout[i]
		}
		if !d.field(r, e, f, isMap) {
			return false
		}
		have |= 1 << f
	}
	const stored = 1<<fieldHashes | 1<<fieldTokens | 1<<fieldBlockSize
	switch e.Kind {
	case BlockStored:
		return have&stored == stored
	case BlockRemoved:
		return have&(1<<fieldHashes) != 0
	case AllBlocksCleared:
		return true
	}
	return false
}

// field reads the value of field f into e.
func (d *Decoder) field(r *reader, e *Event, f field, isMap bool) (ok bool) {
	switch f {
	case fieldUnknown:
		return r.skip()
	case fieldHashes:
		return hashes(r, e)
	case fieldTokens:
		return tokens(r, e)
	}
	if r.nil() {
		return f != fieldType && f != fieldBlockSize
	}
	switch f {
	case fieldType:
		tag, ok := r.text()
		e.Kind = kindByTag(tag)
		return ok && e.Kind != 0
	case fieldParent:
		e.Parent, ok = r.hash()
		// llm-d's simulator writes "no parent" as 0 in arrays. A real hash is 0
		// once in 2^64.
		e.HasParent = isMap || e.Parent != 0
		return ok
	case fieldBlockSize:
		e.BlockSize, ok = r.smallInt()
	case fieldLoRAID:
		e.LoRAID, ok = r.int()
	case fieldMedium:
		e.Medium, ok = d.string(r)
	case fieldLoRAName:
		e.LoRAName, ok = d.string(r)
	case fieldExtraKeys:
		return d.extraKeys(r, e)
	case fieldGroup:
		e.Group, ok = r.smallInt()
	case fieldSpecKind:
		e.SpecKind, ok = d.string(r)
	case fieldWindow:
		e.SlidingWindow, ok = r.smallInt()
	case fieldLocality:
		e.Locality, ok = d.string(r)
	case fieldCopies:
		return copies(r, e)
	}
	return ok
}

func hashes(r *reader, e *Event) bool {
	n, ok := r.array()
	if !ok || n > MaxBlocks {
		return false
	}
	e.Hashes = e.Hashes[:0]
	for range n {
		h, ok := r.hash()
		if !ok {
			return false
		}
		e.Hashes = append(e.Hashes, h)
	}
	return true
}

func tokens(r *reader, e *Event) bool {
	n, ok := r.array()
	if !ok {
		return false
	}
	// The count is bounded by the bytes that are left: see reader.container.
	if cap(e.Tokens) < n {
		e.Tokens = make([]uint32, n)
	}
	e.Tokens = e.Tokens[:n]
	p, i := r.p, r.i
	for k := range e.Tokens {
		if i >= len(p) {
			return false
		}
		// The forms that real token ids take; the rest below.
		switch c := p[i]; {
		case c < 0x80:
			e.Tokens[k] = uint32(c)
			i++
			continue
		case c == 0xcd && i+3 <= len(p):
			e.Tokens[k] = uint32(binary.BigEndian.Uint16(p[i+1:]))
			i += 3
			continue
		case c == 0xce && i+5 <= len(p):
			e.Tokens[k] = binary.BigEndian.Uint32(p[i+1:])
			i += 5
			continue
		}
		r.i = i
		v, ok := r.int()
		if !ok || v < 0 || v > math.MaxUint32 {
			return false
		}
		e.Tokens[k] = uint32(v)
		i = r.i
	}
	r.i = i
	return true
}

func copies(r *reader, e *Event) bool {
	n, ok := r.array()
	if !ok || n > MaxBlocks {
		return false
	}
	e.RemainingCopies = e.RemainingCopies[:0]
	for range n {
		v, ok := r.smallInt()
		if !ok {
			return false
		}
		e.RemainingCopies = append(e.RemainingCopies, v)
	}
	return true
}

func (d *Decoder) extraKeys(r *reader, e *Event) bool {
	n, ok := r.array()
	if !ok || n > MaxBlocks {
		return false
	}
	e.ExtraKeys = e.ExtraKeys[:0]
	for range n {
		if len(e.ExtraKeys) < cap(e.ExtraKeys) {
			e.ExtraKeys = e.ExtraKeys[:len(e.ExtraKeys)+1]
		} else {
			e.ExtraKeys = append(e.ExtraKeys, nil)
		}
		keys := &e.ExtraKeys[len(e.ExtraKeys)-1]
		*keys = (*keys)[:0]
		if r.nil() {
			continue
		}
		m, ok := r.array()
		if !ok || m > maxKeys {
			return false
		}
		for range m {
			// A key that cannot be read must not be dropped: without it blocks of
			// different tenants or images would look alike.
			k, ok := d.extraKey(r)
			if !ok {
				return false
			}
			*keys = append(*keys, k)
		}
	}
	return true
}

func (d *Decoder) extraKey(r *reader) (k ExtraKey, ok bool) {
	n, isArray := r.array()
	if isArray && n < 1 {
		return k, false
	}
	if b, isBytes := r.bin(); isBytes {
		k.Bytes = append([]byte{}, b...)
	} else if k.Text, ok = d.string(r); !ok {
		return k, false
	}
	if !isArray {
		return k, true
	}
	if n > 1 {
		if k.Offset, ok = r.int(); !ok {
			return k, false
		}
		k.HasOffset = true
	}
	for range n - 2 {
		if !r.skip() {
			return k, false
		}
	}
	return k, true
}

// string reads text and returns the same string for the same bytes, so that the
// few names that repeat in every event are allocated once.
func (d *Decoder) string(r *reader) (string, bool) {
	b, ok := r.text()
	if !ok || len(b) > maxText {
		return "", false
	}
	if s, ok := d.interned[string(b)]; ok {
		return s, true
	}
	s := string(b)
	if len(s) <= 128 {
		if d.interned == nil {
			d.interned = make(map[string]string)
		}
		if len(d.interned) >= maxInterned {
			clear(d.interned)
		}
		d.interned[s] = s
	}
	return s, true
}
