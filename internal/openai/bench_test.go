package openai_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/openai"
)

// chatBody is a conversation of about n bytes with the escapes of real text.
func chatBody(n int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"model":"demo-model","stream":true,"max_tokens":256,"temperature":0.7,"messages":[{"role":"system","content":"Be brief."}`)
	turn := `,{"role":"user","content":"` + strings.Repeat(`Explain the \"scheduler\" of an inference engine, step by step.\nThen name its limits — briefly. `, 4) + `"}`
	for b.Len() < n {
		b.WriteString(turn)
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

// go test -run '^$' -bench . -benchtime 200ms ./internal/openai
func BenchmarkRequestParse(b *testing.B) {
	for _, size := range []int{8 << 10, 220 << 10} {
		body := chatBody(size)
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			var r openai.Request
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if e := r.Parse(openai.RouteChat, body, 0); e != nil {
					b.Fatal(e)
				}
			}
		})
	}
}

func BenchmarkApply(b *testing.B) {
	var r openai.Request
	if e := r.Parse(openai.RouteChat, chatBody(220<<10), 0); e != nil {
		b.Fatal(e)
	}
	changes := []openai.Change{openai.Set([]byte(`"other"`), "model"), openai.Set([]byte("true"), "stream_options", "include_usage")}
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		dst, _ = r.Body.Apply(dst[:0], changes...)
	}
}

const chunk = `{"id":"chatcmpl-8a2f0c5d","object":"chat.completion.chunk","created":1764000000,"model":"demo-model","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}`

func BenchmarkReader(b *testing.B) {
	stream := []byte(strings.Repeat("data: "+chunk+"\n\n", 1000))
	b.SetBytes(int64(len(stream)))
	b.ReportAllocs()
	for b.Loop() {
		r := openai.NewReader(&stepReader{stream, 1500}, 1<<20)
		for {
			if _, err := r.Next(); err != nil {
				break
			}
		}
	}
}

func BenchmarkChunk(b *testing.B) {
	var c openai.Chunk
	text := []byte(chunk)
	b.ReportAllocs()
	for b.Loop() {
		if c.Parse(text) != nil || !c.Content() {
			b.Fatal("no content")
		}
	}
}
