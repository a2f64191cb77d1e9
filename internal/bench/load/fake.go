package load

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"time"
)

// Fake is a vLLM server that computes nothing: it answers every chat request
// with a stream whose first event comes at once. It is the upstream of the
// overhead benchmark, where all time that is spent is the gateway's.
//
// A stream has as many events as the request's max_tokens says, Interval apart. Its usage has no prompt tokens, which nobody counted: a wrong
// number would make a gateway distrust its own tokenizer. Other paths of vLLM's API answer just enough for a gateway to
// take the worker for ready. It is safe for concurrent use.
type Fake struct {
	// Model is the name that the server answers with.
	Model string
	// Interval is the time between the events of a stream that has more than
	// one.
	Interval time.Duration
	// BlockSize is what /metrics reports.
	BlockSize int
}

// ServeHTTP implements http.Handler.
func (f *Fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/v1/chat/completions", "/v1/completions":
		f.complete(w, r)
	case "/v1/models":
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model","created":1,"owned_by":"vllm","root":%q,"parent":null,"max_model_len":262144}]}`, f.Model, f.Model)
	case "/metrics":
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		label := fmt.Sprintf(`{engine="0",model_name=%q}`, f.Model)
		fmt.Fprintf(w, "vllm:num_requests_running%s 0\nvllm:num_requests_waiting%s 0\nvllm:kv_cache_usage_perc%s 0\n", label, label, label)
		fmt.Fprintf(w, "vllm:cache_config_info{block_size=\"%d\",engine=\"0\",num_gpu_blocks=\"100000000\"} 1\n", f.BlockSize)
	case "/version":
		_, _ = io.WriteString(w, `{"version":"0.24.0"}`)
	default: // /health, /ping
	}
}

// maxBody bounds what a Fake reads of a request.
const maxBody = 64 << 20

var maxTokensKey = []byte(`"max_tokens":`)

func (f *Fake) complete(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
	if err != nil {
		return
	}
	// Parsing long prompts would cost more than what is measured. The prompts
	// are words, so that the key occurs once.
	tokens := 0
	if i := bytes.LastIndex(body, maxTokensKey); i >= 0 {
		for _, c := range bytes.TrimSpace(body[i+len(maxTokensKey):]) {
			if c < '0' || c > '9' || tokens > 1e6 {
				break
			}
			tokens = tokens*10 + int(c-'0')
		}
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	flush := http.NewResponseController(w).Flush
	for i := range max(tokens, 1) {
		if i > 0 {
			select {
			case <-time.After(f.Interval):
			case <-r.Context().Done():
				return
			}
		}
		fmt.Fprintf(w, `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":%q,"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}`+"\n\n", f.Model)
		if flush() != nil {
			return
		}
	}
	fmt.Fprintf(w, `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":%q,"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}`+"\n\n", f.Model)
	fmt.Fprintf(w, `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":%q,"choices":[],"usage":{"completion_tokens":%d}}`+"\n\n", f.Model, tokens)
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}
