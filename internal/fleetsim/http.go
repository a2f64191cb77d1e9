package fleetsim

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/vllm"
)

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
	if l.wording().modern() {
		routes["/kv_event_sources"] = []route{{"GET", l.eventSources}}
	}
	if l.w.cfg.DevMode {
		routes["/reset_prefix_cache"] = []route{{"POST", l.resetPrefixCache}}
		routes["/sleep"] = []route{{"POST", l.goToSleep}}
		routes["/wake_up"] = []route{{"POST", l.wakeUp}}
		routes["/is_sleeping"] = []route{{"GET", l.isSleeping}}
		routes["/pause"] = []route{{"POST", l.pause}}
		routes["/resume"] = []route{{"POST", l.resume}}
		routes["/is_paused"] = []route{{"GET", l.isPaused}}
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
		if l.w.cfg.RequestIDHeaders {
			// Not that of the body, which names the response too.
			w.Header().Set("X-Request-Id", cmp.Or(r.Header.Get("X-Request-Id"), randomID()))
		}
		if key := l.w.cfg.APIKey; key != "" && strings.HasPrefix(r.URL.Path, "/v1") && r.Method != http.MethodOptions {
			token, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			if subtle.ConstantTimeCompare([]byte(token), []byte(key)) != 1 {
				writeJSON(w, http.StatusUnauthorized, []byte(vllm.UnauthorizedBody))
				return
			}
		}
		w.Header().Set("Vary", "Origin")
		list, ok := routes[r.URL.Path]
		if !ok {
			detail(w, http.StatusNotFound)
			return
		}
		for _, rt := range list {
			if rt.method == r.Method {
				rt.serve(w, r)
				return
			}
		}
		w.Header().Set("Allow", list[0].method)
		detail(w, http.StatusMethodNotAllowed)
	})
}

// detail is what the web framework answers for a path or method that is not
// served: not the usual shape.
func detail(w http.ResponseWriter, status int) {
	answerStatus(w, status, map[string]string{"detail": http.StatusText(status)})
}

// wording is how this worker's version refuses requests.
func (l *life) wording() wording { return wording(l.w.cfg.Version) }

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

func writeError(w http.ResponseWriter, e vllm.Error) { writeJSON(w, e.Code, e.JSON()) }

func writeJSON(w http.ResponseWriter, status int, data []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

// answerJSON answers with v, which always encodes.
func answerJSON(w http.ResponseWriter, v any) { answerStatus(w, http.StatusOK, v) }

func answerStatus(w http.ResponseWriter, status int, v any) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		writeError(w, vllm.Internal(err.Error()))
		return
	}
	writeJSON(w, status, []byte(strings.TrimSuffix(b.String(), "\n")))
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
	if l.wording().modern() {
		return "", fail(vllm.ModelNotFound(name, append([]string{c.Model}, c.Aliases...)...))
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
		m := card(100+i, name, engine.AdapterPath(name))
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

// eventSources tells where the events are, as vLLM was told: with a star for
// the host.
func (l *life) eventSources(w http.ResponseWriter, _ *http.Request) {
	type source struct {
		Enable    bool    `json:"enable_kv_cache_events"`
		Publisher string  `json:"publisher"`
		Endpoint  string  `json:"endpoint"`
		Replay    *string `json:"replay_endpoint"`
		Buffer    int     `json:"buffer_steps"`
		HWM       int     `json:"hwm"`
		Queue     int     `json:"max_queue_size"`
		Topic     string  `json:"topic"`
	}
	out := map[string]source{}
	star := func(l net.Listener) string { return fmt.Sprintf("tcp://*:%d", l.Addr().(*net.TCPAddr).Port) }
	for rank, e := range l.events {
		s := source{Enable: true, Publisher: "zmq", Endpoint: star(e.pub), Buffer: l.w.cfg.BufferSteps, HWM: 100_000, Queue: 100_000, Topic: l.w.cfg.Topic}
		if e.router != nil {
			r := star(e.router)
			s.Replay = &r
		}
		out[strconv.Itoa(rank)] = s
	}
	answerJSON(w, out)
}
