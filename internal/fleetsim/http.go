package fleetsim

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strings"

	"github.com/kinference/kinference/internal/vllm"
)

// maxBody bounds a request body. vLLM has no bound.
const maxBody = 64 << 20

// route serves one path and method.
type route struct {
	method string
	serve  http.HandlerFunc
}

// handler is the whole HTTP surface of a worker.
func (l *life) handler() http.Handler {
	routes := map[string][]route{
		"/v1/chat/completions":        {{"POST", l.chatCompletions}},
		"/v1/completions":             {{"POST", l.completions}},
		"/v1/chat/completions/render": {{"POST", l.renderChat}},
		"/v1/completions/render":      {{"POST", l.renderCompletions}},
		"/v1/models":                  {{"GET", l.models}},
		"/tokenize":                   {{"POST", l.tokenize}},
		"/detokenize":                 {{"POST", l.detokenize}},
		"/health":                     {{"GET", l.health}},
		"/ping":                       {{"GET", l.health}, {"POST", l.health}},
		"/version":                    {{"GET", l.version}},
		"/load":                       {{"GET", l.load}},
		"/metrics":                    {{"GET", l.metrics}},
	}
	if l.w.cfg.DevMode {
		routes["/reset_prefix_cache"] = []route{{"POST", l.resetPrefixCache}}
		routes["/sleep"] = []route{{"POST", l.goToSleep}}
		routes["/wake_up"] = []route{{"POST", l.wakeUp}}
		routes["/is_sleeping"] = []route{{"GET", l.isSleeping}}
	}
	if l.w.cfg.Admin {
		routes["/sim/faults"] = []route{{"GET", l.getFaults}, {"POST", l.setFaults}}
		routes["/sim/wipe"] = []route{{"POST", l.wipe}}
		routes["/sim/restart"] = []route{{"POST", l.restart}}
		routes["/sim/stats"] = []route{{"GET", l.getStats}}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !l.enter() {
			panic(http.ErrAbortHandler)
		}
		defer l.handlers.Done()
		w.Header().Set("Server", "uvicorn")
		list, ok := routes[r.URL.Path]
		if !ok {
			writeError(w, vllm.Error{Message: "Not Found", Type: "Not Found", Code: http.StatusNotFound})
			return
		}
		if key := l.w.cfg.APIKey; key != "" && strings.HasPrefix(r.URL.Path, "/v1") && r.Method != http.MethodOptions {
			token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			if subtle.ConstantTimeCompare([]byte(token), []byte(key)) != 1 {
				writeJSON(w, http.StatusUnauthorized, []byte(vllm.UnauthorizedBody))
				return
			}
		}
		for _, rt := range list {
			if rt.method == r.Method {
				rt.serve(w, r)
				return
			}
		}
		writeError(w, vllm.Error{Message: "Method Not Allowed", Type: "Method Not Allowed", Code: http.StatusMethodNotAllowed})
	})
}

// enter counts a handler in, unless the life is over.
func (l *life) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.handlers.Add(1)
	return true
}

func baseContext(ctx context.Context) func(net.Listener) context.Context {
	return func(net.Listener) context.Context { return ctx }
}

// body reads a JSON body into v, with vLLM's answers to what is wrong with it.
func body(w http.ResponseWriter, r *http.Request, v any) *vllm.Error {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		return fail(vllm.InvalidBody("Unsupported Media Type: Only 'application/json' is allowed"))
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			return fail(vllm.Error{Message: "Request body too large", Type: "Request Entity Too Large", Code: http.StatusRequestEntityTooLarge})
		}
		return fail(vllm.InvalidBody("There was an error parsing the body"))
	}
	if err := json.Unmarshal(data, v); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) {
			return fail(vllm.InvalidBody(fmt.Sprintf("[{'type': '%s_type', 'loc': ('body', '%s'), 'msg': 'Input should be a valid %s'}]", wrong.Type, wrong.Field, wrong.Type)))
		}
		at := int64(0)
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			at = syntax.Offset
		}
		return fail(vllm.InvalidBody(fmt.Sprintf("[{'type': 'json_invalid', 'loc': ('body', %d), 'msg': 'JSON decode error'}]", at)))
	}
	return nil
}

func writeError(w http.ResponseWriter, e vllm.Error) { writeJSON(w, e.Code, e.JSON()) }

func writeJSON(w http.ResponseWriter, status int, data []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

// answerJSON answers with v, which always encodes.
func answerJSON(w http.ResponseWriter, v any) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		writeError(w, vllm.Internal(err.Error()))
		return
	}
	writeJSON(w, http.StatusOK, []byte(strings.TrimSuffix(b.String(), "\n")))
}

// served resolves the name of a model: the base model under any of its names,
// or an adapter. An empty name means the base model.
func (l *life) served(name string) (lora string, e *vllm.Error) {
	c := &l.w.cfg
	if name == "" || name == c.Model {
		return "", nil
	}
	for _, a := range c.Aliases {
		if a == name {
			return "", nil
		}
	}
	for _, a := range c.LoRAs {
		if a == name {
			return a, nil
		}
	}
	return "", fail(vllm.ModelNotFound(name))
}

