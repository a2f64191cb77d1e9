package classify

import (
	"context"
	"slices"
	"strings"
)

// merger gathers what the parts of one prompt yield.
type merger struct {
	c       *Classifier
	profile *profile
	custom  *Custom

	parts  int
	open   bool // a part may go on
	last   Part
	base   int // bytes of the open part that were scanned already
	text   strings.Builder
	tail   []piece // what came before, for the seams
	byRole [roles][]piece

	bytes, read, cachedBytes int
	hits                     []placedHit
	causes                   [detectors][]string
	missed                   [detectors]int
	all                      features // whole prompt
	user                     []features
	injection                float32
	injectionRule            string
	injectionPart            int
	injectionAt, injectionLn int
	media                    [medias]bool
	cut                      bool
	messages                 int
	alert                    bool
	noted                    *noted
}

type placedHit struct {
	hit
	part int
}

// piece is the end of a part that a seam may need.
type piece struct {
	part, start int
	text        string
}

func (c *Classifier) begin(name string, custom *Custom) *merger {
	p := c.profile
	if q := profiles[name]; q != nil {
		p = q
	}
	return &merger{c: c, profile: p, custom: custom, messages: -1}
}

func (m *merger) part(ctx context.Context, p Part) {
	m.start(ctx, p)
	m.flush(ctx, true)
}

func (m *merger) start(ctx context.Context, p Part) {
	m.flush(ctx, true)
	m.last, m.base, m.open = p, 0, true
	if m.last.Role >= roles {
		m.last.Role = RoleUnknown
	}
	if m.last.Media >= medias {
		m.last.Media = MediaUnknown
	}
	m.text.Reset()
	m.text.WriteString(p.Text)
	m.parts++
	if m.note(); m.noted != nil {
		m.noted.start(m.last)
	}
	m.grown(ctx)
}

func (m *merger) more(ctx context.Context, text string) {
	m.text.WriteString(text)
	if m.noted != nil {
		m.noted.grow(text)
	}
	m.grown(ctx)
}

// grown scans the beginning of a part that has become long.
func (m *merger) grown(ctx context.Context) {
	if m.text.Len() >= 4*window {
		m.flush(ctx, false)
	}
}

func (m *merger) cause(det int, code string) {
	if !slices.Contains(m.causes[det], code) {
		m.causes[det] = append(m.causes[det], code)
	}
}

func (m *merger) causeAll(code string, bytes int) {
	for d := range detectors {
		m.cause(d, code)
		m.missed[d] += bytes
	}
}

// flush scans what is held of the open part; the end of a part that goes on
// stays, for the next piece.
func (m *merger) flush(ctx context.Context, end bool) {
	if !m.open {
		return
	}
	text := m.text.String()
	p := m.last
	if end {
		m.open = false
	}
	if p.Media != MediaText {
		m.media[p.Media] = true
		if p.Media == MediaTokens {
			m.causeAll(causeTokens, 0)
		} else {
			m.causeAll(causeMedia, 0)
		}
		if text == "" {
			return
		}
		// A name or a data URL is text all the same.
	} else {
		m.media[MediaText] = true
	}
	if m.parts > maxParts {
		m.bytes += len(text)
		m.causeAll(causeParts, len(text))
		return
	}
	scanned := text
	if rest := m.c.set.MaxBytes - m.read; len(text) > rest {
		scanned = text[:max(rest, 0)]
		m.causeAll(causeOversize, len(text)-len(scanned))
	}
	fresh := len(text)
	if m.base > 0 {
		fresh -= min(overlap, fresh)
	}
	m.bytes += fresh
	m.read += len(scanned)
	if ctx.Err() != nil {
		m.causeAll(causeDeadline, len(scanned))
		return
	}
	res, cached := m.scan(ctx, scanned, p.Role)
	if cached {
		m.cachedBytes += len(scanned)
	}
	m.add(res, p, m.base)
	m.seams(ctx, scanned, p)
	if !end {
		keep := min(overlap, len(text))
		m.base += len(text) - keep
		rest := text[len(text)-keep:]
		m.text.Reset()
		m.text.WriteString(rest)
	}
}

