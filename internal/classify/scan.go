package classify

import (
	"context"
	"slices"
	"strings"
	"unicode/utf8"
)

// Sizes of the work on one part.
const (
	window  = 64 << 10
	overlap = 1 << 10
	// maxHits bounds the findings that one part keeps.
	maxHits = 4096
	// shortPart is a part that holds little but the number in it: an answer to a question, a field of a form.
	shortPart = 48
	maxViews  = 1024
)

// detectors, as coverage lists them.
const (
	detPII = iota
	detNames
	detSecrets
	detInjection
	detComplexity
	detLanguage
	detCode
	detCustom
	detectors
)

var detectorNames = [detectors]string{"pii", "names", "secrets", "injection", "complexity", "language", "code", "custom"}

// partResult is what one part yields, whatever stands around it.
type partResult struct {
	hits   []hit
	causes [detectors][]string
	feat   features
	cut    bool // more findings than maxHits
}

func (r *partResult) cause(det int, c string) {
	if !slices.Contains(r.causes[det], c) {
		r.causes[det] = append(r.causes[det], c)
	}
}

// causeAll notes what keeps every detector from reading text.
func (r *partResult) causeAll(c string) {
	for d := range detectors {
		r.cause(d, c)
	}
}

// scan is the working memory of one goroutine. It is reused.
type scan struct {
	c    *Classifier
	m    *models
	text []byte
	toks []token
	run  run
	view *view
	// short says that the part is little more than one number; outer is what is announced around a view.
	short            bool
	codey            bool // the view looks like code
	outer            []uint8
	lastIP           int32
	cuts             []int // positions of the view that a finding must cross
	skip             int   // findings that end before this offset of the part are known from the last window
	limited          bool  // only what consists of digits and codes
	res              *partResult
	norm             normaliser
	buf              []byte
	queue            []*view
	runs             []denseRun
	tags             []uint8
	margins          []float32
	custom           *Custom
	codeBuf, codeRaw [maxCode]byte
	outTmp           []byte
	segTmp           []segment
	role             Role
	ctx              context.Context
}

// part scans one part. The result keeps none of the text.
func (s *scan) part(text string, role Role, custom *Custom) *partResult {
	s.res = &partResult{}
	s.custom, s.role, s.outer, s.cuts, s.limited = custom, role, nil, nil, false
	s.short = len(text) <= shortPart && mostlyDigits(text)
	s.skip = 0
	for from := 0; ; {
		if from > 0 && s.ctx != nil && s.ctx.Err() != nil {
			s.res.causeAll(causeDeadline)
			break
		}
		to := min(from+window, len(text))
		if to < len(text) {
			to = cutBefore(text, to)
		}
		s.buf = append(s.buf[:0], text[from:to]...)
		s.window(from)
		if to == len(text) {
			break
		}
		s.skip = to
		from = cutBefore(text, to-overlap)
	}
	s.res.feat.bytes = len(text)
	s.fields(text)
	s.resolve()
	res := s.res
	s.res, s.view, s.custom = nil, nil, nil
	clear(s.queue)
	s.queue = s.queue[:0]
	return res
}

// mostlyDigits reports whether digits are two fifths of what is not space.
func mostlyDigits(text string) bool {
	digits, rest := 0, 0
	for i := range len(text) {
		switch b := text[i]; {
		case b >= '0' && b <= '9':
			digits++
		case b > ' ':
			rest++
		}
	}
	return digits*3 >= rest*2 && digits > 0
}

// cutBefore finds a place at or before n where no word is torn apart.
func cutBefore(text string, n int) int {
	for i := n; i > n-4096 && i > 0; i-- {
		if b := text[i-1]; b == ' ' || b == '\n' || b == '\t' {
			return i
		}
	}
	for i := n; i > n-4; i-- {
		if utf8.RuneStart(text[i]) {
			return i
		}
	}
	return n
}

