// Package prompt turns a request into what the router compares with workers'
// caches: the number of tokens and the hashes of the blocks, per profile.
//
// It renders the chat template and tokenises here when the profile names a
// model folder. Where that is not possible it asks one of the workers, within
// a short time, for the rendered prompt or the token ids, and when they cannot
// tell either it hashes the text itself (approximate mode), which still
// recognises a conversation that goes on. The same goes for a profile whose
// local ids were found not to be those of its engines. A wrong or missing prefix
// costs a cache hit, never correctness, so no failure here fails a request. A
// Maker is safe for concurrent use.
package prompt

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/tokens"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// Mode is how a prompt's tokens became known.
type Mode string

// The modes, best first.
const (
	Given       Mode = "given"       // the client sent token ids
	Local       Mode = "local"       // own template and tokenizer
	Render      Mode = "render"      // the worker's render endpoint
	Tokenize    Mode = "tokenize"    // the worker's /tokenize
	Approximate Mode = "approximate" // hashes of text
)

const (
	// approxBytes of text stand for one token; English has about four.
	approxBytes = 4
	// approxBlock is the block size in such tokens while none is known.
	approxBlock = 64
	// maxBase64 bytes of a picture count: 256 tokens.
	maxBase64 = 1024
)

// Settings of a Maker.
type Settings struct {
	CacheBytes int           // bound of the prefix cache, for each model folder
	WorkerTime time.Duration // most that asking a worker may take
	Retry      time.Duration // until something that failed is tried again
	Transport  http.RoundTripper
	Log        *slog.Logger
	// Distrusts reports that the ids made here for a profile are not those of
	// its engines, so that those must be asked; nil: never.
	Distrusts func(*catalog.Profile) bool
}

// Prompt is a request as one profile sees it.
type Prompt struct {
	Profile   *catalog.Profile
	Mode      Mode
	Tokens    int
	Local     int      // tokens as counted here, whatever the mode; -1: not counted
	IDs       []uint32 // nil in approximate mode; do not modify
	Cached    int      // of Tokens, how many the prefix cache had
	BlockSize int
	Hashes    []kvhash.Hash
	// Others are the prompts after the first, of a request that has several. All
	// above is of the first.
	Others []Other
}

// Exact reports whether Tokens is a count and no estimate.
func (p *Prompt) Exact() bool { return p.Mode != Approximate }

// Maker makes prompts.
type Maker struct {
	set Settings

	mu      sync.RWMutex
	models  map[string]*model // by folder
	workers map[string]*asker // by profile
}

// model is a loaded model folder; what could not be loaded is nil.
type model struct {
	cache    *tokens.PrefixCache
	template *chat.Template
	harmony  bool // prompts of chats are made by Harmony
	tried    time.Time
	failed   bool // something is missing that should be there
}

// New makes a Maker.
func New(s Settings) *Maker {
	return &Maker{set: s, models: map[string]*model{}, workers: map[string]*asker{}}
}

// Prepare loads the model folders of a catalog, which can take a second each,
// and forgets what the catalog no longer has. Folders are read once; those
// that failed are tried again by a later call. It reports whether a folder
// could not be loaded.
func (m *Maker) Prepare(v *catalog.View) (failed bool) {
	models, workers := map[string]*model{}, map[string]*asker{}
	m.mu.RLock()
	for _, name := range v.Models {
		for _, p := range name.Profiles {
			if workers[p.ID] = m.workers[p.ID]; workers[p.ID] == nil {
				workers[p.ID] = &asker{}
			}
			if p.TokenizerPath != "" {
				models[p.TokenizerPath] = m.models[p.TokenizerPath]
			}
		}
	}
	m.mu.RUnlock()
	for path, old := range models {
		if old == nil || old.failed && time.Since(old.tried) >= m.set.Retry {
			models[path] = m.load(path)
		}
		failed = failed || models[path].failed
	}
	m.mu.Lock()
	m.models, m.workers = models, workers
	m.mu.Unlock()
	return failed
}

