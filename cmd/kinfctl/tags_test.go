package main

import (
	"testing"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// What was unknown of a prompt is told with the reasons.
func TestAskedTellsWhatWasUnknown(t *testing.T) {
	why := func(tag string, causes ...string) *routerv1.UnknownTag {
		return &routerv1.UnknownTag{Tag: tag, Causes: causes}
	}
	for _, c := range []struct {
		q    *adminv1.RecordedRequest
		want string
	}{
		{&adminv1.RecordedRequest{Endpoint: "Messages"}, "Messages, 0 tokens, other tags unknown"},
		{&adminv1.RecordedRequest{Endpoint: "Messages", Classified: true, AbsentTags: []string{"pii-*"}}, "Messages, 0 tokens, no tags"},
		{&adminv1.RecordedRequest{Endpoint: "Messages", UnknownTags: []*routerv1.UnknownTag{why("*", "timeout")}}, "Messages, 0 tokens, unknown: all tags (timeout)"},
		{&adminv1.RecordedRequest{Endpoint: "Messages", Tags: []string{"code"}, AbsentTags: []string{"injection"}, UnknownTags: []*routerv1.UnknownTag{why("pii-*", "media", "oversize"), why("falcon")}},
			"Messages, 0 tokens, tags code, without injection, unknown: pii-* (media, oversize) falcon"},
		{&adminv1.RecordedRequest{Endpoint: "Messages", Classified: true, UnknownTags: []*routerv1.UnknownTag{why("language-*", "unsure")}}, "Messages, 0 tokens, no tags, unknown: language-* (unsure)"},
	} {
		if got := asked("", c.q); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}
