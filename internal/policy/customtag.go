package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/expr"
)

// detectors checks what a custom tag looks for.
func (c *compiler) detectors(f string, t *v1alpha1.CustomTag) {
	if len(t.Any) == 0 {
		c.errorf(f+".any", "is required: a list of keywords, regex or when")
	}
	c.atMost(f+".any", len(t.Any), maxEntries)
	for i, d := range t.Any {
		df := fmt.Sprintf("%s.any[%d]", f, i)
		oneOf(c, df+".validator", d.Validator, v1alpha1.ValidatorLuhn, v1alpha1.ValidatorIBAN)
		switch {
		case count(len(d.Keywords) > 0, d.Regex != "", d.When != "") != 1:
			c.errorf(df, "give keywords, regex or when, one of them")
		case d.When != "":
			c.when(df, t, &d)
		case d.Regex != "":
			if _, err := regexp.Compile(d.Regex); err != nil {
				c.errorf(df+".regex", "%s", strings.TrimPrefix(err.Error(), "error parsing regexp: "))
			}
			if d.WholeWord {
				c.errorf(df+".wholeWord", "is for keywords: write \\b into the regex")
			}
		case d.Validator != "":
			c.errorf(df+".validator", "checks what a regex found, and there is none")
		case slices.Contains(d.Keywords, ""):
			c.errorf(df+".keywords", "an empty keyword is found everywhere")
		}
	}
	for i, s := range t.Scope {
		oneOf(c, fmt.Sprintf("%s.scope[%d]", f, i), s, v1alpha1.ScopeSystem, v1alpha1.ScopeUser, v1alpha1.ScopeAssistant, v1alpha1.ScopeToolResult)
	}
}

// count tells how many are true.
func count(list ...bool) (n int) {
	for _, is := range list {
		if is {
			n++
		}
	}
	return n
}

// tagReads are the tags that the expression of a custom tag reads.
type tagReads struct {
	field, decides string
	tags           []string
}

// when checks the expression of a custom tag. It may read what others find, but
// not what another expression decides: there would be circles.
func (c *compiler) when(f string, t *v1alpha1.CustomTag, d *v1alpha1.TagDetector) {
	if d.WholeWord {
		c.errorf(f+".wholeWord", "is for keywords")
	}
	if d.Validator != "" {
		c.errorf(f+".validator", "checks what a regex found, and there is none")
	}
	w, err := expr.CompileWhen(d.When)
	if err != nil {
		c.errorf(f+".when", "%s", err)
		return
	}
	if slices.Contains(w.Tags, t.Name) {
		c.errorf(f+".when", "reads the tag %q itself", abbreviate(t.Name))
	}
	if !w.ReadsPart && len(t.Scope) > 0 && !slices.ContainsFunc(t.Any, func(d v1alpha1.TagDetector) bool { return d.When == "" }) {
		c.faults = append(c.faults, Fault{Field: f + ".when", Message: "reads no `part`, so the tag's scope has no effect on it", Warning: true})
	}
	c.whens = append(c.whens, tagReads{field: f + ".when", decides: t.Name, tags: w.Tags})
}

// whens warns of expressions of custom tags that read what they never see.
func (l *linter) whens(policies []*Policy) {
	decided := map[string]bool{}
	for _, p := range policies {
		for _, w := range p.whens {
			decided[w.decides] = true
		}
	}
	for _, p := range policies {
		for _, w := range p.whens {
			for _, t := range w.tags {
				if decided[t] {
					l.warnf(p, w.field, "the tag %q has a when itself, so it is unknown to others", abbreviate(t))
				} else {
					l.given(p, w.field, t)
				}
			}
		}
	}
}
