package router

import (
	"github.com/kinference/kinference/internal/policy"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// tagsOf is what the classifier said, as policies see it.
func tagsOf(present []string, complete bool, absent []string, unknown []*routerv1.UnknownTag) policy.Tags {
	t := policy.Tags{Present: present, Complete: complete, Absent: absent}
	for _, u := range unknown {
		t.Unknown = append(t.Unknown, policy.UnknownTag{Tag: u.GetTag(), Causes: u.GetCauses()})
	}
	return t
}

// recordTags keeps what was unknown of a request's tags, and why, in its record.
func recordTags(out *adminv1.RecordedRequest, t *policy.Tags) {
	const maxCauses = 16
	keep := func(s string) bool { return len(s) <= maxText }
	for _, a := range t.Absent {
		if len(out.AbsentTags) < maxEntries && keep(a) {
			out.AbsentTags = append(out.AbsentTags, a)
		} // else it counts as unknown, which is the safe side
	}
	for i := range t.Unknown {
		u := &t.Unknown[i]
		if len(out.UnknownTags) == maxEntries || !keep(u.Tag) {
			// All others are unknown, then.
			out.Cut, out.Classified = true, false
			return
		}
		r := &routerv1.UnknownTag{Tag: u.Tag}
		for _, c := range u.Causes[:min(len(u.Causes), maxCauses)] {
			if keep(c) {
				r.Causes = append(r.Causes, c)
			}
		}
		out.UnknownTags = append(out.UnknownTags, r)
	}
}
