package policy

import "slices"

// Bar is what a rule says about tags to keep a request from an endpoint. Whoever
// sends the request can look at it once more, when the tags may have become known
// or others since the decision.
type Bar struct {
	// All, Any and None are as in a rule's matches; Assumed are those of them that
	// count as present while the tags are not known.
	All, Any, None, Assumed []string
}

// Holds reports whether requests with these tags are to be kept away.
func (b *Bar) Holds(t Tags) bool {
	m := match{more: -1, all: newGlobs(b.All), any: newGlobs(b.Any), none: newGlobs(b.None)}
	return m.holds(&Request{Tags: t}, &assumption{present: newGlobs(b.Assumed)}, true)
}

// Bars are the conditions on tags under which the decision about a request would
// have kept it from an endpoint: the excludes of the rule that decided, and the
// rules before it that would have decided instead. What depends on tags through
// an expression is not among them.
func (s *Set) Bars(r *Request, d *Decision, e *Endpoint) (out []Bar) {
	add := func(m *match, p *Policy) {
		if m == nil || m.when != nil || len(m.all)+len(m.any)+len(m.none) == 0 {
			return
		}
		rest := *m
		rest.all, rest.any, rest.none = nil, nil, nil
		if rest.holds(r, &p.assume, true) {
			out = append(out, m.bar(&p.assume))
		}
	}
	for _, x := range s.live {
		name := x.policy.ID() + "/" + x.name
		if x.policy.ID() != d.Policy || x.name != d.Rule {
			if !slices.Contains(d.Emptied, name) {
				for i := range x.matches {
					add(&x.matches[i], x.policy)
				}
			}
			continue
		}
		if x.route == nil {
			return out
		}
		for i := range x.route.exclude {
			if c := &x.route.exclude[i]; c.filter.takes(e) && len(c.limits) == 0 && c.ttft == 0 {
				add(c.onlyIf, x.policy)
			}
		}
		return out
	}
	return out // no rule decided
}

func (m *match) bar(a *assumption) (b Bar) {
	for _, list := range []struct {
		from []glob
		to   *[]string
	}{{m.all, &b.All}, {m.any, &b.Any}, {m.none, &b.None}} {
		for _, g := range list.from {
			s := g.text
			if g.prefix {
				s += "*"
			}
			*list.to = append(*list.to, s)
			if a.holds(g) && !slices.Contains(b.Assumed, s) {
				b.Assumed = append(b.Assumed, s)
			}
		}
	}
	return b
}
