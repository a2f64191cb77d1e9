package tag_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/tag"
)

func take(t testing.TB, body string, limit int) tag.Prompt {
	t.Helper()
	var o openai.Object
	if err := o.Parse([]byte(body), 0); err != nil {
		t.Fatal(err)
	}
	return tag.Take(&o, limit)
}

// words are the parts of a prompt, as lines.
func words(p tag.Prompt) []string {
	var out []string
	for _, q := range p.Parts {
		media := strings.ToLower(strings.TrimPrefix(q.GetMedia().String(), "MEDIA_"))
		if media == "text" {
			media = ""
		} else {
			media = " " + media
		}
		out = append(out, fmt.Sprintf("%d %s%s %q", q.GetMessage(), strings.ToLower(strings.TrimPrefix(q.GetRole().String(), "ROLE_")), media, q.GetText()))
	}
	return out
}

func TestTake(t *testing.T) {
	for _, c := range []struct {
		name, body string
		want       []string
	}{
		{"roles", `{"model":"m","temperature":0.5,"stream":true,"messages":[{"role":"system","content":"a"},{"role":"developer","content":"b"},{"role":"user","content":"c"},{"role":"assistant","content":"d"},{"role":"tool","tool_call_id":"call_9","content":"e"},{"role":"strange","content":"f"}]}`,
			[]string{`0 system "a"`, `1 system "b"`, `2 user "c"`, `3 assistant "d"`, `4 tool_result "e"`, `5 unspecified "f"`, `5 metadata "role: strange\n"`}},
		{"content", `{"messages":[{"role":"user","content":[{"type":"text","text":"a\u0062"},"c",{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"low"}},{"type":"image_url","image_url":{"url":"https://e.test/x?mail=y"}},{"type":"input_audio","input_audio":{"data":"AAAA"}},{"type":"file","file":{"filename":"cv.pdf","file_data":"data:x"}},{"type":"hologram","where":"z","n":42},{"text":"d","cache_control":{"type":"ephemeral"}}]}]}`,
			[]string{`0 user "ab"`, `0 user "c"`, `0 user image "url: detail: low\n"`, `0 user image "url: https://e.test/x?mail=y\n"`, `0 user audio "data: AAAA\n"`, `0 user file "filename: cv.pdf\nfile_data: "`, `0 user unknown "type: hologram\nwhere: z\nn: 42\n"`, `0 user "d"`, `0 metadata "cache_control: type: ephemeral\n"`}},
		{"tools", `{"messages":[{"role":"assistant","content":null,"reasoning_content":"r","name":"n","tool_calls":[{"id":"call_aB1","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},{"id":"4111 1111","function":{"name":"g","arguments":{"b":[2,"c"]}}}]}],"tools":[{"type":"function","function":{"name":"f","description":"d"}}]}`,
			[]string{`0 assistant "r"`, `0 tool_arguments "{\"a\":1}"`, `0 tool_arguments "b: 2\nc\n"`, `0 metadata "name: n\nname: f\nid: 4111 1111\nname: g\n"`, `1 metadata "type: function\nfunction: name: f\ndescription: d\n"`}},
		{"completions", `{"prompt":["a","b"],"suffix":"c","seed":4111111111111111,"odd":4111111111111111,"echo":true,"user":"u"}`,
			[]string{`0 user "a"`, `0 user "b"`, `0 user "c"`, `0 metadata "odd: 4111111111111111\nuser: u\n"`}},
		{"tokens", `{"prompt":[[1,2],[3]]}`, []string{`0 user tokens ""`}},
		{"embeddings", `{"input":"a","documents":[{"title":"t","text":"x"},"y"]}`, []string{`0 user "a"`, `0 document "title: t\ntext: x\n"`, `0 document "y\n"`}},
		{"broken", `{"messages":[3,"x",{"role":7,"content":8,"tool_calls":"y","tool_call_id":{"a":"b"}}]}`,
			[]string{`0 unspecified "3\n"`, `1 unspecified "x"`, `2 unspecified "8\n"`, `2 tool_arguments "y"`, `2 metadata "role: 7\ntool_call_id: a: b\n"`}},
	} {
		p := take(t, c.body, 1<<20)
		got := words(p)
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s: want -, got +:\n%s", c.name, diff)
		}
		if !p.Whole {
			t.Errorf("%s: not whole", c.name)
		}
	}
}

