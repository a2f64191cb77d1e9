package chat

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// maxDepth bounds nesting of what a client sends, and with it every recursion of a template over it.
const maxDepth = 64

// decode parses JSON into template values. Objects keep the order of their keys, which tojson shows to the model; of equal keys
// the first place and the last value stand, as in Python. encoding/json can do neither. The error is ErrUnsure for a value that
// Python has and the template library has not.
func decode(data json.RawMessage) (jinja.Value, error) {
	if !utf8.Valid(data) {
		return jinja.Value{}, fmt.Errorf("not valid UTF-8")
	}
	return decoder{s: string(data)}.all()
}

// decodePython parses text as Python's json.loads does: with NaN and Infinity, and deeper than we bound what a client sends, which is
// ErrUnsure. s is valid UTF-8.
func decodePython(s string) (jinja.Value, error) { return decoder{s: s, python: true}.all() }

func (d decoder) all() (jinja.Value, error) {
	v, err := d.value(0)
	if err != nil {
		return jinja.Value{}, err
	}
	d.blank()
	if d.i < len(d.s) {
		return jinja.Value{}, d.unexpected()
	}
	return v, nil
}

type decoder struct {
	s      string
	i      int
	python bool
}

func (d *decoder) unexpected() error {
	if d.i >= len(d.s) {
		return fmt.Errorf("unexpected end of JSON")
	}
	return fmt.Errorf("unexpected character in JSON at offset %d", d.i)
}

func (d *decoder) blank() {
	for d.i < len(d.s) {
		switch d.s[d.i] {
		case ' ', '\t', '\r', '\n':
			d.i++
		default:
			return
		}
	}
}

// accept skips blanks and, if it comes next, c.
func (d *decoder) accept(c byte) bool {
	d.blank()
	if d.i < len(d.s) && d.s[d.i] == c {
		d.i++
		return true
	}
	return false
}

func (d *decoder) value(depth int) (jinja.Value, error) {
	if depth > maxDepth {
		if d.python {
			return jinja.Value{}, ErrUnsure
		}
		return jinja.Value{}, fmt.Errorf("JSON is nested deeper than %d", maxDepth)
	}
	d.blank()
	if d.i >= len(d.s) {
		return jinja.Value{}, d.unexpected()
	}
	switch c := d.s[d.i]; {
	case c == '{':
		return d.object(depth)
	case c == '[':
		return d.array(depth)
	case c == '"':
		s, err := d.text()
		return jinja.NewString(s), err
	case c == '-' || '0' <= c && c <= '9':
		return d.number()
	}
	words := words
	if !d.python {
		words = words[:jsonWords]
	}
	for _, word := range words {
		if strings.HasPrefix(d.s[d.i:], word.text) {
			d.i += len(word.text)
			return word.value, nil
		}
	}
	return jinja.Value{}, d.unexpected()
}

// words are JSON's own, then Python's.
var words = []struct {
	text  string
	value jinja.Value
}{
	{"null", jinja.None()}, {"true", jinja.NewBool(true)}, {"false", jinja.NewBool(false)},
	{"NaN", jinja.NewFloat(math.NaN())}, {"Infinity", jinja.NewFloat(math.Inf(1))},
}

const jsonWords = 3

func (d *decoder) object(depth int) (jinja.Value, error) {
	v := jinja.NewDict()
	dict := v.AsDict()
	d.i++
	if d.accept('}') {
		return v, nil
	}
	dict.Keys = make([]string, 0, 2) // as nearly all messages have
	for {
		d.blank()
		if d.i >= len(d.s) || d.s[d.i] != '"' {
			return v, d.unexpected()
		}
		key, err := d.text()
		if err != nil {
			return v, err
		}
		if !d.accept(':') {
			return v, d.unexpected()
		}
		item, err := d.value(depth + 1)
		if err != nil {
			return v, err
		}
		dict.Set(key, item)
		if d.accept('}') {
			return v, nil
		}
		if !d.accept(',') {
			return v, d.unexpected()
		}
	}
}

func (d *decoder) array(depth int) (jinja.Value, error) {
	var items []jinja.Value
	d.i++
	if d.accept(']') {
		return jinja.NewList(nil), nil
	}
	for {
		item, err := d.value(depth + 1)
		if err != nil {
			return jinja.Value{}, err
		}
		items = append(items, item)
		if d.accept(']') {
			return jinja.NewList(items), nil
		}
		if !d.accept(',') {
			return jinja.Value{}, d.unexpected()
		}
	}
}

