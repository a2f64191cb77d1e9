package classify

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/expr"
)

// Bounds of custom tags.
const (
	maxCustomTags = 64
	maxDetectors  = 32
	maxKeywords   = 256
	maxRegex      = 1024
	maxWhen       = 4096
	// maxRegexWork is how many bytes all regular expressions of a set together may read of one part.
	maxRegexWork = 64 << 20
	// maxMatches of one rule in one window.
	maxMatches = 256
)

// Custom is a compiled set of custom tags. It does not change.
type Custom struct {
	tags     []customTag
	keywords *automaton
	of       []keyword
	regexes  int
	whens    []customWhen
	read     map[string]bool // tags that whens read
	version  string
}

type customTag struct {
	name  string
	scope [roles]bool
	rules []customRule
	text  bool // some rules look for text
}

type customRule struct {
	re       *regexp.Regexp
	validate v1alpha1.TagValidator
	name     string
}

type keyword struct {
	tag, rule, n int
	whole        bool
}

// CompileCustom compiles the custom tags of policies; dry runs compile, too. Two
// tags of one name count as one. Errors name the tag and the field.
func CompileCustom(tags []v1alpha1.CustomTag) (*Custom, error) {
	if len(tags) > maxCustomTags {
		return nil, fmt.Errorf("%d custom tags: want at most %d", len(tags), maxCustomTags)
	}
	c := &Custom{}
	var faults []error
	var words []string
	for i := range tags {
		t := &tags[i]
		fault := func(format string, args ...any) {
			faults = append(faults, fmt.Errorf("custom tag %q: %s", t.Name, fmt.Sprintf(format, args...)))
		}
		if t.Name == "" || len(t.Name) > 64 {
			fault("name: want 1 to 64 bytes")
		}
		if len(t.Any) == 0 || len(t.Any) > maxDetectors {
			fault("any: want 1 to %d detectors", maxDetectors)
		}
		out := customTag{name: t.Name}
		for _, s := range t.Scope {
			switch s {
			case v1alpha1.ScopeSystem:
				out.scope[RoleSystem] = true
			case v1alpha1.ScopeUser:
				out.scope[RoleUser], out.scope[RoleUnknown], out.scope[RoleDocument] = true, true, true
			case v1alpha1.ScopeAssistant:
				out.scope[RoleAssistant], out.scope[RoleToolArguments] = true, true
			case v1alpha1.ScopeToolResult:
				out.scope[RoleToolResult] = true
			default:
				fault("scope: %q is none", s)
			}
		}
		if len(t.Scope) == 0 {
			for r := range out.scope {
				out.scope[r] = true
			}
		}
		for j, d := range t.Any {
			rule := customRule{validate: d.Validator, name: fmt.Sprintf("%s/%d", t.Name, j)}
			switch d.Validator {
			case "", v1alpha1.ValidatorLuhn, v1alpha1.ValidatorIBAN:
			default:
				fault("any[%d].validator: %q is none", j, d.Validator)
			}
			given := 0
			for _, is := range []bool{len(d.Keywords) > 0, d.Regex != "", d.When != ""} {
				if is {
					given++
				}
			}
			out.text = out.text || d.When == ""
			switch {
			case given != 1:
				fault("any[%d]: give keywords, regex or when, one of them", j)
			case d.When != "":
				if len(d.When) > maxWhen {
					fault("any[%d].when: longer than %d bytes", j, maxWhen)
					continue
				}
				w, err := expr.CompileWhen(d.When)
				if err != nil {
					fault("any[%d].when: %s", j, err)
					continue
				}
				c.whens = append(c.whens, customWhen{w, i, j})
			case d.Regex != "":
				if len(d.Regex) > maxRegex {
					fault("any[%d].regex: longer than %d bytes", j, maxRegex)
					continue
				}
				re, err := regexp.Compile(d.Regex)
				if err != nil {
					fault("any[%d].regex: %s", j, strings.TrimPrefix(err.Error(), "error parsing regexp: "))
					continue
				}
				if re.MatchString("") {
					fault("any[%d].regex: matches nothing at all, so it is found everywhere", j)
				}
				rule.re = re
				c.regexes++
			case len(d.Keywords) > maxKeywords:
				fault("any[%d].keywords: more than %d", j, maxKeywords)
			}
			for _, k := range d.Keywords {
				// Text is compared as the normaliser leaves it.
				k = normalKeyword(k)
				if k == "" || len(k) > 256 {
					fault("any[%d].keywords: want 1 to 256 bytes each", j)
				}
				words = append(words, k)
				c.of = append(c.of, keyword{i, j, len(k), d.WholeWord})
			}
			out.rules = append(out.rules, rule)
		}
		c.tags = append(c.tags, out)
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	c.read = c.reads()
	if len(words) > 0 {
		c.keywords = newAutomaton(foldAll(words))
	}
	spec, err := json.Marshal(tags)
	if err != nil {
		return nil, fmt.Errorf("hash custom tags: %w", err)
	}
	sum := sha256.Sum256(spec)
	c.version = hex.EncodeToString(sum[:8])
	return c, nil
}

// reads lists the tags that expressions may read: not those of expressions, so
// that there are no circles.
func (c *Custom) reads() map[string]bool {
	out := map[string]bool{}
	for _, w := range c.whens {
		for _, name := range w.Tags {
			out[name] = true
		}
	}
	for _, w := range c.whens {
		delete(out, c.tags[w.tag].name)
	}
	return out
}

// Version is a hash of the tags' definitions.
func (c *Custom) Version() string { return c.version }

func normalKeyword(k string) string {
	var n normaliser
	v, _ := n.normalise([]byte(k), 0)
	return string(v.text)
}

func foldAll(words []string) []string {
	out := make([]string, len(words))
	for i, w := range words {
		out[i] = string(bytes.ToLower([]byte(w)))
	}
	return out
}

// tagged looks for custom tags in the view.
func (s *scan) tagged() {
	c := s.custom
	if c == nil {
		return
	}
	role := s.role
	hit := func(tag, rule, a, b int) {
		if !c.tags[tag].scope[role] {
			return
		}
		n := len(s.res.hits)
		s.hit(kindCustom, c.tags[tag].rules[rule].name, 1, a, b)
		if len(s.res.hits) > n {
			s.res.hits[n].custom = tag
		}
	}
	if c.keywords != nil {
		text := s.text
		// The automaton folds ASCII only.
		if folded := bytes.ToLower(text); len(folded) == len(text) {
			text = folded
		}
		c.keywords.find(text, func(id int32, end int) {
			k := c.of[id]
			a := end - k.n
			if k.whole && (a > 0 && wordByte(text[a-1]) || end < len(text) && wordByte(text[end])) {
				return
			}
			hit(k.tag, k.rule, a, end)
		})
	}
	if c.regexes*len(s.text) > maxRegexWork {
		s.res.cause(detCustom, causeRuleLimit)
		return
	}
	for i := range c.tags {
		if !c.tags[i].scope[role] {
			continue
		}
		for j := range c.tags[i].rules {
			r := &c.tags[i].rules[j]
			if r.re == nil {
				continue
			}
			matches := r.re.FindAllIndex(s.text, maxMatches)
			if len(matches) == maxMatches {
				s.res.cause(detCustom, causeFindings)
			}
			for _, m := range matches {
				if valid(r.validate, s.text[m[0]:m[1]]) {
					hit(i, j, m[0], m[1])
				}
			}
		}
	}
}

func wordByte(b byte) bool { return isAlnum(b) || b == '_' || b >= 0x80 }

func valid(v v1alpha1.TagValidator, w []byte) bool {
	var clean []byte
	for _, b := range w {
		switch {
		case b >= 'a' && b <= 'z':
			clean = append(clean, b-0x20)
		case isAlnum(b):
			clean = append(clean, b)
		}
	}
	switch v {
	case v1alpha1.ValidatorLuhn:
		digits := clean[:0]
		for _, b := range clean {
			if b <= '9' {
				digits = append(digits, b)
			}
		}
		return luhn(digits)
	case v1alpha1.ValidatorIBAN:
		return ibanValid(clean)
	}
	return true
}
