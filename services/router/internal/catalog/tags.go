package catalog

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// customTags are the tags that policies define, by namespace.
func customTags(c *resources.Catalog) []*routerv1.CustomTags {
	tags := map[string][]v1alpha1.CustomTag{}
	for _, p := range c.Policies {
		if list := p.CustomTags(); len(list) > 0 {
			ns, _, _ := strings.Cut(p.ID(), "/")
			tags[ns] = append(tags[ns], list...)
		}
	}
	var out []*routerv1.CustomTags
	for _, ns := range slices.Sorted(maps.Keys(tags)) {
		text, err := json.Marshal(tags[ns])
		if err != nil { // cannot be: they were read from JSON or YAML
			continue
		}
		out = append(out, &routerv1.CustomTags{Namespace: ns, TagsJson: string(text)})
	}
	return out
}