// scan reads one text, or remembers it.
func (m *merger) scan(ctx context.Context, text string, role Role) (res *partResult, cached bool) {
	if m.c.cache.limit <= 0 {
		return m.c.scanText(ctx, text, role, m.custom), false
	}
	key := m.c.cache.key(text, role, m.custom)
	if res := m.c.cache.get(key); res != nil {
		return res, true
	}
	res = m.c.scanText(ctx, text, role, m.custom)
	// What went wrong once may go well the next time.
	if !slices.Contains(res.causes[detPII], causePanic) && !slices.Contains(res.causes[detPII], causeDeadline) {
		m.c.cache.put(key, res)
	}
	return res, false
}

// scanText scans one text. A panic makes everything unknown.
func (c *Classifier) scanText(ctx context.Context, text string, role Role, custom *Custom) (res *partResult) {
	s := c.scratch.Get().(*scan)
	defer func() {
		if recover() != nil {
			// The value may hold text: it goes nowhere, and the working memory with it.
			res = &partResult{}
			res.feat.bytes = len(text)
			res.causeAll(causePanic)
			return
		}
		c.scratch.Put(s)
	}()
	s.ctx = ctx
	res = s.part(text, role, custom)
	s.ctx = nil
	return res
}

func (m *merger) add(r *partResult, p Part, base int) {
	part := m.parts - 1
	for _, h := range r.hits {
		h.start += base
		h.end += base
		m.hits = append(m.hits, placedHit{h, part})
		m.alert = m.alert || h.kind <= kindSecret && h.score >= m.profile.threshold[h.kind]
	}
	m.cut = m.cut || r.cut
	for d := range detectors {
		for _, c := range r.causes[d] {
			m.cause(d, c)
		}
		if len(r.causes[d]) > 0 {
			m.missed[d] += r.feat.bytes
		}
	}
	m.all.add(&r.feat)
	if m.noted != nil {
		m.noted.language(&r.feat)
	}
	if p.Role == RoleUser || p.Role == RoleUnknown {
		if p.Message != m.messages || len(m.user) == 0 {
			m.user = append(m.user, features{})
			m.messages = p.Message
		}
		m.user[len(m.user)-1].add(&r.feat)
	}
	// What the operator wrote is no attack on the operator.
	if p.Role != RoleSystem && p.Role != RoleAssistant && r.feat.injection > m.injection {
		m.injection, m.injectionRule = r.feat.injection, r.feat.injectionRule
		m.injectionPart, m.injectionAt, m.injectionLn = part, base+r.feat.injectionAt, r.feat.injectionEnd-r.feat.injectionAt
	}
}

const seamBytes = 160

// seams reads the end of what came before together with the beginning of a
// part: numbers may be spread over both, and questions tell what answers mean.
func (m *merger) seams(ctx context.Context, text string, p Part) {
	here := piece{part: m.parts - 1, start: m.base, text: text}
	if m.base == 0 {
		m.seam(ctx, m.tail, here)
		if prev := m.byRole[p.Role]; len(prev) > 0 && (len(m.tail) == 0 || prev[len(prev)-1].part != m.tail[len(m.tail)-1].part) {
			m.seam(ctx, prev, here)
		}
	}
	if len(text) > seamBytes {
		cut := len(text) - seamBytes
		here.text, here.start = text[cut:], m.base+cut
	}
	here.text = strings.Clone(here.text)
	m.tail = append(trimTail(m.tail, seamBytes-len(here.text)), here)
	m.byRole[p.Role] = append(trimTail(m.byRole[p.Role], seamBytes-len(here.text)), here)
}

