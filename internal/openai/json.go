package openai

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"math/bits"
	"strconv"
	"unicode/utf8"
)

// DefaultDepth is the nesting limit of a body: deep enough for tool schemas,
// which need two levels for each level of the data they describe, and shallow
// enough for every parser behind us.
const DefaultDepth = 64

// maxMembers is how many members and elements a body may have at all levels, without
// elements that are numbers. Each takes hundreds of bytes once a template or a
// translator has it; an agent's request with all its tools has some thousands.
const maxMembers = 1 << 18

// maxNumber is the longest number text. Longer ones have no use and are slow
// to convert (Python refuses integers above 4300 digits).
const maxNumber = 512

// Kind is the type of a JSON value.
type Kind byte

// The kinds of values; Absent is the zero value and says that there is none.
const (
	Absent Kind = iota
	Null
	Bool
	Number
	String
	Array
	Obj
)

// SyntaxError says what is wrong with a body and where.
type SyntaxError struct {
	Offset int    // byte offset of the fault
	Reason string // what was found, without any text of the body
}

// Error implements error.
func (e *SyntaxError) Error() string { return fmt.Sprintf("%s at byte %d", e.Reason, e.Offset) }

// Value is one JSON value where it stands in the body. The zero Value is an
// absent one.
type Value struct {
	Raw    []byte // part of the body; do not modify
	Offset int    // of Raw in the text of the object it was taken from
	Kind   Kind
}

// Text returns the decoded string, false if the value is no string.
func (v Value) Text() (string, bool) {
	if v.Kind != String {
		return "", false
	}
	return unquote(v.Raw[1 : len(v.Raw)-1]), true
}

