package ingress

import (
	"bytes"
	"fmt"

	"github.com/kinference/kinference/internal/openai"
)

// Most elements of lists whose length makes work for engines, and for us, out of
// proportion to their bytes. They are far above what clients send: an agent with
// hundreds of tools and thousands of turns is served.
const (
	mostMessages = 16384
	mostTools    = 1024
	mostStops    = 64
	mostBiases   = 4096
	mostChoices  = 128 // as OpenAI has it
)

// checkShape refuses a request with lists that are too long, or media that is not
// to be fetched.
func (x *exchange) checkShape() *openai.Error {
	for _, l := range [...]struct {
		name string
		most int
	}{{"messages", mostMessages}, {"tools", mostTools}, {"functions", mostTools}, {"stop", mostStops}} {
		v := x.req.Body.Get(l.name)
		// Elements are told apart by a comma or are one: most requests need no closer look.
		if v.Kind != openai.Array || bytes.Count(v.Raw, []byte(",")) < l.most {
			continue
		}
		n := 0
		for range v.Elements() {
			n++
		}
		if n > l.most {
			return tooMany(l.name, l.most)
		}
	}
	if v := x.req.Body.Get("logit_bias"); v.Kind == openai.Obj && bytes.Count(v.Raw, []byte(":")) > mostBiases {
		return tooMany("logit_bias", mostBiases)
	}
	for _, name := range [...]string{"n", "best_of"} {
		if n, ok := x.req.Body.Get(name).Int(); ok && n > mostChoices {
			return openai.Invalid(name, "", fmt.Sprintf("The value of %s must be at most %d.", name, mostChoices))
		}
	}
	return x.checkMedia()
}

func tooMany(name string, most int) *openai.Error {
	return openai.Invalid(name, "", fmt.Sprintf("The list %s has more than %d elements.", name, most))
}
