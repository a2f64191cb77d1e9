package classify

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Role tells who wrote a part.
type Role uint8

// The roles. A part without a role counts as the user's.
const (
	RoleUnknown Role = iota
	RoleSystem
	RoleUser
	RoleAssistant
	RoleToolResult
	RoleToolArguments
	RoleDocument
	RoleMetadata
	roles
)

// Media tells what a part is made of. Only text can be read.
type Media uint8

// The media.
const (
	MediaText Media = iota
	MediaImage
	MediaAudio
	MediaVideo
	MediaFile
	// MediaTokens are token ids that nobody turned into text.
	MediaTokens
	MediaUnknown
	medias
)

var mediaNames = [medias]string{"text", "image", "audio", "video", "file", "tokens", "unknown"}

// Part of a prompt. Text is not kept nor changed.
type Part struct {
	Role  Role
	Media Media
	// Message is the number of the message that the part belongs to.
	Message int
	Text    string
}

// Input is a prompt.
type Input struct {
	// Parts in the order in which the model reads them.
	Parts []Part
	// Profile of thresholds; empty: the classifier's.
	Profile string
	// Custom tags that hold for this prompt; nil: none.
	Custom *Custom
}

// State is what is known of a tag.
type State uint8

// The states. The zero value is Unknown: what nobody looked at is not false.
const (
	Unknown State = iota
	False
	True
)

func (s State) String() string { return [...]string{"unknown", "false", "true"}[s] }

// Tag is what is known of one property of the prompt.
type Tag struct {
	Name  string
	State State
	// Score in 0..1 of the best finding, or of the head.
	Score float32
	// Reasons in the order of the text; ReasonsCut says that there were more.
	Reasons    []Reason
	ReasonsCut bool
	// Causes of Unknown, sorted.
	Causes []string
}

// Reason is one finding: where, never what.
type Reason struct {
	Kind string
	// Part is an index of Input.Parts; Offset and Length are bytes of its text.
	Part, Offset, Length int
	Rule                 string
	Score                float32
	// Encoding tells how it was hidden: base64, hex, spaced, joined, …; empty: plain.
	Encoding string
}

// Coverage is how much of the prompt a detector has read.
type Coverage struct {
	Detector  string
	Bytes, Of int
	// Causes of what is missing, sorted. None: the detector saw all.
	Causes []string
}

// Complete says that the detector has read the whole prompt.
func (c *Coverage) Complete() bool { return len(c.Causes) == 0 && c.Bytes == c.Of }

// Versions of what made a result.
type Versions struct{ Detectors, Weights, Custom string }

// Result is what is known of a prompt.
type Result struct {
	Tags     []Tag
	Coverage []Coverage
	// Complexity holds named sub-scores in 0..1.
	Complexity map[string]float32
	Versions   Versions
	// Bytes of text, and how many of them came from the cache.
	Bytes, CachedBytes int
}

// Tag returns the tag of a name, or one that is unknown.
func (r Result) Tag(name string) Tag {
	for i := range r.Tags {
		if r.Tags[i].Name == name {
			return r.Tags[i]
		}
	}
	return Tag{Name: name, Causes: []string{causeNotAsked}}
}

// Present are the names of the tags that are true.
func (r Result) Present() []string { return r.named(True) }

// Undecided are the names of the tags that are unknown.
func (r Result) Undecided() []string { return r.named(Unknown) }

func (r Result) named(s State) []string {
	var out []string
	for i := range r.Tags {
		if r.Tags[i].State == s {
			out = append(out, r.Tags[i].Name)
		}
	}
	return out
}

// Unclassified is the result where no classifier answered: nothing is known.
// cause is a code, such as "timeout".
func Unclassified(cause string) Result {
	var r Result
	for _, n := range tagNames() {
		r.Tags = append(r.Tags, Tag{Name: n, Causes: []string{cause}})
	}
	return r
}

// The defaults and the bounds of Settings.
const (
	// DefaultMaxBytes is 16 MiB: more than a million tokens.
	DefaultMaxBytes   = 16 << 20
	DefaultCacheBytes = 32 << 20
	maxParts          = 1 << 16
	maxReasons        = 32
)

// Settings of a Classifier. Zero values take defaults.
type Settings struct {
	// Profile is "default" or "strict".
	Profile string
	// MaxBytes of text that one call reads; what is beyond is unknown.
	MaxBytes int
	// CacheBytes bounds the conversation cache; negative: none.
	CacheBytes int
	// Complexity sets other thresholds than the embedded ones; see Calibration.
	Complexity *Calibration
}

// Classifier tags prompts. It is safe for concurrent use.
type Classifier struct {
	set     Settings
	profile *profile
	models  *models
	cache   *cache
	scratch sync.Pool
}

// New loads the embedded weights and lists (some tens of milliseconds, once in
// a process) and returns a classifier.
func New(set Settings) (*Classifier, error) {
	if set.MaxBytes == 0 {
		set.MaxBytes = DefaultMaxBytes
	}
	if set.CacheBytes == 0 {
		set.CacheBytes = DefaultCacheBytes
	}
	if set.MaxBytes < 0 {
		return nil, errors.New("the limit of bytes is negative")
	}
	if set.Profile == "" {
		set.Profile = ProfileDefault
	}
	p := profiles[set.Profile]
	if p == nil {
		return nil, fmt.Errorf("profile %q: want %s or %s", set.Profile, ProfileDefault, ProfileStrict)
	}
	m, err := load()
	if err != nil {
		return nil, fmt.Errorf("load embedded data: %w", err)
	}
	if set.Complexity != nil {
		if err := set.Complexity.Validate(); err != nil {
			return nil, err
		}
	}
	c := &Classifier{set: set, profile: p, models: m, cache: newCache(set.CacheBytes)}
	c.scratch.New = func() any { return &scan{c: c, m: m} }
	return c, nil
}

// Versions of the embedded detectors and weights.
func (c *Classifier) Versions() Versions { return c.models.versions }

// Classify tags a prompt. It stops early where ctx is done, and what it has not
// read is then unknown.
func (c *Classifier) Classify(ctx context.Context, in Input) Result {
	m := c.begin(in.Profile, in.Custom)
	for i := range in.Parts {
		m.part(ctx, in.Parts[i])
	}
	return m.result(ctx)
}

// Stream tags a prompt that comes in pieces. One goroutine at a time.
type Stream struct{ m *merger }

// NewStream begins a prompt.
func (c *Classifier) NewStream(profile string, custom *Custom) *Stream {
	return &Stream{c.begin(profile, custom)}
}

// Add reads one more part, or a piece that continues the last one.
func (s *Stream) Add(ctx context.Context, p Part, continues bool) {
	if continues && s.m.open {
		s.m.more(ctx, p.Text)
		return
	}
	s.m.start(ctx, p)
}

// Found reports whether personal data was found already; that is final.
func (s *Stream) Found() bool { return s.m.found() }

// Result of all that was added. Nothing may be added after it.
func (s *Stream) Result(ctx context.Context) Result { return s.m.result(ctx) }
