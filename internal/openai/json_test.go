package openai_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
)

func TestObjectParse(t *testing.T) {
	deep := func(n int) string { return `{"a":` + strings.Repeat("[", n-1) + strings.Repeat("]", n-1) + "}" }
	many := func(last string) string {
		var b strings.Builder
		b.WriteByte('{')
		for i := range 40 {
			b.WriteString(`"k` + strings.Repeat("x", i) + `":1,`)
		}
		return b.String() + last + "}"
	}
	tests := []struct{ name, in, want string }{
		{"empty", ``, "unexpected end of JSON at byte 0"},
		{"not an object", `[1]`, "expected an object at byte 0"},
		{"byte order mark", "\ufeff{}", "expected an object at byte 0"},
		{"empty object", " {} \n", ""},
		{"all kinds", `{"a":null,"b":true,"c":false,"d":-0.5e+3,"e":"x","f":[1,[]],"g":{"h":{}}}`, ""},
		{"trailing data", `{} {}`, "unexpected data after the object at byte 3"},
		{"trailing comma", `{"a":1,}`, "expected a key at byte 7"},
		{"trailing comma in a list", `{"a":[1,]}`, "expected a value at byte 8"},
		{"cut", `{"a":"b`, "unexpected end of JSON at byte 7"},
		{"cut after key", `{"a"`, "unexpected end of JSON at byte 4"},
		{"cut in a list", `{"a":[1`, "unexpected end of JSON at byte 7"},
		{"cut escape", `{"a":"\`, "unexpected end of JSON at byte 7"},
		{"single quotes", `{'a':1}`, "expected a key at byte 1"},
		{"NaN", `{"a":NaN}`, "expected a value at byte 5"},
		{"Infinity", `{"a":-Infinity}`, "expected a digit at byte 6"},
		{"leading zero", `{"a":01}`, "expected , or } at byte 6"},
		{"no digits after point", `{"a":1.}`, "expected a digit at byte 7"},
		{"no digits in exponent", `{"a":1e}`, "expected a digit at byte 7"},
		{"too big", `{"a":1e999}`, "number out of range at byte 5"},
		{"too big without exponent", `{"a":` + strings.Repeat("9", 400) + `}`, "number out of range at byte 5"},
		{"too long", `{"a":0.` + strings.Repeat("1", 600) + `}`, "number too long at byte 5"},
		{"big integer", `{"seed":18446744073709551615}`, ""},
		{"invalid UTF-8", "{\"a\":\"long enough \xff text\"}", "invalid UTF-8 in a string at byte 6"},
		{"overlong UTF-8", "{\"a\":\"\xc0\xaf\"}", "invalid UTF-8 in a string at byte 6"},
		{"control character", "{\"a\":\"0123456789\n\"}", "control character in a string at byte 16"},
		{"delete is text", "{\"a\":\"\x7f\"}", ""},
		{"emoji and Chinese", `{"a":"你好 😀 \ud83d\ude00"}`, ""},
		{"lone high surrogate", `{"a":"\ud83d"}`, "lone surrogate escape at byte 6"},
		{"high surrogate twice", `{"a":"\ud83d\ud83d"}`, "lone surrogate escape at byte 6"},
		{"lone low surrogate", `{"a":"\ude00"}`, "lone surrogate escape at byte 6"},
		{"bad escape", `{"a":"\x41"}`, "bad escape at byte 6"},
		{"bad unicode escape", `{"a":"\u00g0"}`, "bad \\u escape at byte 6"},
		{"duplicate", `{"model":"a","model":"b"}`, "repeated key at byte 13"},
		{"duplicate by escape", `{"model":"a","mo\u0064el":"b"}`, "repeated key at byte 13"},
		{"duplicate inside", `{"a":[{"b":{"c":1,"c":2}}]}`, "repeated key at byte 18"},
		{"same key in siblings", `{"a":{"c":1},"b":{"c":2},"c":3}`, ""},
		{"same key in parent and child", `{"a":{"a":{"a":1}}}`, ""},
		{"many keys", many(`"last":1`), ""},
		{"duplicate among many", many(`"kxxx":1`), "repeated key at byte 1021"},
		{"deepest", deep(64), ""},
		{"too deep", deep(65), "nested too deeply at byte 68"},
		{"far too deep", deep(1 << 20), "nested too deeply at byte 68"},
		{"bad word", `{"a":nul}`, "expected a value at byte 5"},
		{"missing colon", `{"a" 1}`, "expected : at byte 5"},
		{"missing comma", `{"a":1 "b":2}`, "expected , or } at byte 7"},
		{"missing comma in a list", `{"a":[1 2]}`, "expected , or ] at byte 8"},
	}
	var o openai.Object // reused, as callers do
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := o.Parse([]byte(tt.in), 0)
			got := ""
			if err != nil {
				got = err.Error()
				var syntax *openai.SyntaxError
				if !errors.As(err, &syntax) || o.Len() != 0 {
					t.Errorf("error %T with %d members, want *SyntaxError with none", err, o.Len())
				}
			} else if !json.Valid([]byte(tt.in)) {
				t.Error("accepted what encoding/json refuses")
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestObjectGet(t *testing.T) {
	var o openai.Object
	body := `{ "s" : "a\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00z", "esc\u0061ped":"x", "n": 16.0, "i":-3, "f":0.5, "t":true, "l":[ 1 , "two",{"x":[]} ], "z":null, "e":[]}`
	if err := o.Parse([]byte(body), 0); err != nil {
		t.Fatal(err)
	}
	if got, ok := o.Get("s").Text(); !ok || got != "a\"\\/\b\f\n\r\té😀z" {
		t.Errorf("s = %q %v", got, ok)
	}
	if got, _ := o.Get("escaped").Text(); got != "x" {
		t.Errorf("escaped = %q", got)
	}
	for name, want := range map[string]int64{"n": 16, "i": -3} {
		if got, ok := o.Get(name).Int(); !ok || got != want {
			t.Errorf("%s = %d %v, want %d", name, got, ok, want)
		}
	}
	if _, ok := o.Get("f").Int(); ok {
		t.Error("a fraction passed as an integer")
	}
	if b, ok := o.Get("t").Bool(); !b || !ok {
		t.Error("t is not true")
	}
	if o.Get("z").Given() || o.Get("absent").Given() || o.Get("z").Kind != openai.Null {
		t.Error("null and absent must not be given")
	}
	var got []string
	for v := range o.Get("l").Elements() {
		if string(body[v.Offset:v.Offset+len(v.Raw)]) != string(v.Raw) {
			t.Errorf("offset of %s is wrong", v.Raw)
		}
		got = append(got, string(v.Raw))
	}
	if diff := cmp.Diff([]string{"1", `"two"`, `{"x":[]}`}, got); diff != "" {
		t.Error(diff)
	}
	for range o.Get("e").Elements() {
		t.Error("element in an empty list")
	}
}

func TestApply(t *testing.T) {
	set := func(value string, path ...string) openai.Change { return openai.Set([]byte(value), path...) }
	usage := set("true", "stream_options", "include_usage")
	tests := []struct {
		name, in string
		changes  []openai.Change
		want     string
	}{
		{"nothing", ` { "a" : 1 } `, nil, ` { "a" : 1 } `},
		{"replace keeps the rest", "{\n \"seed\": 18446744073709551615,\n \"model\": \"a\",\n \"x\":1.10 }", []openai.Change{set(`"b"`, "model")},
			"{\n \"seed\": 18446744073709551615,\n \"model\": \"b\",\n \"x\":1.10 }"},
		{"add", `{"a":1 }`, []openai.Change{set("2", "b")}, `{"a":1,"b":2 }`},
		{"add to empty", `{ }`, []openai.Change{set("2", "b"), set("3", "c")}, `{"b":2,"c":3 }`},
		{"remove first", `{ "a":1, "b":2}`, []openai.Change{openai.Remove("a")}, `{"b":2}`},
		{"remove middle", `{"a":1, "b":2, "c":3}`, []openai.Change{openai.Remove("b")}, `{"a":1, "c":3}`},
		{"remove last", `{"a":1, "b":2 }`, []openai.Change{openai.Remove("b")}, `{"a":1 }`},
		{"remove all", `{ "a":1, "b":2 }`, []openai.Change{openai.Remove("a"), openai.Remove("b")}, `{ }`},
		{"remove all and add", `{"a":1}`, []openai.Change{openai.Remove("a"), set("1", "b")}, `{"b":1}`},
		{"remove absent", `{"a":1}`, []openai.Change{openai.Remove("b"), openai.Remove("c", "d")}, `{"a":1}`},
		{"by escaped name", `{"mo\u0064el":"a"}`, []openai.Change{set(`"b"`, "model")}, `{"mo\u0064el":"b"}`},
		{"nested new", `{"a":1}`, []openai.Change{usage}, `{"a":1,"stream_options":{"include_usage":true}}`},
		{"nested null", `{"stream_options":null,"a":1}`, []openai.Change{usage}, `{"stream_options":{"include_usage":true},"a":1}`},
		{"nested replace", `{"stream_options":{ "x":1, "include_usage":false }}`, []openai.Change{usage}, `{"stream_options":{ "x":1, "include_usage":true }}`},
		{"two in one", `{"stream_options":{"continuous_usage_stats":true,"y":2}}`, []openai.Change{usage, set("1", "m"), openai.Remove("stream_options", "continuous_usage_stats")},
			`{"stream_options":{"y":2,"include_usage":true},"m":1}`},
		{"whole then part", `{"a":{"x":1}}`, []openai.Change{set(`{"y":2}`, "a"), set("3", "a", "z")}, `{"a":{"y":2,"z":3}}`},
		{"part then whole", `{"a":{"x":1}}`, []openai.Change{set("3", "a", "z"), set(`{"y":2}`, "a")}, `{"a":{"y":2}}`},
		{"not an object", `{"stream_options":[]}`, []openai.Change{usage}, `error: "stream_options" is not an object`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var o openai.Object
			if err := o.Parse([]byte(tt.in), 0); err != nil {
				t.Fatal(err)
			}
			out, err := o.Apply([]byte(">"), tt.changes...)
			got := strings.TrimPrefix(string(out), ">")
			if err != nil {
				got = "error: " + err.Error()
			}
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

func TestAppendString(t *testing.T) {
	for _, s := range []string{"", "plain", "a\"b\\c\n\r\t\x00\x1f\x7f", "é你😀", "\u2028"} {
		var got string
		if err := json.Unmarshal(openai.AppendString(nil, s), &got); err != nil || got != s {
			t.Errorf("%q came back as %q, %v", s, got, err)
		}
	}
	if got := string(openai.AppendString(nil, "\xff")); got != "\"\ufffd\"" {
		t.Errorf("invalid UTF-8 became %s", got)
	}
}
