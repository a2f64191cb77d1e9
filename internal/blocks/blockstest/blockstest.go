// Package blockstest makes streams of chat completions as engines might send
// them, for tests of what is made of such streams. It is deterministic; its
// functions may be called by any number of goroutines.
package blockstest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/kinference/kinference/internal/openai"
)

// Stream is a stream as an engine might send it, and what a client must have
// in the end.
type Stream struct {
	Chunks         []string // data of the events; the last is [DONE]
	Text, Thinking string
	Calls          []Call
	Finish         string // finish_reason
	Usage          openai.Usage
}

// Call is a tool call of a Stream.
type Call struct{ ID, Name, Arguments string }

var alphabet = []rune("abc {}[]\":,\\\n\t\r\u2028é漢😀\x7f/<>&[DONE]data: ")

// Word is up to most characters, among them all that JSON and event streams
// make much of.
func Word(r *rand.Rand, most int) string {
	n := r.IntN(most + 1)
	var s strings.Builder
	for range n {
		s.WriteRune(alphabet[r.IntN(len(alphabet))])
	}
	return s.String()
}

// Quote is a text as JSON.
func Quote(s string) string {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(len(s)%2 == 0) // both are in use
	_ = e.Encode(s)
	return strings.TrimSuffix(b.String(), "\n")
}

// New interleaves text, reasoning and the pieces of up to three calls at random,
// the same for a seed each time.
func New(seed uint64) *Stream {
	r := rand.New(rand.NewPCG(seed, 1))
	b := &Stream{}
	prompt, cached := r.IntN(1000)+1, 0
	if r.IntN(2) == 0 {
		cached = r.IntN(prompt + 1)
	}
	continuous := r.IntN(2) == 0
	output := 0
	add := func(d string) {
		if !strings.HasPrefix(d, `"role"`) {
			output++
		}
		chunk := `{"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{` + d + `},"logprobs":null,"finish_reason":null}]`
		if continuous {
			chunk += fmt.Sprintf(`,"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}`, prompt, output, prompt+output)
		}
		b.Chunks = append(b.Chunks, chunk+"}")
	}
	if r.IntN(4) > 0 {
		add(`"role":"assistant","content":""`)
	}
	type state struct{ rest string }
	calls := make([]state, r.IntN(4))
	for i := range calls {
		input := map[string]any{}
		for range r.IntN(4) {
			input[Word(r, 5)] = []any{Word(r, 12), r.IntN(100), nil, map[string]any{Word(r, 2): true}}
		}
		args, _ := json.Marshal(input)
		calls[i].rest = string(args)
		b.Calls = append(b.Calls, Call{fmt.Sprintf("call_%d", i), fmt.Sprintf("tool%d", i), string(args)})
	}
	begun, interleave := 0, r.IntN(3) == 0
	for range 2 + r.IntN(40) {
		kind := r.IntN(4)
		switch {
		case kind == 0:
			w := Word(r, 6)
			b.Text += w
			add(`"content":` + Quote(w))
		case kind == 1:
			w := Word(r, 6)
			b.Thinking += w
			name := "reasoning"
			if seed%2 == 0 {
				name = "reasoning_content"
			}
			add(`"` + name + `":` + Quote(w))
		case len(calls) > 0:
			i := begun
			if interleave {
				i = r.IntN(min(begun+1, len(calls)))
			} else if begun > 0 && calls[begun-1].rest != "" {
				i = begun - 1
			}
			if i >= len(calls) || i < begun && calls[i].rest == "" {
				continue
			}
			head := `"index":` + fmt.Sprint(i)
			name := ""
			if i == begun {
				begun++
				head += fmt.Sprintf(`,"id":"call_%d","type":"function"`, i)
				name = fmt.Sprintf(`"name":"tool%d",`, i)
			}
			runes := []rune(calls[i].rest)
			n := r.IntN(len(runes) + 1)
			calls[i].rest = string(runes[n:])
			add(`"tool_calls":[{` + head + `,"function":{` + name + `"arguments":` + Quote(string(runes[:n])) + `}}]`)
		}
	}
	for i := range calls { // what is left comes in one go
		if i >= begun {
			add(fmt.Sprintf(`"tool_calls":[{"index":%d,"id":"call_%d","type":"function","function":{"name":"tool%d","arguments":%s}}]`, i, i, i, Quote(calls[i].rest)))
		} else if calls[i].rest != "" {
			add(fmt.Sprintf(`"tool_calls":[{"index":%d,"function":{"arguments":%s}}]`, i, Quote(calls[i].rest)))
		}
	}
	b.Finish = []string{"stop", "length", "tool_calls"}[r.IntN(3)]
	b.Chunks = append(b.Chunks, `{"id":"x","choices":[{"index":0,"delta":{"content":""},"finish_reason":"`+b.Finish+`","stop_reason":null}]}`)
	details := ""
	if cached > 0 || r.IntN(2) == 0 {
		details = fmt.Sprintf(`,"prompt_tokens_details":{"cached_tokens":%d}`, cached)
	}
	b.Chunks = append(b.Chunks, fmt.Sprintf(`{"id":"x","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d%s}}`, prompt, output, details), "[DONE]")
	b.Usage = openai.Usage{Prompt: prompt, Cached: cached, Output: output, Reasoning: openai.Unknown}
	return b
}