func (m *Maker) load(path string) *model {
	out := &model{tried: time.Now()}
	if t, err := tokens.Load(path); err != nil {
		out.failed = true
		m.set.Log.Warn("tokenizer not usable, asking workers instead", "path", path, "err", err)
	} else {
		out.cache = tokens.NewPrefixCache(t, m.set.CacheBytes)
	}
	var err error
	if out.template, err = chat.Load(path); err != nil {
		// A model that has no template will not get one by waiting.
		out.failed = out.failed || !errors.Is(err, chat.ErrNoTemplate)
		out.harmony = errors.Is(err, chat.ErrHarmony)
		m.set.Log.Warn("chat template not usable, asking workers instead", "path", path, "err", err)
	}
	return out
}

// Make makes one Prompt for each profile, in their order, each prompt of a request
// with several hashed on its own.
func (m *Maker) Make(ctx context.Context, r *openai.Request, profiles []*catalog.Profile) []Prompt {
	out := make([]Prompt, len(profiles))
	var deadline context.Context // for all questions to workers together
	var own encoded              // by the newest profile's tokenizer
	// What the engine may cut is counted here as it stands: what is left of it nobody knows.
	here := r.PromptTokens == nil && !(r.EngineOnly && r.Body.Get("chat_template").Given())
	for i, p := range profiles {
		q := &out[i]
		q.Profile, q.BlockSize, q.Local = p, p.BlockSize, -1
		m.mu.RLock()
		local, ask := m.models[p.TokenizerPath], m.workers[p.ID]
		m.mu.RUnlock()
		if here && (i == 0 || p.TokenizerPath != profiles[i-1].TokenizerPath) {
			own = local.encode(r)
		}
		if own.ok && !r.EngineOnly {
			q.Local = len(own.ids)
		}
		switch {
		case r.EngineOnly:
			q.Mode = Approximate
		case r.PromptTokens != nil:
			q.Mode, q.IDs = Given, r.PromptTokens
		case own.ok && !(m.set.Distrusts != nil && m.set.Distrusts(p)):
			q.Mode, q.IDs, q.Cached = Local, own.ids, own.cached
		case ask != nil && len(p.Workers) > 0 && !hasMedia(r.Messages):
			if deadline == nil {
				var cancel context.CancelFunc
				deadline, cancel = context.WithTimeout(ctx, m.set.WorkerTime)
				defer cancel()
			}
			q.IDs, q.Mode = ask.ask(deadline, &m.set, r, p, local.ways(r.Route))
		default:
			q.Mode = Approximate
		}
		ids, root := q.IDs, kvhash.Root(p.LoRA, r.CacheSalt)
		if q.Mode == Approximate {
			ids, root = pack(r), kvhash.Extra(root, "text")
			if q.BlockSize == 0 {
				q.BlockSize = approxBlock
			}
		}
		if q.Tokens = len(ids); r.EngineOnly {
			q.Tokens = max(q.Tokens, len(own.ids))
		}
		q.Hashes = hashed(root, ids, q.BlockSize)
		if r.Prompts > 1 {
			var by *model // whose ids are the engine's
			if q.Mode == Local {
				by = local
			}
			q.Others = by.others(r, root, q.BlockSize, q.Mode == Approximate)
		}
	}
	return out
}

func hashed(root kvhash.Hash, ids []uint32, size int) []kvhash.Hash {
	if size <= 0 {
		return nil
	}
	return kvhash.Append(make([]kvhash.Hash, 0, len(ids)/size), root, ids, size)
}

// ways are the routes by which a worker can tell ids, the best first.
func (m *model) ways(route openai.Route) []Mode {
	if m != nil && m.harmony && route == openai.RouteChat {
		return []Mode{Render} // its /tokenize would use the template
	}
	if route == openai.RouteEmbeddings {
		return []Mode{Tokenize} // they have no render route
	}
	return []Mode{Render, Tokenize}
}

// encoded is a prompt by a local tokenizer; not ok if it has no way to make it.
type encoded struct {
	ids    []uint32
	cached int // how many of them the prefix cache had
	ok     bool
}

