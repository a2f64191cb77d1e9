package tokens

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// Vocabulary and merges are nearly all of a tokenizer.json, up to 27 MB. They are read by hand from JSON that encoding/json has found
// valid, into one array of bytes each: a map of strings and a list of pairs of strings take four times as long and ten as much memory.

// vocabulary is the object of tokens and their ids, as the bytes that the tokens stand for.
type vocabulary struct {
	names  []byte // of all tokens, one after the other
	tokens []vocabularyToken
}

type vocabularyToken struct {
	end   uint32 // in names
	id    uint32
	plain bool // not written in byte-level characters: names has its text. Added tokens may be in a vocabulary so.
}

// UnmarshalJSON reads an object of integers.
func (v *vocabulary) UnmarshalJSON(data []byte) error {
	if len(data) == 0 || data[0] != '{' {
		return fmt.Errorf("vocab is not an object")
	}
	for {
		name, rest, err := nextString(data)
		if err != nil {
			return err
		}
		if rest == nil {
			return nil
		}
		rest = bytes.TrimLeft(rest, ": \t\r\n")
		n := 0
		for n < len(rest) && '0' <= rest[n] && rest[n] <= '9' {
			n++
		}
		id, err := strconv.ParseUint(string(rest[:n]), 10, 32)
		if err != nil || id == 1<<32-1 || rest[n] == '.' || rest[n]|0x20 == 'e' {
			return fmt.Errorf("id of token %q is not a number of 32 bits", name)
		}
		raw, ok := appendByteLevel(v.names, name)
		if !ok {
			raw = append(v.names, name...)
		}
		v.names = raw
		v.tokens = append(v.tokens, vocabularyToken{uint32(len(raw)), uint32(id), !ok})
		data = rest[n:]
	}
}

// mergeList is the list of merge rules in order, as the bytes of both tokens of each.
type mergeList struct {
	names []byte
	pairs []mergePair
}

// mergePair holds the ends of the two tokens in names; the first starts where the pair before ends.
type mergePair struct{ middle, end uint32 }

// UnmarshalJSON reads a list of rules, each either "a b" or ["a","b"].
func (m *mergeList) UnmarshalJSON(data []byte) error {
	if len(data) == 0 || data[0] != '[' {
		return fmt.Errorf("merges is not a list")
	}
	data = data[1:]
	for {
		data = bytes.TrimLeft(data, ", \t\r\n")
		if len(data) == 0 || data[0] == ']' {
			return nil
		}
		isList := data[0] == '['
		left, rest, err := nextString(data)
		if err != nil {
			return err
		}
		var right []byte
		ok := rest != nil && (isList || data[0] == '"')
		if ok && isList {
			if right, rest, err = nextString(rest); err != nil {
				return err
			}
			rest = bytes.TrimLeft(rest, " \t\r\n")
			ok = len(rest) > 0 && rest[0] == ']'
			if ok {
				rest = rest[1:]
			}
		} else if ok {
			left, right, ok = bytes.Cut(left, []byte(" "))
		}
		if ok {
			m.names, ok = appendByteLevel(m.names, left)
		}
		middle := len(m.names)
		if ok {
			m.names, ok = appendByteLevel(m.names, right) // a second space is no byte-level character
		}
		if !ok {
			return fmt.Errorf("merge %d is not two tokens", len(m.pairs))
		}
		m.pairs = append(m.pairs, mergePair{uint32(middle), uint32(len(m.names))})
		data = rest
	}
}

// nextString returns the value of the first string literal in valid JSON and what follows it; nil and nil if there is none.
func nextString(data []byte) (value, rest []byte, err error) {
	start := bytes.IndexByte(data, '"')
	if start < 0 {
		return nil, nil, nil
	}
	escaped := false
	end := start + 1
	for data[end] != '"' { // valid: there is one
		if data[end] == '\\' {
			escaped = true
			end++
		}
		end++
	}
	if !escaped {
		return data[start+1 : end], data[end+1:], nil
	}
	var s string
	if err := json.Unmarshal(data[start:end+1], &s); err != nil {
		return nil, nil, err
	}
	return []byte(s), data[end+1:], nil
}

// byteOf is the inverse of GPT-2's mapping of bytes to printable characters, in which vocabularies are written: printable
// Latin-1 stands for itself, the other bytes for U+0100 and up in order. -1: no byte.
var byteOf = func() (m [0x144]int16) {
	for i := range m {
		m[i] = -1
	}
	next := 0x100
	for b := range 256 {
		r := b
		if !('!' <= r && r <= '~' || 0xA1 <= r && r <= 0xAC || 0xAE <= r && r <= 0xFF) {
			r = next
			next++
		}
		m[r] = int16(b)
	}
	return m
}()

// appendByteLevel appends the bytes that a vocabulary entry stands for; false, with dst as it was, if the entry is not written in
// byte-level characters.
func appendByteLevel(dst, name []byte) ([]byte, bool) {
	n := len(dst)
	for i := 0; i < len(name); {
		r, size := rune(name[i]), 1
		if r >= utf8.RuneSelf {
			r, size = utf8.DecodeRune(name[i:])
		}
		if int(r) >= len(byteOf) || byteOf[r] < 0 {
			return dst[:n], false
		}
		dst = append(dst, byte(byteOf[r]))
		i += size
	}
	return dst, true
}

// fromByteLevel is appendByteLevel for one string.
func fromByteLevel(s string) (string, bool) {
	b, ok := appendByteLevel(nil, []byte(s))
	return string(b), ok
}