// window scans s.buf, which begins at base of the part.
func (s *scan) window(base int) {
	s.norm.invisible, s.norm.tags, s.norm.badUTF8 = 0, 0, 0
	v, deeper := s.norm.normalise(s.buf, base)
	if deeper {
		for d := range detectors {
			s.res.cause(d, causeDepth)
		}
	}
	if s.norm.badUTF8 > 0 {
		s.res.causeAll(causeUTF8)
	}
	s.res.feat.invisible += int32(s.norm.invisible)
	s.res.feat.tagChars += int32(s.norm.tags)
	s.queue = append(s.queue[:0], v)
	for i := 0; i < len(s.queue); i++ {
		if i == maxViews {
			s.res.cause(detPII, causeBlobs)
			s.res.cause(detSecrets, causeBlobs)
			s.res.cause(detInjection, causeBlobs)
			break
		}
		s.look(s.queue[i], i == 0)
	}
}

// look runs the detectors on a view and queues what is hidden in it.
func (s *scan) look(v *view, root bool) {
	s.view, s.text, s.lastIP = v, v.text, -1
	if !root {
		n := normaliser{}
		sub, deeper := n.normalise(v.text, 0)
		if deeper {
			s.res.cause(detPII, causeDepth)
		}
		if sub.segs != nil {
			last := sub
			for last.parent != nil {
				last = last.parent
			}
			last.parent = v
			sub.depth = v.depth
			s.view, s.text = sub, sub.text
		}
	}
	var scripts [scriptCount]int32
	s.toks = tokenise(s.toks[:0], s.text, s.m.lexicon, &scripts)
	s.pairs()
	s.numbers()
	s.codes()
	s.mail()
	if s.limited {
		return
	}
	s.secrets()
	s.names(&scripts)
	s.features(&scripts, root)
	s.tagged()
	if root || s.view.depth > 0 {
		s.hidden()
	}
	at := s.view
	blobs(at, func(b *view) {
		if len(s.queue) < maxViews+1 {
			s.queue = append(s.queue, b)
		}
	}, func(c string) {
		s.res.cause(detPII, c)
		s.res.cause(detNames, c)
		s.res.cause(detSecrets, c)
		s.res.cause(detInjection, c)
		s.res.cause(detCustom, c)
	})
}

// pairs gives the second of two words that announce something together its meaning.
func (s *scan) pairs() {
	for i := 0; i+1 < len(s.toks); i++ {
		if s.toks[i].lex&lexPair == 0 {
			continue
		}
		j := i + 1
		if g := s.toks[j].sign; (g == '-' || g == '_' || g == '.') && j+1 < len(s.toks) {
			j++
		}
		if c, ok := s.m.lexicon.pairs[pairKey(s.toks[i].hash, s.toks[j].hash)]; ok {
			s.toks[j].ctx = c
			if s.toks[i].ctx == ctxOther || s.toks[i].ctx == ctxMedical || s.toks[i].ctx == ctxLicence {
				s.toks[i].ctx = 0
			}
		}
	}
}

// hit notes a finding at [start, end) of the view.
func (s *scan) hit(k kind, rule string, score float32, start, end int) {
	if score < 0.3 {
		return
	}
	if s.cuts != nil {
		crosses := false
		for _, c := range s.cuts {
			crosses = crosses || start < c && end > c
		}
		if !crosses {
			return
		}
	}
	a, b := s.view.span(start, end)
	if b <= s.skip && s.skip > 0 {
		return
	}
	if len(s.res.hits) >= maxHits {
		s.res.cut = true
		return
	}
	s.res.hits = append(s.res.hits, hit{kind: k, rule: rule, score: min(score, 1), start: a, end: b, enc: s.view.encoding()})
}

