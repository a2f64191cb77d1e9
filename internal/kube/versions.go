package kube

import (
	"k8s.io/apimachinery/pkg/types"

	"github.com/kinference/kinference/internal/resources"
)

// versions holds, by uid, the newest version of each resource that was good
// together with all others.
type versions map[types.UID]resources.Object

// rounds bounds how often resources are exchanged for older versions. Each
// exchange may leave another resource in conflict with the older version.
const rounds = 8

// compile makes a catalog of the newest version of each resource that is good,
// or else of the last one that was. It enters into the list what is served of
// each, and what is wrong with it. The options must say Partial.
func (v versions) compile(options resources.Options, list []Resource) (*resources.Catalog, resources.Problems) {
	chosen := make([]resources.Object, 0, len(list))
	places := map[string]*place{}
	var order []*place
	for i := range list {
		p := &place{Resource: &list[i]}
		if p.Problems.Err() != nil { // of no form that we know
			p.object, p.final = v[p.Object.GetUID()], true
			p.broken = p.object == nil
		} else {
			p.object = p.Object
		}
		places[p.id()] = p
		order = append(order, p)
	}
	var catalog *resources.Catalog
	for round := range rounds {
		chosen = chosen[:0]
		for _, p := range order {
			if !p.broken {
				chosen = append(chosen, p.object)
			}
			p.found = nil
		}
		var problems resources.Problems
		catalog, problems = options.Compile(chosen)
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
		if !p.broken && p.found.Err() == nil {
			p.Served = p.object.GetGeneration()
		}
		problems = append(problems, p.Problems...)
	}
	v.keep(order)
	return catalog, problems
}

// place is a resource in a compilation.
type place struct {
	*Resource
	// object is the version that is tried, found what was wrong with it.
	object resources.Object
	found  resources.Problems
	// final: there is no other version to try. broken: none can be tried.
	final, broken bool
}

// exchange puts the last good version in the place of what was found bad; false
// when there is nothing to exchange.
func (v versions) exchange(order []*place) bool {
	again := false
	for _, p := range order {
		newest := p.object == p.Object
		if newest && !p.broken {
			p.Problems = p.found
		}
		if p.found.Err() == nil || p.final {
			continue
		}
		good := v[p.Object.GetUID()]
		switch {
		case newest && good != nil && good != p.Object:
			p.object, again = good, true
		case newest:
			p.final = true
		default: // the old version is bad too, beside what is new of others
			p.object, p.final, again = p.Object, true, true
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
			v[uid] = p.object
		}
	}
	for uid := range v {
		if !there[uid] {
			delete(v, uid)
		}
	}
}
