package chat

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// tojson is the filter as transformers defines it: Python's json.dumps without ASCII escaping. The library's own differs in
// floats, in U+2028, in the order of keys when indented, and costs an encoder per string.
func tojson(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 {
		return jinja.Value{}, fmt.Errorf("tojson: no value")
	}
	option := func(i int, name string) (jinja.Value, bool) {
		if v, ok := kwargs[name]; ok {
			return v, !v.IsNone() && !v.IsUndefined()
		}
		if i < len(args) {
			return args[i], !args[i].IsNone() && !args[i].IsUndefined()
		}
		return jinja.Value{}, false
	}
	e := jsonEncoder{item: ", ", key: ": "}
	if v, ok := option(1, "ensure_ascii"); ok {
		e.ascii = v.IsTruthy()
	}
	if v, ok := option(2, "indent"); ok {
		switch {
		case v.IsInt() && 0 <= v.AsInt() && v.AsInt() <= 16:
			e.indent = strings.Repeat(" ", int(v.AsInt()))
		case v.IsString() && len(v.AsString()) <= 16:
			e.indent = v.AsString()
		default:
			return jinja.Value{}, fmt.Errorf("tojson: indent must be a number of spaces or a short string")
		}
		e.lines, e.item = true, ","
	}
	if v, ok := option(3, "separators"); ok {
		if !v.IsList() || v.AsList().Len() != 2 || !v.AsList().Get(0).IsString() || !v.AsList().Get(1).IsString() {
			return jinja.Value{}, fmt.Errorf("tojson: separators must be two strings")
		}
		e.item, e.key = v.AsList().Get(0).AsString(), v.AsList().Get(1).AsString()
	}
	if v, ok := option(4, "sort_keys"); ok {
		e.sort = v.IsTruthy()
	}
	if err := e.value(args[0], 0); err != nil {
		return jinja.Value{}, err
	}
	return jinja.NewString(string(e.out)), nil
}

type jsonEncoder struct {
	out       []byte
	item, key string
	indent    string
	lines     bool
	ascii     bool
	sort      bool
}

func (e *jsonEncoder) newline(depth int) {
	if e.lines {
		e.out = append(e.out, '\n')
		for range depth {
			e.out = append(e.out, e.indent...)
		}
	}
}

func (e *jsonEncoder) value(v jinja.Value, depth int) error {
	if depth > 2*maxDepth {
		return fmt.Errorf("tojson: nested deeper than %d", 2*maxDepth)
	}
	switch {
	case v.IsNone():
		e.out = append(e.out, "null"...)
	case v.IsBool():
		e.out = strconv.AppendBool(e.out, v.AsBool())
	case v.IsInt():
		e.out = strconv.AppendInt(e.out, v.AsInt(), 10)
	case v.IsFloat():
		e.out = appendFloat(e.out, v.AsFloat())
	case v.IsString():
		e.text(v.AsString())
	case v.IsList():
		items := v.AsList().Items
		e.out = append(e.out, '[')
		for i, item := range items {
			if i > 0 {
				e.out = append(e.out, e.item...)
			}
			e.newline(depth + 1)
			if err := e.value(item, depth+1); err != nil {
				return err
			}
		}
		if len(items) > 0 {
			e.newline(depth)
		}
		e.out = append(e.out, ']')
	case v.IsDict():
		d := v.AsDict()
		keys := d.Keys
		if e.sort {
			keys = slices.Sorted(slices.Values(keys))
		}
		e.out = append(e.out, '{')
		for i, key := range keys {
			if i > 0 {
				e.out = append(e.out, e.item...)
			}
			e.newline(depth + 1)
			e.text(key)
			e.out = append(e.out, e.key...)
			if err := e.value(d.Data[key], depth+1); err != nil {
				return err
			}
		}
		if len(keys) > 0 {
			e.newline(depth)
		}
		e.out = append(e.out, '}')
	default:
		return fmt.Errorf("tojson: value of this type is not JSON serializable")
	}
	return nil
}

func (e *jsonEncoder) text(s string) {
	const hex = "0123456789abcdef"
	e.out = append(e.out, '"')
	plain := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' && (c < utf8.RuneSelf || !e.ascii) {
			i++
			continue
		}
		e.out = append(e.out, s[plain:i]...)
		n := 1
		switch c {
		case '"', '\\':
			e.out = append(e.out, '\\', c)
		case '\b':
			e.out = append(e.out, '\\', 'b')
		case '\f':
			e.out = append(e.out, '\\', 'f')
		case '\n':
			e.out = append(e.out, '\\', 'n')
		case '\r':
			e.out = append(e.out, '\\', 'r')
		case '\t':
			e.out = append(e.out, '\\', 't')
		default:
			var r rune
			r, n = utf8.DecodeRuneInString(s[i:])
			for _, u := range utf16.AppendRune(nil, r) {
				e.out = append(e.out, '\\', 'u', hex[u>>12], hex[u>>8&15], hex[u>>4&15], hex[u&15])
			}
		}
		i += n
		plain = i
	}
	e.out = append(e.out, s[plain:]...)
	e.out = append(e.out, '"')
}

// appendFloat writes f as Python's repr does: the shortest digits that read back, an exponent below 1e-4 and from 1e16.
func appendFloat(dst []byte, f float64) []byte {
	switch {
	case math.IsNaN(f):
		return append(dst, "NaN"...)
	case math.IsInf(f, 1):
		return append(dst, "Infinity"...)
	case math.IsInf(f, -1):
		return append(dst, "-Infinity"...)
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(dst, f, 'e', -1, 64)
	}
	n := len(dst)
	dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
	if !slices.Contains(dst[n:], '.') {
		dst = append(dst, '.', '0')
	}
	return dst
}