// trimTail keeps the last n bytes of pieces.
func trimTail(t []piece, n int) []piece {
	i := len(t)
	for i > 0 && n > 0 && len(t)-i < 40 {
		i--
		n -= len(t[i].text) + 1
	}
	return append([]piece(nil), t[i:]...)
}

func (m *merger) seam(ctx context.Context, tail []piece, here piece) {
	if len(tail) == 0 || here.text == "" {
		return
	}
	head := here
	if len(head.text) > seamBytes {
		head.text = head.text[:seamBytes]
	}
	if !strings.ContainsAny(head.text, "0123456789@") && !strings.ContainsAny(tail[len(tail)-1].text, "0123456789@") {
		return
	}
	pieces := append(append([]piece(nil), tail...), head)
	for _, glue := range []string{"", " "} {
		if ctx.Err() != nil {
			m.causeAll(causeDeadline, 0)
			return
		}
		var b strings.Builder
		var starts []int
		for i, p := range pieces {
			if i > 0 {
				b.WriteString(glue)
			}
			starts = append(starts, b.Len())
			b.WriteString(p.text)
		}
		joined := b.String()
		key := m.c.cache.key(joined, roles, nil)
		var res *partResult
		if m.c.cache.limit > 0 {
			res = m.c.cache.get(key)
		}
		if res == nil {
			res = m.c.scanSeam(joined, starts[len(starts)-1])
			if m.c.cache.limit > 0 {
				m.c.cache.put(key, res)
			}
		}
		for _, c := range res.causes[detPII] {
			m.cause(detPII, c)
		}
		for _, h := range res.hits {
			i := len(starts) - 1
			for i > 0 && starts[i] > h.start {
				i--
			}
			n := pieces[i]
			a := min(h.start-starts[i], len(n.text))
			l := min(h.end-h.start, len(n.text)-a)
			h.start, h.end, h.enc = n.start+a, n.start+a+l, encJoined
			m.hits = append(m.hits, placedHit{h, n.part})
			m.alert = m.alert || h.kind <= kindSecret && h.score >= m.profile.threshold[h.kind]
		}
	}
}

// scanSeam scans joined text for numbers and codes that end behind a cut.
func (c *Classifier) scanSeam(joined string, cut int) (res *partResult) {
	res = &partResult{}
	defer func() {
		if recover() != nil {
			res = &partResult{}
			res.causeAll(causePanic)
		}
	}()
	var n normaliser
	v, _ := n.normalise([]byte(joined), 0)
	s := scan{c: c, m: c.models, res: res}
	s.aside(v, contexts{}, nil)
	s.resolve()
	out := res.hits[:0]
	for _, h := range res.hits {
		if h.end > cut {
			out = append(out, h)
		}
	}
	res.hits = out
	return res
}

// found reports whether pii-detected is true already.
func (m *merger) found() bool { return m.alert }

func tagNames() []string {
	out := []string{"pii-detected"}
	for k := range piiKinds {
		out = append(out, "pii-"+kindNames[k])
	}
	out = append(out, "secret-detected", "injection", "complexity-low", "complexity-medium", "complexity-high", "complexity-unknown", "code")
	for _, n := range mediaNames[:MediaTokens] {
		out = append(out, "modality-"+n)
	}
	out = append(out, "length-short", "length-medium", "length-long")
	return append(out, languageTags...)
}

var languageTags = func() (out []string) {
	for _, l := range langNames {
		out = append(out, "language-"+l)
	}
	for _, l := range []string{"el", "hy", "he", "ar", "hi", "ka", "ko", "th", "zh", "ja"} {
		out = append(out, "language-"+l)
	}
	return out
}()

func detectorOf(k kind) int {
	switch k {
	case kindPerson, kindAddress:
		return detNames
	case kindSecret:
		return detSecrets
	case kindInjection:
		return detInjection
	case kindCustom:
		return detCustom
	}
	return detPII
}

// Lengths in bytes.
const shortText, longText = 2 << 10, 32 << 10

