package kube

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kinference/kinference/internal/resources"
)

// versions holds, by uid, the newest version of each resource that was good
// together with all others.
type versions map[types.UID]*resources.Checked

// rounds bounds how often resources are exchanged for older versions. Each
// exchange may leave another resource in conflict with the older version.
const rounds = 8

// compile makes a catalog of the newest version of each resource that is good,
// or else of the last one that was. It enters into the list what is served of
// each, and what is wrong with it. The options must say Partial.
func (v versions) compile(options resources.Options, list []Resource) (*resources.Catalog, resources.Problems) {
	chosen := make([]*resources.Checked, 0, len(list))
	places := map[string]*place{}
	var order []*place
	for i := range list {
		p := &place{Resource: &list[i]}
		if p.tried = p.checked; p.tried == nil { // of no form that we know
			p.tried, p.final = v[p.Object.GetUID()], true
		}
		places[p.id()] = p
		order = append(order, p)
	}
	var catalog *resources.Catalog
	for round := range rounds {
		chosen = chosen[:0]
		for _, p := range order {
			if p.tried != nil {
				chosen = append(chosen, p.tried)
			}
			p.found = nil
		}
		var problems resources.Problems
		catalog, problems = options.CompileChecked(chosen)
		for _, pr := range problems {
			if p := places[pr.Resource]; p != nil {
				p.found = append(p.found, pr)
			}
		}
		if !v.exchange(order) || round == rounds-1 {
			break
		}
	}
	var problems resources.Problems
	for _, p := range order {
		if p.tried != nil && p.found.Err() == nil {
			p.Served = p.tried.Object.GetGeneration()
		}
		problems = append(problems, p.Problems...)
	}
	v.keep(order)
	return catalog, problems
}

// place is a resource in a compilation.
type place struct {
	*Resource
	// tried is the version in this round, nil for none; found is what was wrong
	// with it.
	tried *resources.Checked
	found resources.Problems
	// final: there is no other version to try.
	final bool
}

// exchange puts the last good version in the place of what was found bad; false
// when there is nothing to exchange.
func (v versions) exchange(order []*place) bool {
	again := false
	for _, p := range order {
		newest := p.tried == p.checked
		if newest && p.tried != nil {
			p.Problems = p.found
		}
		if p.found.Err() == nil || p.final {
			continue
		}
		good := v[p.Object.GetUID()]
		switch {
		case newest && good != nil && good != p.checked:
			p.tried, again = good, true
		case newest:
			p.final = true
		default: // the old version is bad too, beside what is new of others
			p.tried, p.final, again = p.checked, true, true
		}
	}
	return again
}

// keep remembers what was good and forgets what is gone.
func (v versions) keep(order []*place) {
	there := map[types.UID]bool{}
	for _, p := range order {
		uid := p.Object.GetUID()
		there[uid] = true
		if p.Served != 0 {
			v[uid] = p.tried
		}
	}
	for uid := range v {
		if !there[uid] {
			delete(v, uid)
		}
	}
}
