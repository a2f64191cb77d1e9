package policy

import (
	"slices"
	"strings"
)

// UnknownTag is a tag that nobody could tell.
type UnknownTag struct {
	// Tag is its name, or the beginning of names with a star.
	Tag string `json:"tag"`
	// Causes are codes, for whoever asks why; see the classifier's proto.
	Causes []string `json:"causes"`
}

// CauseNotLookedFor is the cause of a tag that nobody has looked for.
const CauseNotLookedFor = "not_looked_for"

// absent reports whether no tag that fits g is there, for sure. What Absent says
// is more exact than what Unknown says.
func (t *Tags) absent(g glob) bool {
	for _, a := range t.Absent {
		if newGlob(a).covers(g) {
			return true
		}
	}
	if !t.Complete {
		return false
	}
	for i := range t.Unknown {
		if newGlob(t.Unknown[i].Tag).meets(g) {
			return false
		}
	}
	return true
}

// Doubt makes those of the tags unknown, names or beginnings with a star, about
// which t says nothing of its own: whoever filled it did not know that a policy
// asks. It copies what it changes. A t without Absent and Unknown stays, as of
// one who says only that everything is known.
func (t *Tags) Doubt(asked []string) {
	if !t.Complete || len(t.Absent)+len(t.Unknown) == 0 {
		return
	}
	for _, name := range asked {
		g := newGlob(name)
		if slices.ContainsFunc(t.Present, g.matches) || slices.ContainsFunc(t.Absent, func(a string) bool { return newGlob(a).covers(g) }) ||
			slices.ContainsFunc(t.Unknown, func(u UnknownTag) bool { return newGlob(u.Tag).meets(g) }) {
			continue
		}
		t.Unknown = append(slices.Clip(t.Unknown), UnknownTag{Tag: name, Causes: []string{CauseNotLookedFor}})
	}
}

// TagsRead are the tags that rules look at which could match a request for the
// model: names, or beginnings of names with a star, sorted.
func (s *Set) TagsRead(model string) []string {
	var out []string
	for m := range s.matches(model) {
		out = m.addTags(out)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// LimitsReadTags are the tags that limits of the policy look at, as TagsRead.
func (p *Policy) LimitsReadTags() []string {
	var out []string
	for _, matches := range p.limits {
		for j := range matches {
			out = matches[j].addTags(out)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// addTags appends the tags that the match depends on. CEL that computes a name
// asks for all of them.
func (m *match) addTags(out []string) []string {
	for _, list := range [...][]glob{m.all, m.any, m.none} {
		for _, g := range list {
			out = append(out, g.String())
		}
	}
	if m.when != nil {
		out = append(out, m.when.tags...)
	}
	return out
}

// MatchTag reports whether a tag is the one that pattern names, or begins as it does
// where it ends in a star.
func MatchTag(pattern, tag string) bool {
	if p, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(tag, p)
	}
	return pattern == tag
}
