package openai

import (
	"bytes"
	"encoding/json"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Route is one of the endpoints that a model answers at.
type Route int

// The routes.
const (
	RouteChat Route = iota
	RouteCompletions
	RouteEmbeddings
)

// Path is the route's HTTP path.
func (r Route) Path() string {
	switch r {
	case RouteCompletions:
		return "/v1/completions"
	case RouteEmbeddings:
		return "/v1/embeddings"
	}
	return "/v1/chat/completions"
}

// PromptParam names the body member that holds the prompt.
func (r Route) PromptParam() string {
	switch r {
	case RouteCompletions:
		return "prompt"
	case RouteEmbeddings:
		return "input"
	}
	return "messages"
}

// Request is what the control plane reads of a request body. Everything else
// stays in the body, untouched. It keeps the body it was parsed from.
type Request struct {
	Body  Object
	Route Route

	Model     string
	Stream    bool
	MaxTokens int // limit of generated tokens, 0 if the client set none
	CacheSalt string
	// EngineOnly says that the request has its prompt cut or rendered in a way
	// that only the engine knows (truncate_prompt_tokens, chat_template): what
	// follows is not the prompt as the engine will see it.
	EngineOnly bool

	// What the client asked of a stream: a last chunk with usage, and usage on
	// every chunk (vLLM; counts only together with the former).
	IncludeUsage, ContinuousUsage bool

	// Chat: the members that take part in rendering, as they stand.
	Messages, Tools, Documents, TemplateKwargs json.RawMessage
	AddGenerationPrompt                        bool // default true
	ContinueFinalMessage                       bool
	ReasoningEffort                            string

	// Completions: the first prompt of the request, as text or as token ids.
	Prompt       string
	PromptTokens []uint32
	Prompts      int // how many prompts the request has

	// AddSpecial puts special tokens such as BOS before the text; default true
	// for completions, false for chat, whose templates have them.
	AddSpecial bool
}

// known are the members we read; by them a different spelling is found out.
var known = [...]string{
	"model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens", "cache_salt",
	"tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "reasoning_effort",
	"add_special_tokens", "kv_transfer_params", "n", "truncate_prompt_tokens", "chat_template",
}

// Parse checks a request body and reads what is needed of it. Members that we
// act on must have their JSON type: engines coerce some others ("true" for
// true), and then we would see another request than they do. depth is as in
// [Object.Parse].
func (r *Request) Parse(route Route, body []byte, depth int) *Error {
	*r = Request{Body: Object{members: r.Body.members, keys: r.Body.keys}, Route: route, AddGenerationPrompt: true}
	if e := r.Body.ParseBody(body, depth); e != nil {
		return e
	}
	if e := CheckSpelling(&r.Body, known[:]); e != nil {
		return e
	}
	f := fields{o: &r.Body}
	r.Model = f.text("model")
	if f.err == nil && r.Model == "" {
		return Invalid("model", "", "A model must be given.")
	}
	r.Stream = f.flag("stream", false)
	r.MaxTokens = f.count("max_tokens")
	r.CacheSalt = f.text("cache_salt")
	r.EngineOnly = r.Body.Get("truncate_prompt_tokens").Given() || route == RouteChat && r.Body.Get("chat_template").Given()
	r.AddSpecial = f.flag("add_special_tokens", route != RouteChat)
	if f.err == nil {
		r.streamOptions(&f)
	}
	switch {
	case route == RouteChat:
		if n := f.count("max_completion_tokens"); n > 0 {
			r.MaxTokens = n
		}
		r.Messages = f.raw("messages", Array)
		if f.err == nil && r.Messages == nil {
			return Invalid("messages", "", "Messages must be given.")
		}
		r.Tools = f.raw("tools", Array)
		r.Documents = f.raw("documents", Array)
		r.TemplateKwargs = f.raw("chat_template_kwargs", Obj)
		r.AddGenerationPrompt = f.flag("add_generation_prompt", true)
		r.ContinueFinalMessage = f.flag("continue_final_message", false)
		r.ReasoningEffort = f.text("reasoning_effort")
	case route == RouteEmbeddings:
		r.embeddings(&f)
	case f.err == nil:
		if f.err = r.prompt(r.Body.Get("prompt")); f.err == nil && r.Prompts > maxInputs {
			f.err = Invalid("prompt", "", "The prompt may have at most "+strconv.Itoa(maxInputs)+" elements.")
		}
	}
	return f.err
}

// maxInputs is how many prompts one request may have, or texts to embed.
const maxInputs = 2048

// embeddings reads what is to be embedded. It costs the engine one step, as if
// one token were generated, and never comes as a stream. vLLM takes a
// conversation too, which only it knows how to render.
func (r *Request) embeddings(f *fields) {
	r.Stream, r.MaxTokens = false, 1
	if r.Messages = f.raw("messages", Array); r.Messages != nil {
		r.EngineOnly = true
		return
	}
	if f.err != nil {
		return
	}
	if f.err = r.prompt(r.Body.Get("input")); f.err == nil && r.Prompts > maxInputs {
		f.err = Invalid("input", "", "The input may have at most "+strconv.Itoa(maxInputs)+" elements.")
	}
}

func (r *Request) streamOptions(f *fields) {
	options := f.raw("stream_options", Obj)
	if options == nil {
		return
	}
	var o Object
	if o.Parse(options, math.MaxInt) != nil {
		return // cannot be: it is part of a parsed body
	}
	if e := CheckSpelling(&o, []string{"include_usage", "continuous_usage_stats"}); e != nil {
		f.err = e
		return
	}
	inner := fields{o: &o, prefix: "stream_options."}
	r.IncludeUsage = inner.flag("include_usage", false)
	r.ContinuousUsage = inner.flag("continuous_usage_stats", false) && r.IncludeUsage
	f.err = inner.err
}

// prompt reads the four forms of a completions prompt: text, token ids, and
// lists of either.
func (r *Request) prompt(v Value) *Error {
	name := r.Route.PromptParam()
	bad := Invalid(name, "", "The "+name+" must be a string, a list of strings, a list of token ids or a list of lists of token ids.")
	switch v.Kind {
	case String:
		r.Prompt, _ = v.Text()
		r.Prompts = 1
		return nil
	case Array:
	default:
		return bad
	}
	var kind Kind
	mixed := false
	for e := range v.Elements() {
		if kind == Absent {
			kind = e.Kind
			switch kind {
			case String:
				r.Prompt, _ = e.Text()
			case Array:
				ids, ok := tokenIDs(e)
				r.PromptTokens, mixed = ids, !ok
			}
		}
		r.Prompts++
		if mixed = mixed || e.Kind != kind; mixed {
			break
		}
	}
	switch {
	case mixed || r.Prompts == 0:
		return bad
	case kind == Number:
		ids, ok := tokenIDs(v)
		if !ok {
			return bad
		}
		r.PromptTokens, r.Prompts = ids, 1
	case kind != String && kind != Array:
		return bad
	}
	return nil
}

// Others are the prompts after the first: texts, or token ids, which are not nil
// then. What is no such list, which the engine refuses, has no ids.
func (r *Request) Others() iter.Seq2[string, []uint32] {
	return func(yield func(string, []uint32) bool) {
		if r.Prompts < 2 {
			return
		}
		first := true
		for e := range r.Body.Get(r.Route.PromptParam()).Elements() {
			if first {
				first = false
				continue
			}
			text, _ := e.Text()
			var ids []uint32
			if e.Kind == Array {
				if ids, _ = tokenIDs(e); ids == nil {
					ids = []uint32{}
				}
			}
			if !yield(text, ids) {
				return
			}
		}
	}
}

// tokenIDs reads a list of token ids; the result is not nil if ok. It walks
// the list by hand because a long prompt has a hundred thousand of them.
func tokenIDs(v Value) (ids []uint32, ok bool) {
	ids = make([]uint32, 0, bytes.Count(v.Raw, []byte(","))+1)
	in := v.Raw[1 : len(v.Raw)-1]
	for len(in) > 0 {
		var n uint64
		i := 0
		for i < len(in) && in[i] <= ' ' {
			i++
		}
		first := i
		for ; i < len(in) && '0' <= in[i] && in[i] <= '9'; i++ {
			if n = n*10 + uint64(in[i]-'0'); n > math.MaxUint32 {
				return nil, false
			}
		}
		digits := i - first
		for i < len(in) && in[i] <= ' ' {
			i++
		}
		if digits == 0 {
			return ids, i == len(in) && len(ids) == 0 // an empty list
		}
		ids = append(ids, uint32(n))
		if i < len(in) {
			if in[i] != ',' {
				return nil, false
			}
			i++
		}
		in = in[i:]
	}
	return ids, true
}

// CheckSpelling refuses members that differ from a known one only by case.
// Case-insensitive parsers take them for the known one, ours and the engine's
// do not, and nobody means them.
func CheckSpelling(o *Object, names []string) *Error {
	for i, m := range o.members {
		name := o.raw[m.name:m.nameEnd]
		if m.escaped {
			name = []byte(o.Name(i))
		}
		if slices.Contains(names, string(name)) {
			continue
		}
		for _, want := range names {
			if strings.EqualFold(string(name), want) {
				return Invalid(want, CodeInvalidJSON, "The request body has "+strconv.Quote(string(name))+" where "+strconv.Quote(want)+" is meant: names are case-sensitive.")
			}
		}
	}
	return nil
}

// fields reads typed members and keeps the first error.
type fields struct {
	o      *Object
	prefix string
	err    *Error
}

func (f *fields) wrong(name, want string) {
	if f.err == nil {
		f.err = Invalid(f.prefix+name, "", "The value of "+f.prefix+name+" must be "+want+".")
	}
}

func (f *fields) text(name string) string {
	v := f.o.Get(name)
	s, ok := v.Text()
	if !ok && v.Given() {
		f.wrong(name, "a string")
	}
	return s
}

func (f *fields) flag(name string, byDefault bool) bool {
	v := f.o.Get(name)
	if b, ok := v.Bool(); ok {
		return b
	}
	if v.Given() {
		f.wrong(name, "true or false")
	}
	return byDefault
}

// count reads a limit; one below 1 is left for the engine to refuse.
func (f *fields) count(name string) int {
	v := f.o.Get(name)
	if !v.Given() {
		return 0
	}
	n, ok := v.Int()
	if !ok {
		f.wrong(name, "an integer")
		return 0
	}
	return int(max(0, min(n, math.MaxInt32)))
}

func (f *fields) raw(name string, kind Kind) json.RawMessage {
	v := f.o.Get(name)
	if v.Kind == kind {
		return json.RawMessage(v.Raw)
	}
	if v.Given() {
		want := "a list"
		if kind == Obj {
			want = "an object"
		}
		f.wrong(name, want)
	}
	return nil
}