// number keeps integers and floats apart, as Python does and tojson shows. An integer beyond 64 bits, which Python has too, is
// ErrUnsure.
func (d *decoder) number() (jinja.Value, error) {
	start := d.i
	digits := func() bool {
		from := d.i
		for d.i < len(d.s) && '0' <= d.s[d.i] && d.s[d.i] <= '9' {
			d.i++
		}
		return d.i > from
	}
	if d.s[d.i] == '-' {
		d.i++
		if d.python && strings.HasPrefix(d.s[d.i:], "Infinity") {
			d.i += len("Infinity")
			return jinja.NewFloat(math.Inf(-1)), nil
		}
	}
	if d.i < len(d.s) && d.s[d.i] == '0' {
		d.i++
	} else if !digits() {
		return jinja.Value{}, d.unexpected()
	}
	float := false
	if d.i < len(d.s) && d.s[d.i] == '.' {
		float = true
		d.i++
		if !digits() {
			return jinja.Value{}, d.unexpected()
		}
	}
	if d.i < len(d.s) && d.s[d.i]|0x20 == 'e' {
		float = true
		d.i++
		if d.i < len(d.s) && (d.s[d.i] == '+' || d.s[d.i] == '-') {
			d.i++
		}
		if !digits() {
			return jinja.Value{}, d.unexpected()
		}
	}
	text := d.s[start:d.i]
	if !float {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return jinja.Value{}, ErrUnsure
		}
		return jinja.NewInt(n), nil
	}
	f, _ := strconv.ParseFloat(text, 64) // out of range is infinity, as in Python
	return jinja.NewFloat(f), nil
}

// text parses a string; without escapes it is a piece of the input, not a copy.
func (d *decoder) text() (string, error) {
	start := d.i + 1
	d.i = plainEnd(d.s, start)
	switch {
	case d.i < len(d.s) && d.s[d.i] == '"':
		d.i++
		return d.s[start : d.i-1], nil
	case d.i < len(d.s) && d.s[d.i] == '\\':
		return d.escaped(start)
	}
	return "", d.unexpected()
}

// plainEnd returns the first offset from i on of a quote, a backslash or a control character, or len(s). Eight bytes at a time:
// prompts are long strings of little else.
func plainEnd(s string, i int) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for ; i+8 <= len(s); i += 8 {
		w := uint64(s[i]) | uint64(s[i+1])<<8 | uint64(s[i+2])<<16 | uint64(s[i+3])<<24 |
			uint64(s[i+4])<<32 | uint64(s[i+5])<<40 | uint64(s[i+6])<<48 | uint64(s[i+7])<<56
		quote, slash := w^ones*'"', w^ones*'\\'
		// A byte of w-ones*n has its high bit set, and w's has not, if the byte was below n; a borrow can only add false finds behind it.
		if found := ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*' ')&^w) & highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8
		}
	}
	for i < len(s) && s[i] != '"' && s[i] != '\\' && s[i] >= ' ' {
		i++
	}
	return i
}

// escaped parses on from the first backslash of a string that began at start.
func (d *decoder) escaped(start int) (string, error) {
	var b strings.Builder
	if end := strings.IndexByte(d.s[d.i:], '"'); end >= 0 {
		b.Grow(d.i - start + end)
	}
	b.WriteString(d.s[start:d.i])
	for d.i < len(d.s) {
		c := d.s[d.i]
		switch {
		case c == '"':
			d.i++
			return b.String(), nil
		case c < ' ':
			return "", d.unexpected()
		case c != '\\':
			end := plainEnd(d.s, d.i)
			b.WriteString(d.s[d.i:end])
			d.i = end
			continue
		}
		if d.i+1 >= len(d.s) {
			break
		}
		d.i++
		switch d.s[d.i] {
		case '"', '\\', '/':
			b.WriteByte(d.s[d.i])
		case 'b':
			b.WriteByte('\b')
		case 'f':
			b.WriteByte('\f')
		case 'n':
			b.WriteByte('\n')
		case 'r':
			b.WriteByte('\r')
		case 't':
			b.WriteByte('\t')
		case 'u':
			r, ok := d.hex(d.i + 1)
			if !ok {
				return "", d.unexpected()
			}
			d.i += 4
			if utf16.IsSurrogate(r) {
				second, ok := rune(0), false
				if strings.HasPrefix(d.s[d.i+1:], `\u`) {
					second, ok = d.hex(d.i + 3)
				}
				if r = utf16.DecodeRune(r, second); ok && r != utf8.RuneError {
					d.i += 6
				} else if d.python { // a string with half a character, which has no UTF-8
					return "", ErrUnsure
				}
			}
			b.WriteRune(r) // a lone surrogate is U+FFFD
		default:
			return "", d.unexpected()
		}
		d.i++
	}
	d.i = len(d.s)
	return "", d.unexpected()
}

// hex reads the four hexadecimal digits at i.
func (d *decoder) hex(i int) (rune, bool) {
	if i+4 > len(d.s) {
		return 0, false
	}
	n, err := strconv.ParseUint(d.s[i:i+4], 16, 16)
	return rune(n), err == nil && !strings.ContainsAny(d.s[i:i+4], "+-_")
}
