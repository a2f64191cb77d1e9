package policy

import "slices"

// Limits is how many limits the policy has.
func (p *Policy) Limits() int { return len(p.limits) }

// Limited reports whether limit i of the policy holds for a request. One whose
// expression cannot be evaluated does: limits restrict.
func (p *Policy) Limited(i int, r *Request) bool {
	matches := p.limits[i]
	if len(matches) == 0 {
		return true
	}
	assume := p.assume
	if len(p.risk) > 0 {
		assume.present = append(slices.Clip(assume.present), newGlobs(p.risk)...)
	}
	for j := range matches {
		if matches[j].holds(r, &assume, true) {
			return true
		}
	}
	return false
}

// LimitsReadHeaders reports whether a limit of the policy looks at headers.
func (p *Policy) LimitsReadHeaders() bool {
	for _, matches := range p.limits {
		for j := range matches {
			if matches[j].readsHeaders() {
				return true
			}
		}
	}
	return false
}