func (m *merger) result(ctx context.Context) Result {
	m.flush(ctx, true)
	if ctx.Err() != nil {
		m.causeAll(causeDeadline, 0)
	}
	r := Result{Versions: m.c.models.versions, Bytes: m.bytes, CachedBytes: m.cachedBytes, Tags: make([]Tag, 0, 80)}
	if m.custom != nil {
		r.Versions.Custom = m.custom.version
	}
	for d := range detectors {
		m.causes[d] = sortedSet(m.causes[d])
		r.Coverage = append(r.Coverage, Coverage{Detector: detectorNames[d], Bytes: max(m.bytes-m.missed[d], 0), Of: m.bytes, Causes: m.causes[d]})
	}
	slices.SortStableFunc(m.hits, func(a, b placedHit) int {
		if a.part != b.part {
			return a.part - b.part
		}
		return a.start - b.start
	})
	own := m.findings(&r)
	m.descriptive(&r)
	m.whens(ctx, &r, own)
	return r
}

// decide makes a tag of what was found and of what was not read.
func decide(name string, found bool, score float32, causes ...[]string) Tag {
	t := Tag{Name: name, Score: score, State: False}
	for _, c := range causes {
		t.Causes = append(t.Causes, c...)
	}
	switch {
	case found:
		t.State, t.Causes = True, nil
	case len(t.Causes) > 0:
		t.State, t.Causes = Unknown, sortedSet(t.Causes)
	}
	return t
}

func (t *Tag) reason(h *placedHit, name string) {
	if len(t.Reasons) == maxReasons {
		t.ReasonsCut = true
		return
	}
	if n := len(t.Reasons); n > 0 && t.Reasons[n-1].Part == h.part && t.Reasons[n-1].Offset == h.start && t.Reasons[n-1].Length == h.end-h.start && t.Reasons[n-1].Kind == name {
		return
	}
	t.Reasons = append(t.Reasons, Reason{Kind: name, Part: h.part, Offset: h.start, Length: h.end - h.start, Rule: h.rule, Score: h.score, Encoding: encodingNames[h.enc]})
}

// findings makes the tags that stand on findings, and tells where custom ones begin.
func (m *merger) findings(r *Result) (own int) {
	var best [kinds + 1]float32
	for i := range m.hits {
		best[m.hits[i].kind] = max(best[m.hits[i].kind], m.hits[i].score)
	}
	all := Tag{Name: "pii-detected"}
	found := false
	for i := range m.hits {
		h := &m.hits[i]
		if h.kind <= kindSecret {
			all.Score = max(all.Score, h.score)
			if h.score >= m.profile.threshold[h.kind] {
				found = true
				all.reason(h, kindNames[h.kind])
			}
		}
	}
	d := decide("pii-detected", found, all.Score, m.causes[detPII], m.causes[detNames], m.causes[detSecrets])
	d.Reasons, d.ReasonsCut = all.Reasons, all.ReasonsCut || m.cut
	r.Tags = append(r.Tags, d)
	for k := range piiKinds {
		t := decide("pii-"+kindNames[k], best[k] >= tagThreshold, best[k], m.causes[detectorOf(k)])
		m.reasons(&t, k, tagThreshold)
		r.Tags = append(r.Tags, t)
	}
	t := decide("secret-detected", best[kindSecret] >= m.profile.threshold[kindSecret], best[kindSecret], m.causes[detSecrets])
	m.reasons(&t, kindSecret, m.profile.threshold[kindSecret])
	r.Tags = append(r.Tags, t)
	t = decide("injection", m.injection >= m.profile.threshold[kindInjection], m.injection, m.causes[detInjection])
	if t.State == True {
		t.Reasons = []Reason{{Kind: "injection", Part: m.injectionPart, Offset: m.injectionAt, Length: m.injectionLn, Rule: m.injectionRule, Score: m.injection}}
	}
	r.Tags = append(r.Tags, t)
	own = len(r.Tags)
	if m.custom != nil {
		for i := range m.custom.tags {
			t := decide(m.custom.tags[i].name, false, 0)
			if m.custom.tags[i].text {
				t = decide(t.Name, false, 0, m.causes[detCustom])
			}
			for j := range m.hits {
				if h := &m.hits[j]; h.kind == kindCustom && h.custom == i {
					t.State, t.Causes, t.Score = True, nil, 1
					t.reason(h, "custom")
				}
			}
			r.Tags = append(r.Tags, t)
		}
	}
	return own
}