// resolve sorts the findings and drops those that a better one of the
// structured kinds overlaps.
func (s *scan) resolve() {
	h := s.res.hits
	slices.SortStableFunc(h, func(a, b hit) int {
		switch {
		case a.score > b.score:
			return -1
		case a.score < b.score:
			return 1
		}
		return a.start - b.start
	})
	if len(h) == 0 {
		s.res.hits = nil
		return
	}
	// Buckets by offset keep this linear for long lists.
	taken := map[int][]hit{}
	const bucket = 256
	out := h[:0]
next:
	for _, x := range h {
		for b := x.start / bucket; b <= (max(x.end, x.start+1)-1)/bucket; b++ {
			for _, y := range taken[b] {
				if x.start < y.end && y.start < x.end && (x.kind == y.kind && x.custom == y.custom || structured(x.kind) && structured(y.kind)) {
					continue next
				}
			}
		}
		for b := x.start / bucket; b <= (max(x.end, x.start+1)-1)/bucket; b++ {
			taken[b] = append(taken[b], x)
		}
		out = append(out, x)
	}
	slices.SortStableFunc(out, func(a, b hit) int { return a.start - b.start })
	s.res.hits = slices.Clip(slices.Clone(out))
}

func structured(k kind) bool { return k < kindAddress }

// hidden queues digits and codes that are spelled out, or written one by one.
func (s *scan) hidden() {
	v := s.view
	for i := 0; i < len(s.toks); {
		t := &s.toks[i]
		switch {
		case t.lex&lexNumber != 0 && t.kind == tokWord:
			i = s.spelled(v, i)
		case t.len() == 1 && (t.kind != tokSign || t.sign == '+' && i+1 < len(s.toks) && s.toks[i+1].gap == gapSpace && s.toks[i+1].len() == 1):
			i = s.spaced(v, i)
		default:
			i++
		}
	}
}

var hashDouble, hashTriple, hashDash, hashMinus = hashWord("double"), hashWord("triple"), hashWord("dash"), hashWord("minus")

// spelled reads number words from token i on.
func (s *scan) spelled(v *view, i int) int {
	out, segs := s.outTmp[:0], s.segTmp[:0]
	j, times := i, 1
	base := int(s.toks[i].start)
	end := base
	for j < len(s.toks) && len(out) < 64 {
		t := &s.toks[j]
		if t.gap == gapPara && j > i {
			break
		}
		switch {
		case t.kind == tokWord && t.lex&lexNumber != 0:
			d := numberDigits[t.hash]
			if d == 0 {
				return max(j, i+1)
			}
			segs = append(segs, segment{int32(len(out)), t.start - int32(base), false})
			for range times {
				out = append(out, d)
			}
			times = 1
			end = int(t.end)
		case t.hash == hashDouble:
			times = 2
		case t.hash == hashTriple:
			times = 3
		case t.kind == tokNumber && t.len() == 1:
			segs = append(segs, segment{int32(len(out)), t.start - int32(base), false})
			out = append(out, s.text[t.start])
			end = int(t.end)
		case t.hash == hashDash || t.hash == hashMinus || t.kind == tokSign && (t.sign == '-' || t.sign == ',' || t.sign == '.' || t.sign == '/'):
		default:
			goto done
		}
		j++
	}
done:
	s.outTmp, s.segTmp = out, segs
	if len(out) >= 6 {
		s.push(v, out, segs, base, end, i, j, encSpelled)
	}
	return max(j, i+1)
}

// numberDigits are numberWords by hash.
var numberDigits = func() map[uint32]byte {
	m := map[uint32]byte{}
	for w, d := range numberWords {
		m[hashWord(w)] = d
	}
	return m
}()