// Estimate is about how many tokens a request's prompts have, by the length of
// their text.
func Estimate(r *openai.Request) int {
	n := (len(r.Tools) + len(r.Messages) + len(r.Prompt)) / approxBytes
	if r.PromptTokens != nil {
		n = len(r.PromptTokens)
	}
	for text, ids := range r.Others() {
		n += len(text)/approxBytes + len(ids)
	}
	return n
}

// encode renders and tokenises r. Where our rendering fails the engine's may
// not, and its refusal is the right one.
func (m *model) encode(r *openai.Request) (e encoded) {
	if m == nil || m.cache == nil {
		return e
	}
	text := r.Prompt
	if r.Route == openai.RouteChat {
		if m.template == nil {
			return e
		}
		var err error
		if text, err = m.template.Render(chat.Request{
			Messages: r.Messages, Tools: r.Tools, Documents: r.Documents, Kwargs: r.TemplateKwargs, ReasoningEffort: r.ReasoningEffort,
			AddGenerationPrompt: r.AddGenerationPrompt, ContinueFinalMessage: r.ContinueFinalMessage,
		}); err != nil {
			return e
		}
	}
	e.ids, e.cached = m.cache.Encode(text, r.AddSpecial)
	e.ok = true
	return e
}

// mediaParts are members of content parts that are no text, without the quote before
// them. Inside of strings their quotes would be escaped.
var mediaParts = [...]string{`image_url"`, `input_image"`, `image_embeds"`, `image_pil"`, `input_audio"`, `audio_url"`, `audio_embeds"`, `video_url"`}

// hasMedia reports whether messages have pictures or sound. Workers are not
// asked about those: they would fetch and prepare them twice, and the tokens
// that stand for a picture are the same for all pictures.
func hasMedia(messages []byte) bool {
	for {
		i := bytes.IndexByte(messages, '"')
		if i < 0 {
			return false
		}
		messages = messages[i+1:]
		for _, name := range mediaParts {
			if len(messages) >= len(name) && string(messages[:len(name)]) == name {
				return true
			}
		}
	}
}

// pack makes pseudo tokens of the text of r: tools first, as templates put
// them, then the messages. The next turn of a conversation begins with the
// same bytes.
func pack(r *openai.Request) []uint32 {
	if r.PromptTokens != nil { // the engine cuts them
		return r.PromptTokens
	}
	messages := r.Messages
	if n := len(messages); n > 0 {
		messages = messages[:n-1] // the bracket at the end is where the next turn goes on
	}
	parts := [...][]byte{r.Tools, shorten(messages), []byte(r.Prompt)}
	n := 0
	for _, p := range parts {
		n += (len(p) + approxBytes - 1) / approxBytes
	}
	ids := make([]uint32, 0, n)
	for _, p := range parts {
		ids = packed(ids, p)
	}
	return ids
}

// shorten cuts long stretches of base64, which are pictures or sound, to
// maxBase64 bytes with a digest of the rest: engines make hundreds of tokens
// of them, not hundreds of thousands.
func shorten(text []byte) []byte {
	var out []byte
	done := 0
	for start := 0; start+maxBase64 < len(text); {
		// From the far end, since words are short: nearly all of a text is skipped.
		i := start + maxBase64
		for i >= start && inBase64(text, i) {
			i--
		}
		if i >= start {
			start = i + 1
			continue
		}
		end := start + maxBase64 + 1
		for end < len(text) && inBase64(text, end) {
			end++
		}
		head := start + maxBase64 - sha256.Size
		sum := sha256.Sum256(text[head:end])
		out = append(append(out, text[done:head]...), sum[:]...)
		done, start = end, end
	}
	if out == nil {
		return text
	}
	return append(out, text[done:]...)
}

// inBase64 reports whether a byte may be part of base64: some encoders of JSON put a
// backslash before a slash. Other escapes are text.
func inBase64(text []byte, i int) bool {
	return isBase64[text[i]] || text[i] == '\\' && i+1 < len(text) && text[i+1] == '/'
}

// isBase64 holds base64's characters in both alphabets.
var isBase64 = func() (set [256]bool) {
	for _, c := range []byte("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=") {
		set[c] = true
	}
	return set
}()
