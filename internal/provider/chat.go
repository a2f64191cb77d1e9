package provider

import (
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/openai"
)

// azureVersion is the api-version for endpoints of Azure that do not have the
// version in their path.
const azureVersion = "2024-10-21"

// known are the members that providers of OpenAI's API take, which refuse or
// charge for others. user, metadata, safety_identifier and prompt_cache_key are
// not among them: they tell who our clients are. Nor are store, which would
// leave prompts there, service_tier and web_search_options, which have prices of
// their own.
var known = map[openai.Route][]string{
	openai.RouteChat: {
		"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs",
		"frequency_penalty", "presence_penalty", "logit_bias", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "response_format",
		"reasoning_effort", "verbosity", "modalities", "audio", "prediction",
	},
	openai.RouteCompletions: {
		"model", "prompt", "stream", "stream_options", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "frequency_penalty", "presence_penalty",
		"logit_bias", "best_of", "echo", "suffix",
	},
	openai.RouteEmbeddings: {"model", "input", "encoding_format", "dimensions"},
}

// private are the members that no provider gets, not even one whose API may have
// more than OpenAI's: what only our engines know, and what tells who a client is.
var private = []string{
	"cache_salt", "kv_transfer_params", "vllm_xargs", "priority", "request_id", "user", "metadata", "safety_identifier", "prompt_cache_key", "store", "service_tier",
	"chat_template", "chat_template_kwargs", "mm_processor_kwargs", "return_token_ids", "return_tokens_as_token_ids", "prompt_embeds", "truncate_prompt_tokens",
	"add_generation_prompt", "continue_final_message", "add_special_tokens", "documents",
}