func (m *merger) reasons(t *Tag, k kind, least float32) {
	if t.State != True {
		return
	}
	for i := range m.hits {
		if h := &m.hits[i]; h.kind == k && h.score >= least {
			t.reason(h, kindNames[k])
		}
	}
}

// conversation is what complexity is judged by: the user's last turn, and with
// it those before while it says little.
func (m *merger) conversation() *features {
	n := len(m.user)
	if n == 0 {
		return &m.all
	}
	f := m.user[n-1]
	for i := n - 2; i >= 0 && i >= n-4 && f.words < shortPrompt; i-- {
		f.add(&m.user[i])
	}
	return &f
}

// descriptive makes the tags that describe.
func (m *merger) descriptive(r *Result) {
	models := m.c.models
	f := m.conversation()
	cal := &models.heads.Calibration
	if c := m.c.set.Complexity; c != nil {
		cal = c
	}
	p := cal.at(models.rawComplexity(f))
	causes := m.causes[detComplexity]
	level := cal.level(p)
	if f.words+f.numbers+f.scripts[scriptHan] == 0 {
		causes = append(slices.Clone(causes), causeNoText)
	}
	unsure := causes
	if level == levelUnsure {
		unsure = append(slices.Clone(causes), causeUnsure)
	}
	for i, n := range []string{"complexity-low", "complexity-medium", "complexity-high"} {
		score := [...]float32{1 - p, 1 - 2*abs(p-0.5), p}[i]
		if len(unsure) > 0 {
			r.Tags = append(r.Tags, Tag{Name: n, Score: score, Causes: sortedSet(slices.Clone(unsure))})
			continue
		}
		r.Tags = append(r.Tags, decide(n, level == i, score))
	}
	r.Tags = append(r.Tags, decide("complexity-unknown", len(unsure) > 0, p))
	r.Complexity = models.subScores(f, len(m.user), m.bytes)
	r.Complexity["score"] = p

	c := m.all.code()
	r.Tags = append(r.Tags, decide("code", c >= 0.5, c, m.causes[detCode]))
	for i, n := range mediaNames[:MediaTokens] {
		var other []string
		if m.media[MediaUnknown] || m.media[MediaFile] {
			other = []string{causeMedia}
		}
		score := float32(0)
		if m.media[i] {
			score = 1
		}
		r.Tags = append(r.Tags, decide("modality-"+n, m.media[i], score, other))
	}
	short, long := m.bytes < shortText, m.bytes >= longText
	var size []string
	if len(m.causes[detCode]) > 0 && !long { // a part without text may be of any length
		size = m.causes[detCode]
	}
	r.Tags = append(r.Tags, decide("length-short", short && len(size) == 0, 0, size), decide("length-medium", !short && !long && len(size) == 0, 0, size), decide("length-long", long, 0, size))
	lang, score := m.all.language()
	causes = m.causes[detLanguage]
	if lang == "" {
		causes = append(slices.Clone(causes), causeUnsure)
	}
	for _, n := range languageTags {
		is := lang != "" && n[len("language-"):] == lang
		s := float32(0)
		if is {
			s = score
		}
		r.Tags = append(r.Tags, decide(n, is, s, causes))
	}
}

func abs(x float32) float32 {
	if x < 0 {
		return -x
	}
	return x
}
