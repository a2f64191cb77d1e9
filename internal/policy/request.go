package policy

import (
	"hash/fnv"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Request is what rules can ask about a request. Evaluate does not change it.
type Request struct {
	// ID makes weighted choices repeatable: equal ids choose equally.
	ID string
	// Model is the name that the client asked for.
	Model string
	// Tenants are the caller's tenant and those above it, nearest first.
	Tenants []string
	QoS     v1alpha1.QoS
	// PromptTokens is the length of the prompt.
	PromptTokens int
	// MaxTokens limits the output; 0 means no limit.
	MaxTokens int
	Endpoint  v1alpha1.APIEndpoint
	Stream    bool
	// Tools are the names of the tools that the request offers to the model.
	Tools []string
	// Headers by lower-case name.
	Headers map[string]string
	// Claims of the caller's token: JSON values.
	Claims map[string]any
	Tags   Tags
}

// Tags are what the classifier said. The zero value says nothing about any tag.
type Tags struct {
	// Present tags.
	Present []string
	// Complete says that the whole prompt was classified, so that every other
	// tag is absent but for those of Unknown. Otherwise the others are unknown.
	Complete bool
	// Absent tags, known to be so whatever Complete says: names, or beginnings of
	// names with a star.
	Absent []string
	// Unknown tags, whatever Complete says.
	Unknown []UnknownTag
}

// seed is the request's own number in [0, n).
func (r *Request) seed(n uint64) uint64 {
	h := fnv.New64a()
	h.Write([]byte(r.ID)) // never fails
	x := h.Sum64()
	// FNV's low bits are weak for short ids.
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 32
	return x % n
}

// glob is a tag, or a prefix of tags where a star ends it.
type glob struct {
	text   string
	prefix bool
}

func newGlob(s string) glob {
	if p, ok := strings.CutSuffix(s, "*"); ok {
		return glob{p, true}
	}
	return glob{s, false}
}

func newGlobs(list []string) []glob {
	out := make([]glob, len(list))
	for i, s := range list {
		out[i] = newGlob(s)
	}
	return out
}

func (g glob) matches(tag string) bool {
	if g.prefix {
		return strings.HasPrefix(tag, g.text)
	}
	return tag == g.text
}

// meets reports whether some tag fits both.
func (g glob) meets(o glob) bool {
	switch {
	case g.prefix && o.prefix:
		return strings.HasPrefix(g.text, o.text) || strings.HasPrefix(o.text, g.text)
	case g.prefix:
		return g.matches(o.text)
	}
	return o.matches(g.text)
}

// covers reports whether every tag that fits o fits g too.
func (g glob) covers(o glob) bool {
	if o.prefix {
		return g.prefix && strings.HasPrefix(o.text, g.text)
	}
	return g.matches(o.text)
}

// assumption is what holds of tags that are unknown.
type assumption struct{ present, absent []glob }

// Tags that count as present, or as absent, while they are unknown, unless the
// policy says otherwise.
var (
	assumedPresent = []string{"pii-*", "secret-*", "injection"}
	assumedAbsent  = []string{"complexity-*", "language-*"}
)

// holds says whether an unknown tag counts as present. One that both lists name
// does: the cautious side wins.
func (a *assumption) holds(g glob) bool {
	return slices.ContainsFunc(a.present, g.meets)
}

// has reports whether the request has a tag, known or assumed.
func (t *Tags) has(g glob, a *assumption) bool {
	if slices.ContainsFunc(t.Present, g.matches) {
		return true
	}
	return !t.absent(g) && a.holds(g)
}

// match is a compiled RequestMatch.
type match struct {
	model, endpoint string
	tenants         []string
	all, any, none  []glob
	qos             v1alpha1.QoS
	more, less      int64 // bounds of the prompt's length, both excluded; less 0: none
	headers         []v1alpha1.HeaderMatch
	claims          []v1alpha1.ClaimMatch
	when            *expression
}

// holds reports whether a request matches. onError is the result of a CEL
// expression that cannot be evaluated.
func (m *match) holds(r *Request, a *assumption, onError bool) bool {
	switch {
	case m.model != "" && m.model != r.Model,
		m.qos != "" && m.qos != r.QoS,
		m.endpoint != "" && m.endpoint != string(r.Endpoint),
		int64(r.PromptTokens) <= m.more,
		m.less > 0 && int64(r.PromptTokens) >= m.less:
		return false
	}
	if len(m.tenants) > 0 && !slices.ContainsFunc(r.Tenants, func(t string) bool { return slices.Contains(m.tenants, t) }) {
		return false
	}
	for _, g := range m.all {
		if !r.Tags.has(g, a) {
			return false
		}
	}
	if len(m.any) > 0 && !slices.ContainsFunc(m.any, func(g glob) bool { return r.Tags.has(g, a) }) {
		return false
	}
	for _, g := range m.none {
		if r.Tags.has(g, a) {
			return false
		}
	}
	for i := range m.headers {
		if v, ok := r.Headers[m.headers[i].Name]; !ok || v != m.headers[i].Value {
			return false
		}
	}
	for i := range m.claims {
		if !claimHas(r.Claims[m.claims[i].Name], m.claims[i].Value) {
			return false
		}
	}
	if m.when != nil {
		ok, err := m.when.eval(r, a)
		if err != nil {
			return onError
		}
		return ok
	}
	return true
}

// claimHas reports whether a claim is a value, or a list with it.
func claimHas(claim any, value string) bool {
	switch c := claim.(type) {
	case string:
		return c == value
	case []any:
		return slices.ContainsFunc(c, func(e any) bool { s, ok := e.(string); return ok && s == value })
	case []string:
		return slices.Contains(c, value)
	}
	return false
}

// readsTags reports whether the match depends on tags.
func (m *match) readsTags() bool {
	return len(m.all)+len(m.any)+len(m.none) > 0 || m.when != nil && m.when.readsTags
}

// readsHeaders reports whether the match depends on headers.
func (m *match) readsHeaders() bool {
	return len(m.headers) > 0 || m.when != nil && m.when.headers.any()
}