type modelCard struct {
	ID          string       `json:"id"`
	Object      string       `json:"object"`
	Created     int64        `json:"created"`
	OwnedBy     string       `json:"owned_by"`
	Root        string       `json:"root"`
	Parent      *string      `json:"parent"`
	MaxModelLen *int         `json:"max_model_len"`
	Permission  []permission `json:"permission"`
}

type permission struct {
	ID                 string  `json:"id"`
	Object             string  `json:"object"`
	Created            int64   `json:"created"`
	AllowCreateEngine  bool    `json:"allow_create_engine"`
	AllowSampling      bool    `json:"allow_sampling"`
	AllowLogprobs      bool    `json:"allow_logprobs"`
	AllowSearchIndices bool    `json:"allow_search_indices"`
	AllowView          bool    `json:"allow_view"`
	AllowFineTuning    bool    `json:"allow_fine_tuning"`
	Organization       string  `json:"organization"`
	Group              *string `json:"group"`
	IsBlocking         bool    `json:"is_blocking"`
}

func (l *life) models(w http.ResponseWriter, _ *http.Request) {
	c := &l.w.cfg
	longest := c.Profile.MaxLen()
	card := func(i int, id, root string) modelCard {
		return modelCard{ID: id, Object: "model", Created: l.created, OwnedBy: "vllm", Root: root, Permission: []permission{{
			ID: fmt.Sprintf("modelperm-%016x", i), Object: "model_permission", Created: l.created,
			AllowSampling: true, AllowLogprobs: true, AllowView: true, Organization: "*",
		}}}
	}
	data := []modelCard{}
	for i, name := range append([]string{c.Model}, c.Aliases...) {
		m := card(i, name, c.Model)
		m.MaxModelLen = &longest
		data = append(data, m)
	}
	for i, name := range c.LoRAs {
		m := card(100+i, name, "/adapters/"+name)
		m.Parent = &c.Model
		data = append(data, m)
	}
	answerJSON(w, map[string]any{"object": "list", "data": data})
}

func (l *life) health(w http.ResponseWriter, _ *http.Request) {
	if l.w.faults.get().Unhealthy {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusOK)
}

func (l *life) version(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]string{"version": l.w.cfg.Version.String() + ".0"})
}

func (l *life) load(w http.ResponseWriter, _ *http.Request) {
	n := int64(0)
	if l.w.cfg.LoadTracking {
		n = l.requests.Load()
	}
	answerJSON(w, map[string]int64{"server_load": n})
}

// The development routes.

func (l *life) resetPrefixCache(w http.ResponseWriter, r *http.Request) {
	ok := l.resetAll(r.URL.Query().Get("reset_running_requests") == "true")
	answerJSON(w, map[string]bool{"success": ok})
}

func (l *life) goToSleep(w http.ResponseWriter, r *http.Request) {
	level := int32(1)
	if r.URL.Query().Get("level") == "2" {
		level = 2
	}
	l.sleep.Store(level)
	for _, k := range l.cores {
		k.pause(true)
		k.abortAll()
	}
	l.resetAll(true)
	w.WriteHeader(http.StatusOK)
}

func (l *life) wakeUp(w http.ResponseWriter, _ *http.Request) {
	l.sleep.Store(0)
	for _, k := range l.cores {
		k.pause(false)
	}
	w.WriteHeader(http.StatusOK)
}

func (l *life) isSleeping(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]bool{"is_sleeping": l.sleep.Load() > 0})
}

// Our own routes.

func (l *life) getFaults(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, l.w.Faults())
}

func (l *life) setFaults(w http.ResponseWriter, r *http.Request) {
	var f Faults
	if e := body(w, r, &f); e != nil {
		writeError(w, *e)
		return
	}
	l.w.SetFaults(f)
	answerJSON(w, f)
}

func (l *life) wipe(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]bool{"success": l.resetAll(true)})
}

// restart answers first: it breaks every connection, this one too.
func (l *life) restart(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusAccepted)
	l.w.background.Go(func() {
		if err := l.w.restart(); err != nil {
			l.w.cfg.Log.Error("simulated worker did not restart", "worker", l.w.cfg.Name, "error", err)
		}
	})
}

func (l *life) getStats(w http.ResponseWriter, _ *http.Request) {
	type rank struct {
		Engine any `json:"engine"`
		Events any `json:"events,omitempty"`
	}
	out := struct {
		Aborted  uint64 `json:"aborted"`
		InFlight int64  `json:"inFlight"`
		Ranks    []rank `json:"ranks"`
	}{Aborted: l.aborted.Load(), InFlight: l.requests.Load()}
	for i, k := range l.cores {
		s := rank{Engine: k.state()}
		if i < len(l.events) {
			s.Events = l.events[i].snapshot()
		}
		out.Ranks = append(out.Ranks, s)
	}
	answerJSON(w, out)
}
