package chat_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kinference/kinference/internal/chat"
)

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestLoad(t *testing.T) {
	withTools := chat.Request{Messages: json.RawMessage(`[]`), Tools: json.RawMessage(`[{"type":"function","function":{"name":"f"}}]`)}
	for _, c := range []struct {
		name        string
		files       map[string]string
		plain, tool string
	}{
		{"text", map[string]string{"tokenizer_config.json": `{"chat_template": "A{{ bos_token }}", "bos_token": "<s>"}`}, "A<s>", "A<s>"},
		{"token as object", map[string]string{"tokenizer_config.json": `{"chat_template": "A{{ eos_token }}{{ bos_token }}", "eos_token": {"content": "</s>"}, "bos_token": null}`}, "A</s>", "A</s>"},
		{"named", map[string]string{"tokenizer_config.json": `{"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]}`}, "D", "T"},
		{"only tool_use", map[string]string{"tokenizer_config.json": `{"chat_template": [{"name": "tool_use", "template": "T"}]}`}, "T", "T"},
		{"file", map[string]string{"chat_template.jinja": "F"}, "F", "F"},
		{"file over config", map[string]string{"chat_template.jinja": "F{{ bos_token }}", "tokenizer_config.json": `{"chat_template": "A", "bos_token": "<s>"}`}, "F<s>", "F<s>"},
		{"file and tool file", map[string]string{"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "FT"}, "F", "FT"},
	} {
		dir := t.TempDir()
		for name, text := range c.files {
			write(t, dir, name, text)
		}
		tmpl, err := chat.Load(dir)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got, err := tmpl.Render(chat.Request{Messages: json.RawMessage(`[]`)}); err != nil || got != c.plain {
			t.Errorf("%s: got %q, error %v; want %q", c.name, got, err, c.plain)
		}
		if got, err := tmpl.Render(withTools); err != nil || got != c.tool {
			t.Errorf("%s with tools: got %q, error %v; want %q", c.name, got, err, c.tool)
		}
	}
	dir := t.TempDir()
	write(t, dir, "chat_template.jinja", "F")
	write(t, dir, "config.json", `{"model_type": "gpt_oss"}`)
	if _, err := chat.Load(dir); !errors.Is(err, chat.ErrNoTemplate) || !errors.Is(err, chat.ErrHarmony) {
		t.Errorf("gpt-oss: got error %v, want ErrHarmony", err)
	}
	for name, config := range map[string]string{
		"broken JSON":     `{`,
		"wrong type":      `{"chat_template": 3}`,
		"broken template": `{"chat_template": "{% if %}"}`,
		"unclosed":        `{"chat_template": "{{ x"}`,
	} {
		dir := t.TempDir()
		write(t, dir, "tokenizer_config.json", config)
		if _, err := chat.Load(dir); err == nil || errors.Is(err, chat.ErrNoTemplate) {
			t.Errorf("%s: got error %v, want one that says what is wrong", name, err)
		}
	}
}

// TestErrors: what the client can change is an *Error, which says where.
func TestErrors(t *testing.T) {
	tmpl := load(t, "model")
	deep := strings.Repeat(`[`, 100) + strings.Repeat(`]`, 100)
	hi := `[{"role":"user","content":"hi"}]`
	for _, c := range []struct {
		name string
		req  chat.Request
		want string
	}{
		{"no messages", chat.Request{}, "messages"},
		{"not JSON", chat.Request{Messages: json.RawMessage(`[{"role"`)}, "messages: unexpected end"},
		{"trailing", chat.Request{Messages: json.RawMessage(`[] x`)}, "offset 3"},
		{"not a list", chat.Request{Messages: json.RawMessage(`{}`)}, "not a list"},
		{"not an object", chat.Request{Messages: json.RawMessage(`["hi"]`)}, "messages[0]"},
		{"no role", chat.Request{Messages: json.RawMessage(`[{"content":"x"}]`)}, "messages[0].role"},
		{"content number", chat.Request{Messages: json.RawMessage(`[{"role":"user","content":3}]`)}, "messages[0].content"},
		{"part without type", chat.Request{Messages: json.RawMessage(`[{"role":"user","content":[{}]}]`)}, "without a type"},
		{"unknown part", chat.Request{Messages: json.RawMessage(`[{"role":"user","content":[{"type":"smell"}]}]`)}, "Unknown part type: smell"},
		{"part text number", chat.Request{Messages: json.RawMessage(`[{"role":"user","content":[{"type":"text","text":1}]}]`)}, "not a string"},
		{"tool call without function", chat.Request{Messages: json.RawMessage(`[{"role":"assistant","tool_calls":[{"id":"x"}]}]`)}, "tool_calls"},
		{"tool calls object", chat.Request{Messages: json.RawMessage(`[{"role":"assistant","tool_calls":{}}]`)}, "tool_calls is not a list"},
		{"custom tool call", chat.Request{Messages: json.RawMessage(`[{"role":"assistant","tool_calls":[{"type":"custom","function":{}}]}]`)}, "'function'"},
		{"deep", chat.Request{Messages: json.RawMessage(deep)}, "nested deeper"},
		{"deep tools", chat.Request{Messages: json.RawMessage(hi), Tools: json.RawMessage(deep)}, "tools: JSON is nested deeper"},
		{"tools object", chat.Request{Messages: json.RawMessage(hi), Tools: json.RawMessage(`{}`)}, "tools is not a list"},
		{"tool without name", chat.Request{Messages: json.RawMessage(hi), Tools: json.RawMessage(`[{"type":"function","function":{}}]`)}, "tools[0]"},
		{"tool type", chat.Request{Messages: json.RawMessage(hi), Tools: json.RawMessage(`[{"type":"web","function":{"name":"x"}}]`)}, "tools[0].type"},
		{"kwargs list", chat.Request{Messages: json.RawMessage(hi), Kwargs: json.RawMessage(`[]`)}, "chat_template_kwargs"},
		{"kwargs template", chat.Request{Messages: json.RawMessage(hi), Kwargs: json.RawMessage(`{"chat_template":"x"}`)}, "chat_template"},
		{"kwargs messages", chat.Request{Messages: json.RawMessage(hi), Kwargs: json.RawMessage(`{"messages":[]}`)}, "messages"},
		{"both prompt and continue", chat.Request{Messages: json.RawMessage(hi), AddGenerationPrompt: true, ContinueFinalMessage: true}, "Cannot set both"},
		{"template raises", chat.Request{Messages: json.RawMessage(`[{"role":"narrator","content":"x"}]`)}, "Unknown role: narrator"},
		{"not UTF-8", chat.Request{Messages: json.RawMessage("[{\"role\":\"user\",\"content\":\"\xff\"}]")}, "UTF-8"},
		{"continue nothing", chat.Request{Messages: json.RawMessage(`[]`), ContinueFinalMessage: true}, "no message"},
	} {
		got, err := tmpl.Render(c.req)
		var ce *chat.Error
		if !errors.As(err, &ce) || !strings.Contains(ce.Message, c.want) {
			t.Errorf("%s: got %q, error %v; want a chat.Error with %q", c.name, got, err, c.want)
		}
	}
	for _, part := range []string{`{"type":"image_url","image_url":{"url":"x"}}`, `{"image_url":"x"}`, `{"type":"input_audio","input_audio":{}}`} {
		_, err := tmpl.Render(chat.Request{Messages: json.RawMessage(`[{"role":"user","content":[` + part + `]}]`)})
		if !errors.Is(err, chat.ErrMedia) {
			t.Errorf("%s: got error %v, want ErrMedia", part, err)
		}
	}
}

// A template that makes the library panic is an internal fault, not the client's and not the end of the service.
func TestTemplateFault(t *testing.T) {
	tmpl, err := chat.Parse(`{{ "x" * -1 }}`, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = tmpl.Render(chat.Request{Messages: json.RawMessage(`[]`)})
	if ce := (*chat.Error)(nil); err == nil || errors.As(err, &ce) {
		t.Errorf("got error %v, want one that is not the client's", err)
	}
}

func TestToJSON(t *testing.T) {
	for _, c := range []struct{ template, value, want string }{
		{"{{ v|tojson }}", `{"b":1,"a":[1.0,2.50,1e5,1e16,1e-5,0.0001,-0.0,123456789012345678],"b2":"x"}`, `{"b": 1, "a": [1.0, 2.5, 100000.0, 1e+16, 1e-05, 0.0001, -0.0, 123456789012345678], "b2": "x"}`},
		{"{{ v | tojson }}", `{"a":1,"b":2,"a":3}`, `{"a": 3, "b": 2}`}, // Python keeps the first place and the last value
		{"{{ v | tojson }}", `"<a href='x'>&\u2028é\u0001\u007f\"\\\b\f\n\r\t/"`, "\"<a href='x'>&\u2028é\\u0001\u007f\\\"\\\\\\b\\f\\n\\r\\t/\""},
		{"{{ v | tojson(ensure_ascii=true) }}", `"é😀"`, `"\u00e9\ud83d\ude00"`},
		{"{{ v | tojson(indent=2) }}", `{"b":[],"a":{"x":[1,{}]}}`, "{\n  \"b\": [],\n  \"a\": {\n    \"x\": [\n      1,\n      {}\n    ]\n  }\n}"},
		{"{{ v | tojson(separators=(',', ':')) }}", `{"b":[1,2]}`, `{"b":[1,2]}`},
		{"{{ v | tojson(sort_keys=true) }}", `{"b":1,"a":2}`, `{"a": 2, "b": 1}`},
		{"{{ '| tojson' }} | tojson {# | tojson #}", `1`, "| tojson | tojson "},
		{"{{ {'k': v}|tojson }}{% set x = v|tojson %}{{ x|length }}", `"ab"`, `{"k": "ab"}4`},
		{"{{ v | tojson }}", `[null,true,false,"",{},"\ud800","\ud83d\ude00"]`, "[null, true, false, \"\", {}, \"\ufffd\", \"😀\"]"},
	} {
		tmpl, err := chat.Parse(c.template, nil)
		if err != nil {
			t.Errorf("%s: %v", c.template, err)
			continue
		}
		got, err := tmpl.Render(chat.Request{Messages: json.RawMessage(`[]`), Kwargs: json.RawMessage(`{"v":` + c.value + `}`)})
		if err != nil {
			t.Errorf("%s of %s: %v", c.template, c.value, err)
		} else if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s of %s (-want +got):\n%s", c.template, c.value, diff)
		}
	}
}

// TestContentFormat: a template that walks through content parts gets parts, any other gets text.
func TestContentFormat(t *testing.T) {
	const probe = `{{ messages[0].content is string }}`
	for _, c := range []struct {
		template string
		parts    bool
	}{
		{`{% for m in messages %}{{ m.content }}{% endfor %}`, false},
		{`{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`, true},
		{`{%- for message in messages -%}{%- for part in message["content"] -%}{%- endfor -%}{%- endfor -%}`, true},
		{`{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m['content'] | list %}{% endfor %}{% endfor %}`, true},
		{`{% set a = messages %}{% set b = a | reverse %}{% for m in b %}{% for c in m.content %}{% endfor %}{% endfor %}`, true},
		{`{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}`, false},
		{`{% for m in documents %}{% for c in m.content %}{% endfor %}{% endfor %}`, false},
		{`{{ '{% for m in messages %}{% for c in m.content %}' }}`, false},
	} {
		tmpl, err := chat.Parse(probe+c.template, nil)
		if err != nil {
			t.Errorf("%s: %v", c.template, err)
			continue
		}
		got, err := tmpl.Render(chat.Request{Messages: json.RawMessage(`[{"role":"user","content":"x"}]`)})
		if err != nil || strings.HasPrefix(got, "False") != c.parts {
			t.Errorf("%s: got %q, error %v; want parts %t", c.template, got, err, c.parts)
		}
	}
}

func TestDeveloper(t *testing.T) {
	messages := json.RawMessage(`[{"role":"user","content":"u"},{"role":"developer","content":"d","tools":[{"x":1}]}]`)
	for template, want := range map[string]string{
		`{% for m in messages %}{{ m.role }}={{ m.content }}{{ m.tools | tojson if m.tools }};{% endfor %}`:          "system=d;user=u;",
		`{% for m in messages %}{{ m.role }}={{ m.content }}{% if m.role == "developer" %}!{% endif %};{% endfor %}`: "user=u;developer=d!;",
	} {
		tmpl, err := chat.Parse(template, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := tmpl.Render(chat.Request{Messages: messages}); err != nil || got != want {
			t.Errorf("%s: got %q, error %v; want %q", template, got, err, want)
		}
	}
}

func TestConcurrent(t *testing.T) {
	tmpl := load(t, "model")
	all := cases(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for _, c := range all {
				first, err1 := tmpl.Render(chat.Request(c.Request))
				second, err2 := tmpl.Render(chat.Request(c.Request))
				if first != second || (err1 == nil) != (err2 == nil) {
					t.Errorf("%s: two answers", c.Name)
				}
			}
		})
	}
	wg.Wait()
}

// FuzzRender feeds any bytes as each of the JSON fields. Whatever they are, the answer is a prompt or an error, never a panic that the
// library let through, and the order of decoding matches encoding/json on what is valid.
func FuzzRender(f *testing.F) {
	data, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		f.Fatal(err)
	}
	var all []struct{ Request body }
	if err := json.Unmarshal(data, &all); err != nil {
		f.Fatal(err)
	}
	for _, c := range all {
		f.Add([]byte(c.Request.Messages), []byte(c.Request.Tools), []byte(c.Request.Kwargs))
	}
	templates := []*chat.Template{load(f, "model"), load(f, "parts")}
	echo, err := chat.Parse(`{{ v | tojson }}`, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, messages, tools, kwargs []byte) {
		for _, tmpl := range templates {
			for _, generate := range []bool{true, false} {
				_, err := tmpl.Render(chat.Request{Messages: messages, Tools: tools, Kwargs: kwargs, AddGenerationPrompt: generate, ContinueFinalMessage: !generate})
				if err == nil && !json.Valid(messages) {
					t.Fatalf("invalid messages %q are taken", messages)
				}
				if err != nil && strings.Contains(err.Error(), "panicked") {
					t.Fatal(err)
				}
			}
		}
		// What the decoder takes it must give back: once through tojson and decoding is a fixed point.
		once, err := echo.Render(chat.Request{Messages: json.RawMessage(`[]`), Kwargs: json.RawMessage(`{"v":` + string(messages) + `}`)})
		if err != nil {
			return
		}
		twice, err := echo.Render(chat.Request{Messages: json.RawMessage(`[]`), Kwargs: json.RawMessage(`{"v":` + once + `}`)})
		if err == nil && once != twice {
			t.Fatalf("%q becomes %q and that %q", messages, once, twice)
		}
	})
}
