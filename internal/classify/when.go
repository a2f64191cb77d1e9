package classify

import (
	"context"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/kinference/kinference/internal/expr"
)

// Bounds of the expressions of custom tags.
const (
	// maxWhenParts of a prompt are offered to expressions.
	maxWhenParts = 4096
	// maxWhenWork of all evaluations for one prompt, in CEL's unit: 50 milliseconds at the worst.
	maxWhenWork = 500_000
	// whenOverhead is what an evaluation costs beside its work.
	whenOverhead = 10
)

var roleNames = [roles]string{"user", "system", "user", "assistant", "tool_result", "tool_arguments", "document", "metadata"}

var outcomes = [...]State{expr.Unknown: Unknown, expr.False: False, expr.True: True}

// customWhen is an expression of a custom tag.
type customWhen struct {
	*expr.When
	tag, rule int
}

// noted is what the expressions of custom tags read of a prompt. There is none
// where no custom tag has an expression.
type noted struct {
	reads     struct{ parts, text, languages bool }
	parts     []notedPart
	more      bool // more parts than are noted
	messages  int
	message   int
	languages []string
}

type notedPart struct {
	role    Role
	media   Media
	message int
	length  int
	text    string // whole, or its beginning
	cut     bool
}

// note begins to note, where there are expressions.
func (m *merger) note() {
	if m.noted != nil || m.custom == nil || len(m.custom.whens) == 0 {
		return
	}
	n := &noted{}
	m.noted = n
	for _, w := range m.custom.whens {
		n.reads.parts = n.reads.parts || w.ReadsPart
		n.reads.text = n.reads.text || w.ReadsText
		n.reads.languages = n.reads.languages || w.ReadsLanguages
	}
}

func (n *noted) start(p Part) {
	if n.messages == 0 || p.Message != n.message {
		n.messages, n.message = n.messages+1, p.Message
	}
	if !n.reads.parts {
		return
	}
	if len(n.parts) == maxWhenParts {
		n.more = true
		return
	}
	n.parts = append(n.parts, notedPart{role: p.Role, media: p.Media, message: p.Message})
	n.grow(p.Text)
}

// grow adds text to the last part.
func (n *noted) grow(text string) {
	if !n.reads.parts || n.more {
		return
	}
	p := &n.parts[len(n.parts)-1]
	p.length += len(text)
	if !n.reads.text || p.cut {
		return
	}
	if p.cut = p.length > expr.MaxText; p.cut {
		// Only the start is told; a clone, so that no long text is held by it.
		p.text = strings.Clone(head(p.text + text[:min(len(text), expr.MaxStart+utf8.UTFMax)]))
		return
	}
	p.text += text
}

func (n *noted) language(f *features) {
	if !n.reads.languages {
		return
	}
	if l, _ := f.language(); l != "" && !slices.Contains(n.languages, l) {
		n.languages = append(n.languages, l)
	}
}

// head is the beginning of a text, without half a character at its end.
func head(s string) string {
	n := expr.MaxStart
	if len(s) <= n {
		return s
	}
	for n > expr.MaxStart-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// fact is the part as expressions see it.
func (p *notedPart) fact() expr.Part {
	f := expr.Part{Role: roleNames[p.role], Kind: mediaNames[p.media], Message: p.message, Length: p.length, Text: p.text}
	switch {
	case p.media == MediaTokens:
		f.TextCause = causeTokens
	case p.media != MediaText:
		f.TextCause = causeMedia
	case p.cut:
		f.TextCause = causeOversize
	case !utf8.ValidString(p.text):
		f.TextCause = causeUTF8
	}
	f.Start = strings.ToValidUTF8(head(p.text), string(utf8.RuneError))
	return f
}

// whens evaluates the expressions of custom tags, over all that is known by now,
// and completes their tags, which begin at first.
func (m *merger) whens(ctx context.Context, r *Result, first int) {
	m.note() // a prompt may have no part
	if m.noted == nil {
		return
	}
	n := m.noted
	slices.Sort(n.languages)
	facts := &expr.Facts{Prompt: expr.Prompt{Parts: m.parts, Messages: n.messages, Length: m.bytes, Languages: n.languages, LanguageCauses: m.causes[detLanguage]}}
	if len(n.languages) == 0 && len(facts.Prompt.LanguageCauses) == 0 {
		facts.Prompt.LanguageCauses = []string{causeUnsure}
	}
	facts.Tags = m.tagFacts(r)
	work := uint64(maxWhenWork)
	for i := range m.custom.whens {
		w := &m.custom.whens[i]
		t := &r.Tags[first+w.tag]
		state, part, causes := m.when(ctx, w, facts, &work)
		switch {
		case state == True:
			h := placedHit{hit{kind: kindCustom, score: 1, rule: m.custom.tags[w.tag].rules[w.rule].name}, max(part, 0)}
			if part >= 0 {
				h.end = n.parts[part].length
			}
			t.State, t.Causes, t.Score = True, nil, 1
			t.reason(&h, "custom")
		case state == Unknown && t.State != True:
			t.State, t.Causes = Unknown, sortedSet(append(slices.Clone(t.Causes), causes...))
		}
	}
}

// when evaluates one expression: for the prompt, or for its parts until one is
// found; then the part's number, else -1.
func (m *merger) when(ctx context.Context, w *customWhen, facts *expr.Facts, work *uint64) (state State, part int, causes []string) {
	defer func() {
		if recover() != nil { // the value may hold text
			state, causes = Unknown, []string{causePanic}
		}
	}()
	spend := func(cost uint64) bool {
		if ctx.Err() != nil {
			causes = append(causes, causeDeadline)
			return false
		}
		if cost > *work {
			causes = append(causes, causeRuleLimit)
			return false
		}
		*work -= cost
		return true
	}
	if !w.ReadsPart {
		if !spend(whenOverhead + w.Cost) {
			return Unknown, -1, causes
		}
		out, why := w.Eval(facts)
		return outcomes[out], -1, why
	}
	state = False
	var fact expr.Part
	for i := range m.noted.parts {
		p := &m.noted.parts[i]
		if !m.custom.tags[w.tag].scope[p.role] {
			continue
		}
		cost := w.Cost
		if w.ReadsText { // it is that of the longest text
			cost = cost * uint64(max(len(p.text), expr.MaxStart)) / expr.MaxText
		}
		if !spend(whenOverhead + cost) {
			return Unknown, -1, causes
		}
		fact = p.fact()
		facts.Part = &fact
		out, why := w.Eval(facts)
		switch out {
		case expr.True:
			return True, i, nil
		case expr.Unknown:
			state, causes = Unknown, append(causes, why...)
			if len(causes) > 64 {
				causes = sortedSet(causes)
			}
		}
	}
	if m.noted.more {
		state, causes = Unknown, append(causes, causeParts)
	}
	return state, -1, causes
}

// tagFacts are the tags that expressions read; what an expression itself decides
// is not among them.
func (m *merger) tagFacts(r *Result) map[string]*expr.Tag {
	c := m.custom
	if len(c.read) == 0 {
		return nil
	}
	out := make(map[string]*expr.Tag, len(c.read))
	for i := range r.Tags {
		t := &r.Tags[i]
		if !c.read[t.Name] {
			continue
		}
		// Two tags of one name count as one.
		if old := out[t.Name]; old == nil || t.State == True || t.State == Unknown && old.State == False.String() {
			out[t.Name] = &expr.Tag{State: t.State.String(), Score: float64(t.Score), Causes: t.Causes}
		}
	}
	return out
}