// Int returns the number as an integer. It takes 16.0 and 1.6e1 too, because
// the engines do; false if the value is no number, has a fraction or does not
// fit.
func (v Value) Int() (int64, bool) {
	if v.Kind != Number {
		return 0, false
	}
	if n, err := strconv.ParseInt(string(v.Raw), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(v.Raw), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

// Bool returns the boolean, false if the value is none.
func (v Value) Bool() (value, ok bool) {
	return v.Kind == Bool && v.Raw[0] == 't', v.Kind == Bool
}

// Given reports whether the value is there and not null.
func (v Value) Given() bool { return v.Kind > Null }

// member locates one member of an object by offsets into its text.
type member struct {
	name, nameEnd int // between the quotes
	start, end    int // of the value
	kind          Kind
	escaped       bool // the name holds escapes
}

// Object is the text of a JSON object with its members located. The zero
// Object is empty and ready for Parse; Parse may be called again to reuse the
// memory. It keeps the text it was given.
type Object struct {
	raw     []byte
	members []member
	keys    []member // names of the objects around the cursor, innermost last
}

// Parse checks all of text in one pass and locates the members of the object
// that it must be: valid UTF-8 without lone surrogate escapes, no key twice in
// one object at any level, at most depth levels (DefaultDepth if 0), numbers
// that a float64 can hold, nothing after the object. Everything it accepts,
// encoding/json accepts. The error is a *SyntaxError.
func (o *Object) Parse(text []byte, depth int) error { return o.parse(text, depth, math.MaxInt) }

// ParseBody is Parse for the body of a request, which has at most 262,144 members and
// elements. The error is what to answer.
func (o *Object) ParseBody(body []byte, depth int) *Error {
	if err := o.parse(body, depth, maxMembers); err != nil {
		return Invalid("", CodeInvalidJSON, "The request body is not valid JSON: "+err.Error()+".")
	}
	return nil
}

func (o *Object) parse(text []byte, depth, most int) error {
	if depth <= 0 {
		depth = DefaultDepth
	}
	if o.members == nil { // most bodies have no more members than this
		o.members, o.keys = make([]member, 0, 16), make([]member, 0, 16)
	}
	o.raw, o.members, o.keys = text, o.members[:0], o.keys[:0]
	s := scanner{text: text, depth: depth, most: most, keys: o.keys, top: &o.members}
	i := s.space(0)
	if i < len(text) && text[i] != '{' {
		s.fail(i, "expected an object")
	} else {
		i = s.value(i, 0)
	}
	o.keys = s.keys
	if s.err == nil {
		if i = s.space(i); i != len(text) {
			s.fail(i, "unexpected data after the object")
		}
	}
	if s.err != nil {
		o.members = o.members[:0]
		return s.err
	}
	return nil
}

// Raw returns the text given to Parse.
func (o *Object) Raw() []byte { return o.raw }

// Len is the number of members.
func (o *Object) Len() int { return len(o.members) }

// Name returns the decoded name of member i.
func (o *Object) Name(i int) string {
	m := &o.members[i]
	if m.escaped {
		return unquote(o.raw[m.name:m.nameEnd])
	}
	return string(o.raw[m.name:m.nameEnd])
}

// At returns the value of member i.
func (o *Object) At(i int) Value {
	m := &o.members[i]
	return Value{Raw: o.raw[m.start:m.end:m.end], Offset: m.start, Kind: m.kind}
}

// Get returns the value of the member with exactly this name.
func (o *Object) Get(name string) Value {
	if i := o.find(name); i >= 0 {
		return o.At(i)
	}
	return Value{}
}

func (o *Object) find(name string) int {
	for i := range o.members {
		m := &o.members[i]
		if m.escaped {
			if unquote(o.raw[m.name:m.nameEnd]) == name {
				return i
			}
		} else if string(o.raw[m.name:m.nameEnd]) == name {
			return i
		}
	}
	return -1
}

// Elements are the elements of an array that was part of a parsed text; none
// if the value is something else.
func (v Value) Elements() iter.Seq[Value] {
	return func(yield func(Value) bool) {
		if v.Kind != Array {
			return
		}
		s := scanner{text: v.Raw, depth: math.MaxInt, most: math.MaxInt, trusted: true}
		for i := s.space(1); i < len(v.Raw) && v.Raw[i] != ']'; i = s.space(i) {
			start := i
			kind := kindOf(v.Raw[i])
			i = s.value(i, 0)
			if s.err != nil || !yield(Value{Raw: v.Raw[start:i:i], Offset: v.Offset + start, Kind: kind}) {
				return
			}
			if i = s.space(i); i < len(v.Raw) && v.Raw[i] == ',' {
				i++
			}
		}
	}
}

// scanner is one pass over a text. After the first error it stands still.
type scanner struct {
	text  []byte
	depth int
	most  int // members and elements that are left
	keys  []member
	top   *[]member // members of the outermost object
	// The text was scanned before: keys need no second look.
	trusted bool
	err     *SyntaxError
}

func (s *scanner) fail(at int, reason string) int {
	if s.err == nil {
		if at >= len(s.text) {
			reason = "unexpected end of JSON"
		}
		s.err = &SyntaxError{Offset: at, Reason: reason}
	}
	return len(s.text)
}

func (s *scanner) space(i int) int {
	for i < len(s.text) {
		switch s.text[i] {
		case ' ', '\t', '\n', '\r':
			i++
		default:
			return i
		}
	}
	return i
}

func kindOf(c byte) Kind {
	switch {
	case c == '"':
		return String
	case c == '{':
		return Obj
	case c == '[':
		return Array
	case c == 't' || c == 'f':
		return Bool
	case c == 'n':
		return Null
	}
	return Number
}

// value scans the value at i, which lies under level objects and arrays, and
// returns the offset after it.
func (s *scanner) value(i, level int) int {
	if i >= len(s.text) {
		return s.fail(i, "")
	}
	switch c := s.text[i]; {
	case c == '"':
		end, _ := s.str(i)
		return end
	case c == '{' || c == '[':
		if level >= s.depth {
			return s.fail(i, "nested too deeply")
		}
		if c == '{' {
			return s.object(i, level+1)
		}
		return s.array(i, level+1)
	case c == '-' || '0' <= c && c <= '9':
		return s.number(i)
	case c == 't':
		return s.word(i, "true")
	case c == 'f':
		return s.word(i, "false")
	case c == 'n':
		return s.word(i, "null")
	}
	return s.fail(i, "expected a value")
}

func (s *scanner) word(i int, w string) int {
	if len(s.text)-i < len(w) || string(s.text[i:i+len(w)]) != w {
		return s.fail(i, "expected a value")
	}
	return i + len(w)
}

func (s *scanner) array(i, level int) int {
	i = s.space(i + 1)
	if i < len(s.text) && s.text[i] == ']' {
		return i + 1
	}
	for s.err == nil {
		if i < len(s.text) && kindOf(s.text[i]) != Number {
			s.count(i)
		}
		i = s.space(s.value(i, level))
		switch {
		case i >= len(s.text):
			return s.fail(i, "")
		case s.text[i] == ',':
			i = s.space(i + 1)
		case s.text[i] == ']':
			return i + 1
		default:
			return s.fail(i, "expected , or ]")
		}
	}
	return len(s.text)
}

func (s *scanner) object(i, level int) int {
	base := len(s.keys)
	var seen map[string]struct{} // takes over when comparing one by one gets slow
	i = s.space(i + 1)
	if i < len(s.text) && s.text[i] == '}' {
		return i + 1
	}
	for s.err == nil {
		if i < len(s.text) && s.text[i] != '"' {
			return s.fail(i, "expected a key")
		}
		if i >= len(s.text) {
			return s.fail(i, "")
		}
		end, escaped := s.str(i)
		if s.err != nil {
			break
		}
		key := member{name: i + 1, nameEnd: end - 1, escaped: escaped}
		if !s.trusted && s.repeated(base, key, &seen) {
			return s.fail(i, "repeated key")
		}
		i = s.space(end)
		if i >= len(s.text) || s.text[i] != ':' {
			return s.fail(i, "expected :")
		}
		s.count(i)
		key.start = s.space(i + 1)
		if key.start < len(s.text) {
			key.kind = kindOf(s.text[key.start])
		}
		if !s.trusted {
			s.keys = append(s.keys, key)
		}
		key.end = s.value(key.start, level)
		if level == 1 && s.top != nil && s.err == nil {
			*s.top = append(*s.top, key)
		}
		i = s.space(key.end)
		switch {
		case i >= len(s.text):
			return s.fail(i, "")
		case s.text[i] == ',':
			i = s.space(i + 1)
		case s.text[i] == '}':
			s.keys = s.keys[:base]
			return i + 1
		default:
			return s.fail(i, "expected , or }")
		}
	}
	return len(s.text)
}

// count counts a member or an element.
func (s *scanner) count(i int) {
	if s.most--; s.most < 0 {
		s.fail(i, "too many members and elements")
	}
}

// repeated reports whether key stands already among the keys from base on.
func (s *scanner) repeated(base int, key member, seen *map[string]struct{}) bool {
	const few = 16
	before := s.keys[base:]
	if len(before) < few {
		for _, k := range before {
			if k.escaped || key.escaped {
				if s.name(k) == s.name(key) {
					return true
				}
			} else if k.nameEnd-k.name == key.nameEnd-key.name && string(s.text[k.name:k.nameEnd]) == string(s.text[key.name:key.nameEnd]) {
				return true
			}
		}
		return false
	}
	if *seen == nil {
		*seen = make(map[string]struct{}, 2*few)
		for _, k := range before {
			(*seen)[s.name(k)] = struct{}{}
		}
	}
	name := s.name(key)
	if _, ok := (*seen)[name]; ok {
		return true
	}
	(*seen)[name] = struct{}{}
	return false
}

func (s *scanner) name(k member) string {
	if k.escaped {
		return unquote(s.text[k.name:k.nameEnd])
	}
	return string(s.text[k.name:k.nameEnd])
}

func (s *scanner) number(i int) int {
	start, exponent := i, false
	if s.text[i] == '-' {
		i++
	}
	switch {
	case i < len(s.text) && s.text[i] == '0':
		i++
	case i < len(s.text) && '1' <= s.text[i] && s.text[i] <= '9':
		i = s.digits(i)
	default:
		return s.fail(i, "expected a digit")
	}
	if i < len(s.text) && s.text[i] == '.' {
		if after := s.digits(i + 1); after > i+1 {
			i = after
		} else {
			return s.fail(after, "expected a digit")
		}
	}
	if i < len(s.text) && s.text[i]|0x20 == 'e' {
		exponent = true
		if i++; i < len(s.text) && (s.text[i] == '+' || s.text[i] == '-') {
			i++
		}
		if after := s.digits(i); after > i {
			i = after
		} else {
			return s.fail(after, "expected a digit")
		}
	}
	if i-start > maxNumber {
		return s.fail(start, "number too long")
	}
	if exponent || i-start > 300 { // only these can leave the range of a float64
		if _, err := strconv.ParseFloat(string(s.text[start:i]), 64); err != nil {
			return s.fail(start, "number out of range")
		}
	}
	return i
}

func (s *scanner) digits(i int) int {
	for i < len(s.text) && '0' <= s.text[i] && s.text[i] <= '9' {
		i++
	}
	return i
}

// str scans the string whose opening quote is at i.
func (s *scanner) str(i int) (end int, escaped bool) {
	text, ascii := s.text, true
	start := i + 1
	for i = start; ; {
		i = plain(text, i)
		if i >= len(text) {
			return s.fail(i, ""), escaped
		}
		switch c := text[i]; {
		case c == '"':
			if !ascii && !utf8.Valid(text[start:i]) {
				return s.fail(start, "invalid UTF-8 in a string"), escaped
			}
			return i + 1, escaped
		case c == '\\':
			escaped = true
			if i = s.escape(i); s.err != nil {
				return i, escaped
			}
		case c < 0x20:
			return s.fail(i, "control character in a string"), escaped
		default:
			ascii = false
			for i < len(text) && text[i] >= utf8.RuneSelf {
				i++
			}
		}
	}
}

// plain skips bytes that need no look: ASCII without quote, backslash and
// control characters. Prompts consist of them, so it takes eight at a time.
func plain(text []byte, i int) int {
	const (
		ones = 0x0101010101010101
		tops = 0x8080808080808080
	)
	for ; i+8 <= len(text); i += 8 {
		w := binary.LittleEndian.Uint64(text[i:])
		quote := w ^ ones*'"'
		slash := w ^ ones*'\\'
		// The lowest flagged byte is right; a borrow may flag only bytes above it.
		if hit := (w | (w - ones*0x20) | (quote - ones) | (slash - ones)) & tops; hit != 0 {
			return i + bits.TrailingZeros64(hit)/8
		}
	}
	for ; i < len(text); i++ {
		if c := text[i]; c < 0x20 || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			break
		}
	}
	return i
}

// escape scans the escape sequence at i. A surrogate must come with its other
// half: the half alone is no character, and parsers disagree about it.
func (s *scanner) escape(i int) int {
	if i+1 >= len(s.text) {
		return s.fail(i+1, "")
	}
	switch s.text[i+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 2
	case 'u':
		r := hex4(s.text, i+2)
		switch {
		case r < 0:
			return s.fail(i, "bad \\u escape")
		case 0xDC00 <= r && r < 0xE000:
			return s.fail(i, "lone surrogate escape")
		case 0xD800 <= r && r < 0xDC00:
			low := rune(-1)
			if i+8 <= len(s.text) && s.text[i+6] == '\\' && s.text[i+7] == 'u' {
				low = hex4(s.text, i+8)
			}
			if low < 0xDC00 || low >= 0xE000 {
				return s.fail(i, "lone surrogate escape")
			}
			return i + 12
		}
		return i + 6
	}
	return s.fail(i, "bad escape")
}

// hex4 reads four hexadecimal digits at i, -1 if they are not there.
func hex4(text []byte, i int) rune {
	if i+4 > len(text) {
		return -1
	}
	var r rune
	for _, c := range text[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | rune(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		default:
			return -1
		}
	}
	return r
}

// unquote decodes the inside of a string that the scanner accepted.
func unquote(in []byte) string {
	i := 0
	for i < len(in) && in[i] != '\\' {
		i++
	}
	if i == len(in) {
		return string(in)
	}
	out := make([]byte, i, len(in))
	copy(out, in)
	for i < len(in) {
		c := in[i]
		if c != '\\' {
			out = append(out, c)
			i++
			continue
		}
		switch c = in[i+1]; c {
		case 'u':
			r := hex4(in, i+2)
			i += 6
			if 0xD800 <= r && r < 0xDC00 {
				r = (r-0xD800)<<10 | (hex4(in, i+2) - 0xDC00) + 0x10000
				i += 6
			}
			out = utf8.AppendRune(out, r)
			continue
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		}
		out = append(out, c)
		i += 2
	}
	return string(out)
}