// spaced reads single letters and digits from token i on.
func (s *scan) spaced(v *view, i int) int {
	out, segs := s.outTmp[:0], s.segTmp[:0]
	base := int(s.toks[i].start)
	j, alnum := i, 0
	var sep byte
	for j < len(s.toks) && len(out) < 256 {
		t := &s.toks[j]
		if t.len() > 4 || t.len() > 1 && s.text[t.start] < utf8.RuneSelf || j > i && t.gap >= gapLine {
			break
		}
		if t.kind == tokSign {
			// a-b-c: the sign between is none of it, unless it is alone in there.
			if t.gap == gapNone && (sep == 0 && alnum == 1 || t.sign == sep) && (t.sign == '-' || t.sign == '.' || t.sign == '_' || t.sign == '*' || t.sign == ',' || t.sign == '/' || t.sign == '|') {
				sep = t.sign
				j++
				continue
			}
			if t.sign == 0xff || t.gap == gapNone && sep == 0 {
				break
			}
		} else {
			if j > i && t.gap == gapNone && sep == 0 {
				break
			}
			alnum++
		}
		segs = append(segs, segment{int32(len(out)), t.start - int32(base), false})
		out = append(out, s.text[t.start:t.end]...)
		j++
	}
	s.outTmp, s.segTmp = out, segs
	if alnum >= 6 && j > i {
		s.push(v, out, segs, base, int(s.toks[j-1].end), i, j, encSpaced)
	}
	return max(j, i+1)
}

// push queues a small view of tokens [i, j).
func (s *scan) push(v *view, out []byte, segs []segment, base, end, i, j int, enc encoding) {
	if len(s.queue) > maxViews {
		return
	}
	near := s.near(i, j)
	sub := &view{text: slices.Clone(out), segs: slices.Clone(segs), source: end - base, base: base, parent: v, enc: enc, depth: maxDepth}
	// It is short: it is scanned at once, with what is announced around it.
	s.aside(sub, near, nil)
}

// aside scans a short view for digits and codes, and comes back to where the
// scan was.
func (s *scan) aside(v *view, near contexts, cuts []int) {
	sub := scan{c: s.c, m: s.m, view: v, text: v.text, res: s.res, skip: s.skip, limited: true, lastIP: -1, cuts: cuts}
	for x := range uint8(ctxIDs + 120) {
		if x > 0 && near.has(x) {
			sub.outer = append(sub.outer, x)
		}
	}
	var scripts [scriptCount]int32
	sub.toks = tokenise(nil, v.text, s.m.lexicon, &scripts)
	sub.pairs()
	sub.numbers()
	sub.codes()
	sub.mail()
	if v.enc == encSpaced {
		sub.secrets()
	}
}

// fields reads the values of a JSON text one behind the other: numbers may be
// spread over them.
func (s *scan) fields(text string) {
	t := strings.TrimLeft(text, " \t\r\n")
	if len(t) < 2 || t[0] != '{' && t[0] != '[' || len(t) > window {
		return
	}
	var out []byte
	var segs []segment
	var cuts []int
	for i := 0; i < len(text); i++ {
		b := text[i]
		start := i
		switch {
		case b == '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			k := i + 1
			for k < len(text) && (text[k] == ' ' || text[k] == '\t' || text[k] == '\n') {
				k++
			}
			if k < len(text) && text[k] == ':' {
				continue // a name
			}
			start++
		case b >= '0' && b <= '9' || b == '-':
			for i < len(text) && (text[i] >= '0' && text[i] <= '9' || text[i] == '.' || text[i] == '-') {
				i++
			}
		default:
			continue
		}
		v := text[min(start, len(text)):min(i, len(text))]
		if len(v) == 0 || len(v) > 32 {
			continue
		}
		if len(out) > 0 {
			cuts = append(cuts, len(out))
			segs = append(segs, segment{int32(len(out)), int32(start), false})
			out = append(out, ' ')
		}
		segs = append(segs, segment{int32(len(out)), int32(start), true})
		out = append(out, v...)
		if b != '"' {
			i--
		}
	}
	if len(cuts) == 0 {
		return
	}
	skip := s.skip
	s.skip = 0
	s.aside(&view{text: out, segs: segs, source: len(text), enc: encField, depth: maxDepth}, contexts{}, cuts)
	s.skip = skip
}
