package main

import (
	"strings"

	"github.com/kinference/kinference/internal/policy"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// unknownTags are the tags of a request that nobody could tell, as they travel.
func unknownTags(t *policy.Tags) []*routerv1.UnknownTag {
	var out []*routerv1.UnknownTag
	for _, u := range t.Unknown {
		out = append(out, &routerv1.UnknownTag{Tag: u.Tag, Causes: u.Causes})
	}
	return out
}

// unknownWords tells which tags were absent for sure and which unknown, and why.
func unknownWords(q *adminv1.RecordedRequest) []string {
	var out []string
	if len(q.AbsentTags) > 0 && !q.Classified {
		out = append(out, "without "+strings.Join(q.AbsentTags, " "))
	}
	var unknown []string
	all := false
	for _, u := range q.UnknownTags {
		name := u.Tag
		if all = all || name == "*"; name == "*" {
			name = "all tags"
		}
		if len(u.Causes) > 0 {
			name += " (" + strings.Join(u.Causes, ", ") + ")"
		}
		unknown = append(unknown, name)
	}
	switch {
	case len(unknown) == 0 && !q.Classified:
		out = append(out, "other tags unknown")
	case len(unknown) > 0:
		out = append(out, "unknown: "+strings.Join(unknown, " "))
	}
	return out
}