// inMessages and inTools are the members of a message and of a tool that OpenAI's API
// has.
var (
	inMessages = []string{"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
	inTools    = []string{"type", "function", "custom"}
)

func (t *Target) prepareChat(out *Request, in *Call, c *Credentials) *openai.Error {
	body, strict := in.Body, t.Schema != v1alpha1.SchemaOpenAICompatible
	var changes []openai.Change
	for i := range body.Len() {
		name := body.Name(i)
		if slices.Contains(private, name) || strict && !slices.Contains(known[in.Route], name) {
			changes = append(changes, openai.Remove(name))
			out.Dropped = append(out.Dropped, name[:min(len(name), 64)])
		}
	}
	if in.Route == openai.RouteChat {
		text, changed, err := cleanMessages(body.Get("messages"), strict)
		if err != nil {
			return openai.Invalid("messages", "", "The messages cannot be sent to this model.")
		}
		if changed {
			changes = append(changes, openai.Set(text, "messages"))
		}
		if strict {
			text, changed, err := edited(body.Get("tools"), func(tool *openai.Object) []openai.Change { return others(tool, inTools) })
			if err != nil {
				return openai.Invalid("tools", "", "The tools cannot be sent to this model.")
			}
			if changed {
				changes = append(changes, openai.Set(text, "tools"))
			}
		}
	}
	if in.Route != openai.RouteEmbeddings {
		changes = append(changes, t.output(in)...)
	}
	if in.Stream && in.Route != openai.RouteEmbeddings {
		changes = append(changes, openai.Set([]byte(`{"include_usage":true}`), "stream_options"))
	}
	changes = append(changes, openai.Set(openai.AppendString(nil, t.Model), "model"))
	u, e := t.chatURL(in)
	if e != nil {
		return e
	}
	if u.RawQuery != "" || t.Schema == v1alpha1.SchemaAzureOpenAI && strings.Contains(u.Path, "/deployments/") {
		changes = append(changes, openai.Remove("model")) // the path has it
	}
	text, err := body.Apply(make([]byte, 0, len(body.Raw())+128), changes...)
	if err != nil {
		return openai.Invalid("", "", "A member of the request has the wrong type.")
	}
	out.URL, out.Body = u, text
	switch {
	case c.Bearer != "":
		out.Header.Set("Authorization", "Bearer "+c.Bearer)
	case c.APIKey == "":
	case t.Schema == v1alpha1.SchemaAzureOpenAI:
		out.Header.Set("Api-Key", c.APIKey)
	default:
		out.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	return nil
}

// chatURL is where the route is.
func (t *Target) chatURL(in *Call) (*url.URL, *openai.Error) {
	public, path := "", "/v1"
	switch t.Schema {
	case v1alpha1.SchemaOpenAI:
		public = "https://api.openai.com"
	case v1alpha1.SchemaDatabricks:
		path = "/serving-endpoints"
	case v1alpha1.SchemaBedrock:
		public, path = "https://bedrock-runtime."+t.Region+".amazonaws.com", "/openai/v1"
	case v1alpha1.SchemaAzureOpenAI:
		path = "/openai/deployments/" + t.Model
	}
	u, e := t.base(public, path)
	if e != nil {
		return nil, e
	}
	if t.Schema == v1alpha1.SchemaAzureOpenAI && strings.HasPrefix(u.Path, "/openai/deployments/") {
		u.RawQuery = "api-version=" + azureVersion
		u.RawPath = "" // a deployment's name has no character that needs escaping
	}
	u.Path += strings.TrimPrefix(in.Route.Path(), "/v1")
	return u, nil
}

// output bounds what is generated. OpenAI's newer models refuse max_tokens, and
// all of its chat models take the name that replaced it.
func (t *Target) output(in *Call) (changes []openai.Change) {
	newer, asked := "max_completion_tokens", in.Body.Get("max_completion_tokens")
	if in.Route != openai.RouteChat || !asked.Given() {
		asked = in.Body.Get("max_tokens")
	}
	name := "max_tokens"
	if in.Route == openai.RouteChat && (t.Schema == v1alpha1.SchemaOpenAI || t.Schema == v1alpha1.SchemaAzureOpenAI || in.Body.Get(newer).Given()) {
		name = newer
	}
	n, given := asked.Int()
	if !given && t.MaxTokensCap == 0 {
		return nil
	}
	if t.MaxTokensCap > 0 && (!given || n > int64(t.MaxTokensCap)) {
		n = int64(t.MaxTokensCap)
	}
	for _, other := range []string{"max_tokens", newer} {
		if other != name {
			changes = append(changes, openai.Remove(other))
		}
	}
	return append(changes, openai.Set(strconv.AppendInt(nil, n, 10), name))
}

// cleanMessages leaves out what other models said to themselves, and other
// members of messages that the API has not. It has no references to tools either,
// only their names.
func cleanMessages(list openai.Value, strict bool) (text []byte, changed bool, err error) {
	return edited(list, func(m *openai.Object) (changes []openai.Change) {
		if !strict {
			for _, name := range [...]string{"reasoning", "reasoning_content"} {
				if m.Get(name).Kind != openai.Absent {
					changes = append(changes, openai.Remove(name))
				}
			}
			return changes
		}
		changes = others(m, inMessages)
		if text, changed := namedTools(m.Get("content")); changed {
			changes = append(changes, openai.Set(text, "content"))
		}
		return changes
	})
}

// namedTools makes texts of the references to tools in a message's content.
func namedTools(content openai.Value) (text []byte, changed bool) {
	text, changed, err := edited(content, func(part *openai.Object) []openai.Change {
		if kind, _ := part.Get("type").Text(); kind != "tool_reference" {
			return nil
		}
		return []openai.Change{openai.Set([]byte(`"text"`), "type"), openai.Remove("name"), openai.Set(raw(part.Get("name")), "text")}
	})
	return text, changed && err == nil
}

func raw(v openai.Value) []byte {
	if v.Kind != openai.String {
		return []byte(`""`)
	}
	return v.Raw
}

// others are changes that leave only these members.
func others(o *openai.Object, names []string) (changes []openai.Change) {
	for i := range o.Len() {
		if name := o.Name(i); !slices.Contains(names, name) {
			changes = append(changes, openai.Remove(name))
		}
	}
	return changes
}

// edited makes changes to the objects of a list; changed says that there were any.
func edited(list openai.Value, changes func(o *openai.Object) []openai.Change) (text []byte, changed bool, err error) {
	text = append(make([]byte, 0, len(list.Raw)), '[')
	var o openai.Object
	for v := range list.Elements() {
		if len(text) > 1 {
			text = append(text, ',')
		}
		if v.Kind != openai.Obj {
			text = append(text, v.Raw...)
			continue
		}
		if err := o.Parse(v.Raw, 0); err != nil {
			return nil, false, err
		}
		made := changes(&o)
		changed = changed || len(made) > 0
		if text, err = o.Apply(text, made...); err != nil {
			return nil, false, err
		}
	}
	return append(text, ']'), changed, nil
}
