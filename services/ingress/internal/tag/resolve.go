package tag

import (
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/policy"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Result is what policies may believe of a prompt's tags.
type Result struct {
	// Present tags.
	Present []string
	// Complete says that all of the prompt was read.
	Complete bool
	// Absent of the tags that policies read.
	Absent []string
	// Unknown tags, or beginnings with a star, and why.
	Unknown []*routerv1.UnknownTag
	// Outcome is whole, partial or the cause of an answer that is none.
	Outcome string
}

// Unclassified is the result of a prompt of which nothing is known.
func Unclassified(cause string) Result {
	return Result{Unknown: []*routerv1.UnknownTag{{Tag: "*", Causes: []string{cause}}}, Outcome: cause}
}

// Bounds of an answer. No tag has a longer name than its definition allows.
const maxTags, maxName, maxUnknown, maxCoverage = 512, 64, 64, 64

// sensible reports whether an answer can be one to the prompt: it accounts for
// each byte. What was not accounted for was not read.
func sensible(r *classifierv1.ClassifyResponse, p *Prompt) bool {
	bytes := uint64(p.Bytes)
	if r.GetBytes() != bytes || len(r.GetTags()) == 0 || len(r.GetTags()) > maxTags || len(r.GetCoverage()) == 0 || len(r.GetCoverage()) > maxCoverage {
		return false
	}
	if slices.ContainsFunc(r.GetTags(), func(t *classifierv1.Tag) bool { return len(t.GetName()) > maxName }) {
		return false
	}
	for _, c := range r.GetCoverage() {
		if c.GetOf() != bytes || c.GetBytes() > bytes || c.GetComplete() && (c.GetBytes() != bytes || len(c.GetCauses()) > 0) {
			return false
		}
	}
	return true
}

// families are the beginnings of built-in tags, alone those without a dash.
var families = []string{"pii-", "secret-", "complexity-", "language-", "modality-", "length-", "injection", "code"}

// codes that may be told. What else a peer says stays here.
var codes = []string{
	"media", "tokens", "oversize", "deadline", "panic", "undecodable", "opaque", "decode_depth", "decode_limit", "inflate_limit", "language", "part_limit",
	"finding_limit", "unsure", "no_text", causeUnread, "rule_limit", "rule_error", "not_looked_for",
}

// family is the part of a built-in tag's name that stands for its kin; empty for
// tags of one's own.
func family(name string) string {
	for _, f := range families {
		if rest, ok := strings.CutPrefix(name, f); ok && (rest == "" || strings.HasSuffix(f, "-") && len(rest) <= 32 && strings.Trim(rest, "abcdefghijklmnopqrstuvwxyz-_") == "") {
			return f
		}
	}
	return ""
}

type told struct {
	state  classifierv1.State
	causes []string
}

// resolve makes of a sensible answer what policies may believe.
func resolve(resp *classifierv1.ClassifyResponse, p *Prompt, read []string) Result {
	r := Result{Complete: p.Whole, Outcome: "whole"}
	for _, c := range resp.GetCoverage() {
		r.Complete = r.Complete && c.GetComplete()
	}
	if !r.Complete {
		r.Outcome = "partial"
	}
	tags := map[string]told{}
	var names []string
	for _, t := range resp.GetTags() {
		name := t.GetName()
		own := func(pattern string) bool { return pattern != "*" && policy.MatchTag(pattern, name) }
		if family(name) == "" && !slices.ContainsFunc(read, own) {
			continue // nobody asked for it
		}
		if _, twice := tags[name]; !twice {
			names = append(names, name)
		}
		tags[name] = merge(tags[name], state(t, p.Whole))
	}
	kin := map[string][]string{}
	for _, name := range names {
		switch t := tags[name]; t.state {
		case classifierv1.State_STATE_TRUE:
			r.Present = append(r.Present, name)
		case classifierv1.State_STATE_FALSE:
		default:
			if f := family(name); strings.HasSuffix(f, "-") {
				kin[f] = append(kin[f], name)
			} else {
				r.unknown(name, t.causes)
			}
		}
	}
	for _, f := range families {
		list := kin[f]
		if len(list) == 0 {
			continue
		}
		alike := func(name string) bool {
			return family(name) != f || slices.Equal(tags[name].causes, tags[list[0]].causes) && tags[name].state == tags[list[0]].state
		}
		if len(list) > 1 && !slices.ContainsFunc(names, func(n string) bool { return !alike(n) }) {
			r.unknown(f+"*", tags[list[0]].causes)
			continue
		}
		for _, name := range list {
			r.unknown(name, tags[name].causes)
		}
	}
	r.asked(tags, read)
	if len(r.Unknown) > maxUnknown { // then all others are, too
		r.Complete, r.Outcome, r.Unknown = false, "partial", r.Unknown[:maxUnknown]
	}
	return r
}

// state is what a tag says, by one who has not seen all if whole is false.
func state(t *classifierv1.Tag, whole bool) told {
	out := told{state: t.GetState()}
	for _, c := range t.GetUnknown() {
		if !slices.Contains(codes, c) {
			c = causeOther
		}
		out.causes = append(out.causes, c)
	}
	if !whole && out.state != classifierv1.State_STATE_TRUE {
		out.state, out.causes = classifierv1.State_STATE_UNKNOWN, append(out.causes, causeOversize)
	}
	if out.state == classifierv1.State_STATE_FALSE && len(out.causes) > 0 { // false is said of what was read to the end only
		out.state = classifierv1.State_STATE_UNKNOWN
	}
	slices.Sort(out.causes)
	out.causes = slices.Compact(out.causes)
	return out
}

// merge takes the more cautious of two.
func merge(a, b told) told {
	rank := func(s classifierv1.State) int {
		switch s {
		case classifierv1.State_STATE_TRUE:
			return 3
		case classifierv1.State_STATE_UNKNOWN:
			return 2
		case classifierv1.State_STATE_FALSE:
			return 1
		}
		return 0
	}
	if rank(a.state) >= rank(b.state) && rank(a.state) > 0 {
		return a
	}
	if rank(b.state) == 0 {
		b.state, b.causes = classifierv1.State_STATE_UNKNOWN, []string{causeOther}
	}
	return b
}

func (r *Result) unknown(tag string, causes []string) {
	r.Unknown = append(r.Unknown, &routerv1.UnknownTag{Tag: tag, Causes: causes})
}

// asked says of each tag that policies read whether it is absent, or that nobody
// looked for it.
func (r *Result) asked(tags map[string]told, read []string) {
	missing := slices.DeleteFunc(slices.Clone(read), func(pattern string) bool {
		for name := range tags {
			if policy.MatchTag(pattern, name) {
				return true
			}
		}
		return false
	})
	for _, pattern := range missing {
		r.unknown(pattern, []string{causeUnread})
	}
	for _, pattern := range read {
		absent := !slices.Contains(missing, pattern) && !slices.ContainsFunc(missing, func(m string) bool { return policy.MatchTag(pattern, m) })
		for name, t := range tags {
			absent = absent && (t.state == classifierv1.State_STATE_FALSE || !policy.MatchTag(pattern, name))
		}
		if absent && !slices.Contains(r.Absent, pattern) {
			r.Absent = append(r.Absent, pattern)
		}
	}
}
