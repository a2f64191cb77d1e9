package openai_test

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

// FuzzEdit runs the parser and the editor against encoding/json: it takes and
// refuses the same texts, but for what ours refuses by intent, and two changes
// make of the text what they make of the decoded tree. What they do not name
// stays byte for byte and in its order.
func FuzzEdit(f *testing.F) {
	f.Add([]byte(`{"model":"m","messages":[{"role":"user","content":"h\u00e9\ud83d\ude00"}],"seed":18446744073709551615,"a":null}`), "model", `"new"`, "a/b", "true")
	f.Add([]byte(` { "a" : {"b":{"c":1.50}, "d":[1, 2]} , "e":2 } `), "a/b/c", "", "a/d", `{"x":1}`)
	f.Add([]byte(`{"stream_options":{"include_usage":false}}`), "stream_options/include_usage", "true", "stream_options", "")
	f.Add([]byte(`{"a":1,"b":2,"c":3}`), "a", "", "c", "")
	f.Add([]byte(`{"a":{"b":1,"b":2}}`), "a", "1", "b", "2")
	f.Add([]byte(`{"mo\u0064el":"\ud800"}`), "model", "1", "model", "2")
	f.Fuzz(func(t *testing.T, text []byte, path1, value1, path2, value2 string) {
		var o openai.Object
		err := o.Parse(text, 0)
		if want := acceptable(text); (err == nil) != want {
			t.Fatalf("we say %v, the second parser that it is fine: %v", err, want)
		}
		if err != nil {
			return
		}
		var changes []openai.Change
		for _, c := range [][2]string{{path1, value1}, {path2, value2}} {
			change := openai.Change{Path: strings.Split(c[0], "/"), Value: []byte(c[1])}
			if c[1] == "" {
				change.Value = nil
			} else if !acceptable([]byte(`{"x":`+c[1]+`}`)) || strings.TrimSpace(c[1]) != c[1] {
				return
			}
			if len(change.Path) > 4 || !utf8.ValidString(c[0]) {
				return
			}
			changes = append(changes, change)
		}
		want, ok := tree(t, text), true
		for _, c := range changes {
			ok = ok && change(want, c.Path, c.Value, t)
		}
		out, err := o.Apply(nil, changes...)
		if (err == nil) != ok {
			if within(changes[0].Path, changes[1].Path) {
				return // the second replaces what the first could not be done in
			}
			t.Fatalf("%v, the second editor could: %v", err, ok)
		}
		if err != nil {
			return
		}
		if !acceptable(out) {
			t.Fatalf("made %s", out)
		}
		if diff := cmp.Diff(want, tree(t, out)); diff != "" {
			t.Fatal(diff)
		}
		sameRest(t, &o, out, changes)
	})
}

// sameRest checks that members that no change names have their bytes and order.
func sameRest(t *testing.T, before *openai.Object, out []byte, changes []openai.Change) {
	list := func(o *openai.Object) (members []string) {
		for i := range o.Len() {
			if name := o.Name(i); name != changes[0].Path[0] && name != changes[1].Path[0] {
				members = append(members, name+"="+string(o.At(i).Raw))
			}
		}
		return members
	}
	var after openai.Object
	if err := after.Parse(out, 1<<20); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(list(before), list(&after)); diff != "" {
		t.Fatal(diff)
	}
}

// within reports whether a begins with b.
func within(a, b []string) bool { return len(b) <= len(a) && slices.Equal(a[:len(b)], b) }

// tree decodes a text, numbers as they are written.
func tree(t *testing.T, text []byte) map[string]any {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var m map[string]any
	if err := d.Decode(&m); err != nil {
		t.Fatalf("%v in %q", err, text)
	}
	return m
}

// change makes a change in a decoded tree; false if something on the way is no
// object.
func change(m map[string]any, path []string, value []byte, t *testing.T) bool {
	name := path[0]
	if len(path) == 1 {
		if value == nil {
			delete(m, name)
		} else {
			m[name] = tree(t, []byte(`{"x":`+string(value)+`}`))["x"]
		}
		return true
	}
	inner, ok := m[name].(map[string]any)
	if !ok {
		if m[name] != nil {
			return false
		}
		if value == nil {
			return true
		}
		inner = map[string]any{}
		m[name] = inner
	}
	return change(inner, path[1:], value, t)
}

var escapes = regexp.MustCompile(`\\(u[0-9a-fA-F]{4}|.)`)

// acceptable says by means of encoding/json what Parse ought to take: an object
// in UTF-8 within the limits of depth and numbers, no key twice, no half of a
// surrogate pair alone.
func acceptable(text []byte) bool {
	if !json.Valid(text) || !utf8.Valid(text) || bytes.TrimLeft(text, " \t\r\n")[0] != '{' {
		return false
	}
	high := -1 // where the second half must be
	for _, at := range escapes.FindAllIndex(text, -1) {
		r, low := int64(0), false
		if s := text[at[0]:at[1]]; s[1] == 'u' {
			r, _ = strconv.ParseInt(string(s[2:]), 16, 32)
			low = 0xDC00 <= r && r < 0xE000
		}
		if low != (high == at[0]) || high >= 0 && !low {
			return false
		}
		if high = -1; 0xD800 <= r && r < 0xDC00 {
			high = at[1]
		}
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return high < 0 && distinct(d, 0)
}

// distinct reads one value, of level objects and arrays deep.
func distinct(d *json.Decoder, level int) bool {
	token, err := d.Token()
	if err != nil {
		return false
	}
	switch v := token.(type) {
	case json.Number:
		_, err := v.Float64()
		return err == nil && len(v) <= 512
	case json.Delim:
		if level == openai.DefaultDepth {
			return false
		}
		keys := map[string]bool{}
		for d.More() {
			if v == '{' {
				key, err := d.Token()
				name, ok := key.(string)
				if err != nil || !ok || keys[name] {
					return false
				}
				keys[name] = true
			}
			if !distinct(d, level+1) {
				return false
			}
		}
		_, err := d.Token()
		return err == nil
	}
	return true
}
