package vllm_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// The headers that are compared.
var headers = []string{"Content-Type", "Allow", "X-Request-Id", "Vary", "Endpoint-Load-Metrics", "Server"}

// canonical writes an answer down without what differs by chance.
func canonical(r diffReply) []string {
	out := []string{fmt.Sprint("status ", r.status)}
	for _, h := range headers {
		if v, ok := r.header[h]; ok {
			out = append(out, fmt.Sprintf("%s: %q", h, steady(h, strings.Join(v, "|"))))
		}
	}
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		return append(out, canonicalBody(r.body)...)
	}
	return append(out, canonicalStream(datasOf(r))...)
}

func canonicalBody(body string) []string {
	var v any
	if body == "" {
		return nil
	}
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		return []string{"no JSON: " + body[:min(len(body), 100)]}
	}
	return flatten("", v)
}

// flatten lists all values with their paths.
func flatten(path string, v any) (out []string) {
	switch v := v.(type) {
	case map[string]any:
		if len(v) == 0 && !strings.HasSuffix(path, ".sampling_params") {
			return []string{path + " {}"}
		}
		for _, k := range slices.Sorted(maps.Keys(v)) {
			switch {
			case k == "message" && v["type"] == "Bad Request":
				out = append(out, path+"."+k+" <text>") // of the validation library
				continue
			case strings.HasSuffix(path, ".sampling_params") && k != "n" && k != "max_tokens":
				continue // the render routes': the simulated worker has few of them
			case k == "token_strs" && v[k] != nil:
				continue // texts there, the vocabulary's own spelling here
			}
			out = append(out, flatten(path+"."+k, v[k])...)
		}
	case []any:
		if len(v) == 0 {
			return []string{path + " []"}
		}
		if _, numbers := v[0].(float64); numbers {
			return []string{path + " " + oneLine(v)}
		}
		for i, x := range v {
			out = append(out, flatten(fmt.Sprintf("%s[%d]", path, i), x)...)
		}
	default:
		out = append(out, path+" "+steady(path, oneLine(v)))
	}
	return out
}

var (
	randomID    = regexp.MustCompile(`\b(chatcmpl|cmpl|modelperm)-[0-9a-f]{16,32}\b`)
	bareID      = regexp.MustCompile(`^"?[0-9a-f]{16,32}"?$`)
	fingerprint = regexp.MustCompile(`vllm-([0-9.]+)-[0-9a-f]{8}`)
	position    = regexp.MustCompile(`"body\.\d+"`)
	member      = regexp.MustCompile(`"(body\.messages\.\d+)\.[^"]*"`)
)

// steady replaces what differs by chance in a value.
func steady(path, v string) string {
	switch {
	case strings.HasSuffix(path, ".created"):
		return "<time>"
	case strings.HasSuffix(path, ".root"):
		return "<path>"
	case strings.HasSuffix(path, "endpoint"): // of /kv_event_sources
		return "<endpoint>"
	case path == "X-Request-Id":
		return bareID.ReplaceAllString(v, "<random>")
	case path == "Endpoint-Load-Metrics":
		return regexp.MustCompile(`[0-9.]+`).ReplaceAllString(v, "<n>")
	}
	v = randomID.ReplaceAllString(v, "$1-<random>")
	v = fingerprint.ReplaceAllString(v, "vllm-$1-<hash>")
	v = member.ReplaceAllString(v, `"$1"`)
	return position.ReplaceAllString(v, `"body.<position>"`)
}

// canonicalStream writes down a stream. The engine may put several tokens into
// one event when the server lags, and choices come in any order: so each
// choice's events are joined, and their forms are listed apart.
func canonicalStream(events []string) (out []string) {
	choices := map[int]*joined{}
	var rest []string
	for _, data := range events {
		var v struct {
			Choices []map[string]any
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || len(v.Choices) != 1 {
			rest = append(rest, data)
			continue
		}
		index, _ := v.Choices[0]["index"].(float64)
		if choices[int(index)] == nil {
			choices[int(index)] = &joined{forms: map[string]bool{}}
		}
		choices[int(index)].add(data, v.Choices[0])
	}
	for _, i := range slices.Sorted(maps.Keys(choices)) {
		j := choices[i]
		out = append(out, fmt.Sprintf("choice %d: text %q, ids %s, last usage %s", i, j.text, oneLine(j.ids), j.usage))
		out = append(out, slices.Sorted(maps.Keys(j.forms))...)
	}
	for _, data := range rest {
		if data == "[DONE]" {
			out = append(out, data)
			continue
		}
		out = append(out, canonicalBody(data)...)
	}
	return out
}

// joined are the events of one choice.
type joined struct {
	text, usage string
	ids         []any
	begun       bool
	forms       map[string]bool // of the role's event, the first and the last
}

func (j *joined) add(data string, choice map[string]any) {
	var whole map[string]any
	_ = json.Unmarshal([]byte(data), &whole) // the caller has done it before
	text, _ := choice["text"].(string)
	delta, _ := choice["delta"].(map[string]any)
	content, _ := delta["content"].(string)
	ids, _ := choice["token_ids"].([]any)
	j.text += text + content
	j.ids = append(j.ids, ids...)
	kind := ""
	switch {
	case delta["role"] != nil:
		kind = "role"
	case choice["finish_reason"] != nil:
		kind, j.usage = "last", oneLine(whole["usage"])
	case !j.begun:
		kind = "first"
	default:
		return
	}
	j.begun = kind != "role"
	// The form: all keys, and the values that do not depend on how many tokens
	// the event has.
	var form []string
	for _, line := range flatten("", whole) {
		path, value, _ := strings.Cut(line, " ")
		switch {
		case strings.HasSuffix(path, ".text"), strings.HasSuffix(path, ".content"), strings.HasSuffix(path, "[0].token_ids") && value != "null",
			strings.HasSuffix(path, ".total_tokens"), strings.HasSuffix(path, ".completion_tokens"):
			value = "…"
		}
		form = append(form, path+" "+value)
	}
	j.forms[kind+": "+strings.Join(form, ", ")] = true
}