func TestTakeIsBounded(t *testing.T) {
	p := take(t, `{"messages":[{"role":"user","content":"`+strings.Repeat("ä", 50)+`"},{"role":"user","content":"x"}]}`, 33)
	if p.Whole || p.Bytes != 32 || len(p.Parts) != 1 {
		t.Errorf("%d bytes in %d parts, whole: %v", p.Bytes, len(p.Parts), p.Whole)
	}
	many := take(t, `{"prompt":["a"`+strings.Repeat(`,"a"`, 70_000)+`]}`, 1<<20)
	if many.Whole || len(many.Parts) != 1<<16 {
		t.Errorf("%d parts, whole: %v", len(many.Parts), many.Whole)
	}
}

// Whatever a body is, each string in it that a model or a provider may read is in
// some part.
func FuzzTake(f *testing.F) {
	f.Add("needle", uint8(0))
	f.Add("na\"d\\le\n", uint8(3))
	shapes := []string{
		`{"messages":[{"role":"user","content":X}]}`, `{"messages":[{"role":"user","content":[{"type":"text","text":X}]}]}`, `{"messages":[{"role":"tool","content":[{"type":"new","a":{"b":[X]}}]}]}`,
		`{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":X}}]}]}`, `{"messages":[{"role":"assistant","tool_calls":[{"function":{"arguments":X}}]}]}`, `{"messages":[X]}`,
		`{"prompt":X}`, `{"prompt":[X]}`, `{"suffix":X}`, `{"tools":[{"function":{"parameters":{"properties":{"a":{"enum":[X]}}}}}]}`, `{"tools":X}`, `{"metadata":{"a":X}}`, `{"documents":[{"a":X}]}`,
		`{"messages":[{"role":X,"content":1}]}`, `{"messages":[{"role":"user","x":{"y":X}}]}`, `{"input":[X]}`, `{"response_format":{"json_schema":{"schema":{"description":X}}}}`, `{"stop":[X]}`,
	}
	f.Fuzz(func(t *testing.T, needle string, shape uint8) {
		raw, err := json.Marshal(needle)
		var o openai.Object
		if err != nil || o.Parse([]byte(strings.ReplaceAll(shapes[int(shape)%len(shapes)], "X", string(raw))), 0) != nil {
			t.Skip()
		}
		needle = strings.ToValidUTF8(needle, "\ufffd")
		if needle == "text" || strings.HasPrefix(needle, "tool") || needle == "user" || needle == "system" || needle == "assistant" || needle == "developer" || needle == "function" {
			t.Skip() // a role
		}
		p := tag.Take(&o, 1<<20)
		n := 0
		found := needle == ""
		for _, q := range p.Parts {
			n += len(q.GetText())
			found = found || strings.Contains(string(q.GetText()), needle)
		}
		if n != p.Bytes {
			t.Errorf("%d bytes, said %d", n, p.Bytes)
		}
		var back string
		if json.Unmarshal(raw, &back) == nil && back == needle && !found {
			t.Errorf("shape %d: %q is in no part: %v", shape, needle, words(p))
		}
	})
}

func BenchmarkTake(b *testing.B) {
	var body strings.Builder
	body.WriteString(`{"messages":[`)
	for i := range 100 {
		if i > 0 {
			body.WriteByte(',')
		}
		fmt.Fprintf(&body, `{"role":"user","content":%q}`, strings.Repeat("some words and \n more ", 180))
	}
	body.WriteString(`]}`)
	var o openai.Object
	if err := o.Parse([]byte(body.String()), 0); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(body.Len()))
	b.ReportAllocs()
	for b.Loop() {
		tag.Take(&o, 8<<20)
	}
}
