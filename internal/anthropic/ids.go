package anthropic

import (
	"encoding/base64"
	"strings"
)

// Tool ids of this API hold letters, digits, _ and - only. Engines make others
// ("functions.search:0"), and some models' templates print them, so the
// engine's id must come back as it was: what does not fit is wrapped.
const wrapped = "kin64_"

// outID makes an engine's tool id fit for clients of this API.
func outID(id string) string {
	if fits(id) && !strings.HasPrefix(id, wrapped) {
		return id
	}
	return wrapped + base64.RawURLEncoding.EncodeToString([]byte(id))
}

// inID is the engine's id for one that a client brings back.
func inID(id string) string {
	if rest, ok := strings.CutPrefix(id, wrapped); ok {
		if raw, err := base64.RawURLEncoding.DecodeString(rest); err == nil && outID(string(raw)) == id {
			return string(raw)
		}
	}
	return id
}

func fits(id string) bool {
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-') {
			return false
		}
	}
	return id != ""
}
