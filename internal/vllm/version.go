package vllm

import (
	"slices"
	"strconv"
	"strings"
)

// Version names a generation of vLLM's wire format by a release of it. The zero
// value is the default, V0_24.
type Version int

// Generations that differ on the wire.
const (
	// V0_24 writes events as maps.
	V0_24 Version = iota
	// V0_10 writes events as arrays without medium; up to 0.10.1.
	V0_10
	// V0_11 adds the medium; since 0.10.2.
	V0_11
	// V0_14 adds the LoRA name.
	V0_14
	// V0_19 adds extra keys; since 0.17.
	V0_19
	// V0_20 adds the group.
	V0_20
	// V0_23 adds kind of attention and window; since 0.22.
	V0_23
	// V0_26 adds locality, and replay replies carry the topic.
	V0_26
	// V0_31 hashes extra keys with their source; on the sockets it is V0_26.
	V0_31
	// V0_32 is V0_31 on the event sockets; metrics and HTTP differ.
	V0_32
)

// releases lists the generations from old to new.
var releases = []Version{V0_10, V0_11, V0_14, V0_19, V0_20, V0_23, V0_24, V0_26, V0_31, V0_32}

// The release that gives a generation its name, and the first one.
var (
	names = map[Version]int{
		V0_10: 10, V0_11: 11, V0_14: 14, V0_19: 19, V0_20: 20, V0_23: 23, V0_24: 24, V0_26: 26, V0_31: 31, V0_32: 32,
	}
	since = map[Version]int{
		V0_10: 10, V0_11: 11, V0_14: 14, V0_19: 17, V0_20: 20, V0_23: 22, V0_24: 24, V0_26: 26, V0_31: 31, V0_32: 32,
	}
)

// AtLeast reports whether v is generation o or a later one.
func (v Version) AtLeast(o Version) bool {
	return slices.Index(releases, v) >= slices.Index(releases, o)
}

// String returns the generation as "0.24".
func (v Version) String() string { return "0." + strconv.Itoa(names[v]) }

// ParseVersion returns the generation of a release such as "0.23", "v0.23.1" or
// "0.32.0+cpu"; empty means the default. Releases before 0.10 are not known.
func ParseVersion(s string) (Version, bool) {
	if s == "" {
		return V0_24, true
	}
	text, ok := strings.CutPrefix(strings.TrimPrefix(s, "v"), "0.")
	text, patch, _ := strings.Cut(text, ".")
	n, err := strconv.Atoi(text)
	if !ok || err != nil || n < since[V0_10] {
		return V0_24, false
	}
	if n == 10 && strings.HasPrefix(patch, "2") {
		return V0_11, true
	}
	v := V0_10
	for _, later := range releases {
		if since[later] <= n {
			v = later
		}
	}
	return v, true
}
