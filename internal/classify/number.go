package classify

import (
	"bytes"
	"math/bits"
)

var zero = []byte("0")

// contexts is a set of what is announced near a candidate.
type contexts [3]uint64

func (c *contexts) add(ctx uint8)      { c[ctx>>6] |= 1 << (ctx & 63) }
func (c *contexts) has(ctx uint8) bool { return c[ctx>>6]>>(ctx&63)&1 != 0 }
func (c *contexts) anyOf(list ...int) bool {
	for _, x := range list {
		if c.has(uint8(x)) {
			return true
		}
	}
	return false
}

func (c *contexts) empty() bool { return c[0]>>1|c[1]|c[2] == 0 }

// anyID reports whether some identity number is announced by its name.
func (c *contexts) anyID() bool {
	return c[0]>>ctxIDs|c[1]|c[2] != 0
}

const (
	contextLeft, contextRight           = 10, 6
	contextLeftBytes, contextRightBytes = 120, 60
)

// near gathers the words around tokens [a, b) that announce something. What
// stands beyond another number, or on the right beyond a comma, is not theirs.
func (s *scan) near(a, b int) contexts {
	var c contexts
	for i, n := a-1, 0; i >= 0 && n < contextLeft; i-- {
		t := &s.toks[i]
		if int(s.toks[a].start-t.start) > contextLeftBytes || s.toks[i+1].gap == gapPara && n > 1 {
			break
		}
		if t.kind == tokNumber && t.len() > 4 || t.sign == '|' || t.sign == ';' {
			break
		}
		if t.kind != tokSign || t.sign == '#' {
			if t.kind != tokSign {
				n++
			}
			if t.sign == '#' {
				c.add(ctxNumber)
			}
			c.add(t.ctx)
		}
	}
	for i, n := b, 0; i < len(s.toks) && n < contextRight; i++ {
		t := &s.toks[i]
		if t.gap >= gapLine || int(t.end-s.toks[b-1].end) > contextRightBytes || t.sign == ',' || t.sign == ';' || t.sign == '|' || t.sign == '}' || t.kind == tokNumber && t.len() > 4 {
			break
		}
		if t.sign == '.' && (i+1 == len(s.toks) || s.toks[i+1].gap != gapNone) {
			break
		}
		if t.kind != tokSign {
			n++
			c.add(t.ctx)
		}
	}
	s.header(a, &c)
	for _, x := range s.outer {
		c.add(x)
	}
	return c
}

// header adds what the first line of a table says of the column.
func (s *scan) header(a int, c *contexts) {
	var sep byte
	col := 0
	i := a - 1
	for ; i >= 0 && s.toks[i+1].gap < gapLine && a-i < 200; i-- {
		switch g := s.toks[i].sign; g {
		case ',', '|', ';':
			if sep == 0 {
				sep = g
			}
			if g == sep {
				col++
			}
		}
	}
	// Tabs are no tokens; a table of tabs is read by its bytes.
	if sep == 0 || i < 0 {
		return
	}
	// The header is the first of the lines before without a number, at most 50 lines up.
	for lines := 0; lines < 50 && i >= 0 && int(s.toks[a].start-s.toks[i].start) < 4096; lines++ {
		end := i + 1
		numbers := false
		for ; i >= 0; i-- {
			numbers = numbers || s.toks[i].kind == tokNumber && s.toks[i].len() > 3
			if s.toks[i].gap >= gapLine {
				break
			}
		}
		first := max(i, 0)
		i--
		if numbers {
			if first > 0 && s.toks[first].gap == gapPara {
				return
			}
			continue
		}
		k, found := 0, false
		for j := first; j < end; j++ {
			if s.toks[j].sign == sep {
				k++
			} else if k == col {
				if x := s.toks[j].ctx; x != 0 {
					c.add(x)
					found = true
				}
			}
		}
		if found || k > 0 && lines > 2 || first == 0 || s.toks[first].gap == gapPara {
			return
		}
	}
}

// group of digits in a run.
type group struct {
	tok   int
	start int32
	n     uint8
	sep   byte // sign behind it; ' ' for spaces, 0 at the end
}

const maxGroups, maxDigits = 40, 64

// run is digits with signs between them, as a person writes a number.
type run struct {
	groups      [maxGroups]group
	count       int
	digits      [maxDigits]byte
	plus, paren bool
	last        int // token behind the run
	letters     bool
}

// collect gathers the run that begins with token i.
func (s *scan) collect(i int, r *run) {
	r.count, r.plus, r.paren, r.letters = 0, false, false, false
	if i > 0 && s.toks[i].gap == gapNone {
		p := &s.toks[i-1]
		r.plus = p.sign == '+'
		r.paren = p.sign == '('
		if r.paren && i > 1 && s.toks[i-2].sign == '+' {
			r.plus = true
		}
	}
	digits := 0
	for i < len(s.toks) && r.count < maxGroups {
		t := &s.toks[i]
		n := t.len()
		if t.kind == tokMixed {
			// 2851x818: an extension.
			n = 0
			for n < t.len() && byteClass[s.text[int(t.start)+n]&0x7f] == 2 && s.text[int(t.start)+n] < 0x80 {
				n++
			}
			if n == 0 || int(t.start)+n >= len(s.text) || s.text[int(t.start)+n]|0x20 != 'x' {
				r.letters = true
				break
			}
		} else if t.kind != tokNumber {
			break
		}
		if digits+n > maxDigits {
			break
		}
		copy(r.digits[digits:], s.text[t.start:int(t.start)+n])
		digits += n
		r.groups[r.count] = group{tok: i, start: t.start, n: uint8(n)}
		r.count++
		i++
		r.last = i
		if t.kind == tokMixed {
			break
		}
		sep, next := s.separator(i)
		if sep == 0 {
			break
		}
		r.groups[r.count-1].sep = sep
		i = next
	}
	if r.count > 0 {
		r.groups[r.count-1].sep = 0
	}
}

// separator reads what stands between two groups of one number: a sign without
// gaps, a space, a dash with spaces around it, or a closing bracket.
func (s *scan) separator(i int) (sep byte, next int) {
	for k := i; k < len(s.toks) && k < i+3; k++ {
		t := &s.toks[k]
		if t.gap >= gapLine {
			return 0, 0
		}
		if t.kind == tokNumber || t.kind == tokMixed {
			if sep == 0 {
				if t.gap != gapSpace {
					return 0, 0
				}
				sep = ' '
			}
			// A sentence's end, or a list, is no separator.
			if t.gap == gapSpace && (sep == '.' || sep == ',' || sep == '/') {
				return 0, 0
			}
			return sep, k
		}
		switch t.sign {
		case '-', '.', '/', '(', ')', ',', '_', '*', '~', '+':
			if sep != 0 && t.sign != '(' && t.sign != '-' && sep != ')' {
				return 0, 0
			}
			if t.gap == gapSpace && (t.sign == '.' || t.sign == ',') {
				return 0, 0
			}
			if sep == 0 || t.sign == ')' {
				sep = t.sign
			}
		default:
			return 0, 0
		}
	}
	return 0, 0
}

// numbers finds what consists of digits.
func (s *scan) numbers() {
	r := &s.run
	for i := 0; i < len(s.toks); {
		t := &s.toks[i]
		if t.kind != tokNumber && (t.kind != tokMixed || s.text[t.start] > '9') {
			i++
			continue
		}
		s.collect(i, r)
		if r.count == 0 {
			i++
			continue
		}
		if s.date(r) {
			i = r.last
			continue
		}
		s.judge(r)
		i = r.last
	}
}

// date finds dates, which are birth dates if something says so.
func (s *scan) date(r *run) bool {
	if r.count < 3 || r.groups[0].sep != r.groups[1].sep {
		return false
	}
	g, sep := r.groups[:3], r.groups[0].sep
	if sep != '-' && sep != '/' && sep != '.' && sep != ' ' {
		return false
	}
	a := num(r.digits[:g[0].n])
	b := num(r.digits[g[0].n : g[0].n+g[1].n])
	c := num(r.digits[g[0].n+g[1].n : g[0].n+g[1].n+g[2].n])
	ok := false
	switch {
	case g[0].n == 4 && g[1].n <= 2 && g[2].n <= 2:
		ok = validDate(a, b, c) || validDate(a, c, b)
	case g[0].n <= 2 && g[1].n <= 2 && g[2].n == 4:
		ok = validDate(c, a, b) || validDate(c, b, a)
	case g[0].n <= 2 && g[1].n <= 2 && g[2].n == 2 && sep != ' ':
		ok = validDate(c, a, b) || validDate(c, b, a)
	}
	if !ok {
		return false
	}
	// A time of day, or more of a stamp, may follow.
	if r.count > 3 && r.groups[2].sep == sep {
		return false
	}
	end := r.last
	if r.count > 3 {
		r.last = g[2].tok + 1
		for r.last < end && s.toks[r.last].len() <= 3 {
			r.last++
		}
	}
	near := s.near(g[0].tok, g[2].tok+1)
	if near.has(ctxBirth) {
		s.hit(kindBirthDate, "date-of-birth", 0.8, int(g[0].start), int(s.toks[g[2].tok].end))
	}
	return true
}

// judge looks for the best readings of a run and reports them.
func (s *scan) judge(r *run) {
	total, singles := 0, true
	for i := range r.count {
		total += int(r.groups[i].n)
		singles = singles && r.groups[i].n == 1
	}
	near := contexts{}
	have := false
	if s.ipv4(r) {
		return
	}
	if total < 7 {
		if total >= 4 && r.count <= 3 {
			near = s.near(r.groups[0].tok, r.last)
			s.announced(r, &near, total)
		}
		return
	}
	near = s.near(r.groups[0].tok, r.last)
	have = !near.empty()
	var taken uint64
	for range 6 {
		best := candidate{score: 0.3}
		at := 0
		for i := range r.count {
			n := 0
			for j := i; j < r.count && j < i+maxGroups; j++ {
				n += int(r.groups[j].n)
				if n > 34 {
					break
				}
				whole := i == 0 && j == r.count-1
				if n < 7 || taken>>min(i, 63)&1 != 0 || taken>>min(j, 63)&1 != 0 || singles && !whole && (i > 0 || n < 9) || !whole && j-i > 8 {
					continue
				}
				if c := s.read(r, i, j, at, n, &near, whole, singles); c.score > best.score {
					best = c
				}
			}
			at += int(r.groups[i].n)
		}
		if best.rule == "" {
			break
		}
		for k := best.i; k <= best.j; k++ {
			taken |= 1 << min(k, 63)
		}
		start, end := int(r.groups[best.i].start), int(r.groups[best.j].start)+int(r.groups[best.j].n)
		if best.i == 0 && best.kind == kindPhone {
			for start > 0 && (s.text[start-1] == '+' || s.text[start-1] == '(') {
				start--
			}
		}
		s.hit(best.kind, best.rule, best.score, start, end)
		if singles || bits.OnesCount64(taken) >= r.count {
			break
		}
	}
	if taken == 0 && have {
		s.announced(r, &near, total)
	}
}

type candidate struct {
	kind  kind
	rule  string
	score float32
	i, j  int
}

// read judges groups [i, j] of a run, n digits from at on.
func (s *scan) read(r *run, i, j, at, n int, near *contexts, whole, singles bool) candidate {
	d := r.digits[at : at+n]
	best := candidate{i: i, j: j}
	offer := func(k kind, rule string, score float32) {
		if score > best.score {
			best.kind, best.rule, best.score = k, rule, score
		}
	}
	grouped := j > i && !singles
	sep := r.groups[i].sep
	uniform := true
	var shape [12]byte
	for k := i; k <= j; k++ {
		if k < j && r.groups[k].sep != sep {
			uniform = false
		}
		if k-i < len(shape) {
			shape[k-i] = '0' + r.groups[k].n
		}
	}
	form := string(shape[:min(j-i+1, len(shape))])
	// A cut out of a longer line of equal groups says little.
	penalty := float32(0)
	if !whole && (i > 0 && r.groups[i-1].sep == sep || j < r.count-1 && r.groups[j].sep == sep && j > i) {
		penalty = 0.25
	}
	other := float32(0)
	if near.anyOf(ctxOther, ctxVersion) {
		other = 0.2
	}
	// What stands in a path is a key of something.
	if at := int(r.groups[0].start); at > 0 && s.text[at-1] == '/' && r.count == 1 {
		other += 0.2
	}
	// Another kind of number is announced.
	rival := float32(0)
	if near.anyOf(ctxPassport, ctxLicence, ctxMedical, ctxAccount) {
		rival = 0.35
	}
	if sep == ',' && grouped {
		penalty += 0.2
	}
	if sep == '+' && !(r.plus && i == 0) { // spaces of a query, or a sum
		penalty += 0.15
	}
	alone := float32(0)
	if s.short && whole {
		alone = 0.2
	}
	if singles {
		alone = 0.1
	}

	if n >= 12 && n <= 19 && !same(d) && !(j == i+1 && sep == '.') && (uniform || near.has(ctxCard)) {
		network, ok := cardNetwork(d), luhn(d)
		natural := !grouped || form == "4444" || form == "465" || form == "44443" || form == "464" || form == "4443" || form == "66" || form == "88"
		announced := near.has(ctxCard)
		switch {
		case network && ok && natural:
			score := float32(0.75)
			if announced {
				score = 0.98
			}
			offer(kindCard, "card", score-penalty-other/2)
		case network && ok && (whole || announced):
			offer(kindCard, "card", 0.55-penalty+alone)
		case ok && announced && natural:
			offer(kindCard, "card", 0.65-penalty)
		case announced && natural && (network || grouped):
			offer(kindCard, "card-typo", 0.55-penalty)
		}
	}
	if !same(d) || near.anyID() {
		for _, k := range s.m.idsByLength[min(n, 19)] {
			id := &digitIDs[k]
			own := near.has(s.m.idContext[k])
			fits := false
			for _, g := range id.groups {
				fits = fits || g == form && uniform
			}
			if singles || !grouped {
				fits = false
			} else if len(id.groups) > 0 && !fits && !own && whole && id.strength == weak {
				continue
			}
			if !id.valid(d) {
				if own && (whole || fits) {
					offer(kindNationalID, id.name, 0.55-penalty)
				}
				continue
			}
			score := [...]float32{0.3, 0.42, 0.62}[id.strength]
			if id.needsContext {
				score = 0.12
			}
			if bytes.Count(d, zero)*2 > n+1 { // round numbers
				score -= 0.3
			}
			switch {
			case own:
				score += 0.45
				if id.needsContext {
					score += 0.2
				}
			case near.has(ctxNationalID) || near.anyOf(ctxMedical) && (id.name == "uk-nhs" || id.name == "au-medicare"):
				score += 0.35
			case near.has(ctxNumber):
				score += 0.08
			}
			if fits && (sep == '-' || sep == '.' || sep == '/' || sep == ' ') {
				switch {
				case id.name == "us-ssn" || id.name == "us-itin":
					if sep == '-' {
						score += 0.5
					} else if sep != '/' {
						score += 0.22
					}
				case id.needsContext:
					score += 0.15
				default:
					score += 0.14
				}
			}
			if !own {
				score -= other
				if epoch(d) && !s.short {
					score -= 0.2
				}
				if !near.has(ctxNationalID) && !(near.has(ctxMedical) && (id.name == "uk-nhs" || id.name == "au-medicare")) {
					score -= rival
				}
			}
			offer(kindNationalID, id.name, min(score+alone, 0.98)-penalty)
		}
	}
	s.phone(r, d, form, sep, grouped, uniform, near, i, penalty, alone, other, offer)
	if near.anyOf(ctxAccount, ctxIBAN) && n >= 6 && n <= 20 && whole && !grouped {
		offer(kindAccount, "account", 0.55-other)
	}
	return best
}

// epoch reports whether digits look like Unix time of these decades.
func epoch(d []byte) bool {
	return (len(d) == 10 || len(d) == 13) && d[0] == '1' && d[1] >= '4' && d[1] <= '9'
}

// phone judges whether digits are a telephone number: by +, by the way they are
// grouped, and by what announces them.
func (s *scan) phone(r *run, d []byte, form string, sep byte, grouped, uniform bool, near *contexts, i int, penalty, alone, other float32, offer func(kind, string, float32)) {
	n := len(d)
	if n < 7 || n > 15 || same(d) {
		return
	}
	dots, pairs := 0, 0
	for k := range r.count {
		if r.groups[k].sep == '.' {
			dots++
		}
		if r.groups[k].n == 2 {
			pairs++
		}
	}
	if dots > 4 || pairs > 5 && !r.plus || d[0] == '0' && d[1] == '0' && d[2] == '0' {
		return
	}
	slashes, dashes := 0, 0
	for k := i; k < r.count; k++ {
		switch r.groups[k].sep {
		case '/':
			slashes++
		case '-', '.', ',':
			dashes++
		}
	}
	if slashes > 0 && slashes+dashes > 1 && !r.paren && d[0] != '0' {
		return
	}
	announced := near.has(ctxPhone)
	if n > 13 && !r.plus && !announced {
		return
	}
	isbn := n == 13 && (num(d[:3]) == 978 || num(d[:3]) == 979) && ean(d)
	if isbn {
		return
	}
	score := float32(0.1)
	switch {
	case i == 0 && r.plus && callingCode(d) && n >= 8:
		score = 0.8
	case i == 0 && r.plus:
		score = 0.45
	case !grouped:
		// Bare digits.
		switch {
		case n == 10 && d[0] >= '2' && d[3] >= '2', n == 11 && d[0] == '1' && d[1] >= '2' && d[4] >= '2':
			score = 0.25
		case d[0] == '0' && n >= 9 && n <= 11 && d[1] != '0':
			score = 0.3
		case d[0] == '0' && d[1] == '0' && n >= 10 && callingCode(d[2:]):
			score = 0.35
		}
	case i == 0 && r.paren && n >= 7:
		score = 0.72
	case form == "334" || form == "1334" || form == "3334" || form == "33341":
		score = 0.72
		if sep == '.' {
			score = 0.66
		}
		if sep == ' ' {
			score = 0.58
		}
		if d[0] == '0' && n == 10 && form == "334" {
			score = 0.55
		}
	case form == "34" && (sep == '-' || sep == '.'):
		score = 0.55
		if sep == '.' || d[0] < '2' {
			score = 0.3
		}
	case form == "22222" || form == "2222" && sep != '.' || form == "222222":
		score = 0.45
		if d[0] == '0' || sep == '-' {
			score = 0.62
		}
	case d[0] == '0' && n >= 9 && n <= 12 && len(form) >= 2 && sep != '.':
		score = 0.58
	case d[0] == '0' && d[1] == '0' && n >= 10:
		score = 0.6
	case n >= 9 && n <= 12 && (sep == '-' || sep == ' ') && len(form) >= 3 && len(form) <= 5 && minGroup(form) >= 2:
		score = 0.42
		if sep == '-' && minGroup(form) >= 2 {
			score = 0.5
		}
	case len(form) == 2 && sep == '-' && n >= 8 && form != "44" && form[0] != '5':
		score = 0.4
	}
	if sep == '/' && grouped || !uniform && sep == ',' {
		score -= 0.2
	}
	if announced {
		switch {
		case score >= 0.4:
			score = min(score+0.3, 0.97)
		case grouped && sep == '.' && len(form) == 2:
			score += 0.1
		default:
			score = 0.6
		}
	} else if near.anyOf(ctxName, ctxAddress, ctxEmail) && score >= 0.25 {
		score += 0.15
	}
	if !announced {
		score -= other
		if near.anyID() || near.anyOf(ctxCard, ctxAccount, ctxPassport, ctxLicence, ctxMedical, ctxIBAN) {
			if score >= 0.7 {
				score -= 0.15
			} else {
				score -= 0.3
			}
		}
		if epoch(d) && !grouped {
			score -= 0.2
		}
		if score >= 0.25 {
			score += alone
		}
	}
	offer(kindPhone, "phone", score-penalty)
}

func minGroup(form string) int {
	m := 9
	for i := range len(form) {
		m = min(m, int(form[i]-'0'))
	}
	return m
}

// callingCode reports whether digits begin with a country's calling code (ITU-T E.164).
func callingCode(d []byte) bool {
	switch d[0] {
	case '1', '7':
		return len(d) >= 11
	case '2':
		return d[1] == '0' || d[1] == '7' || d[1] == '1' || d[1] == '2' || d[1] == '3' || d[1] == '4' || d[1] == '5' || d[1] == '6' || d[1] == '9'
	case '0':
		return false
	}
	return true
}

// ipv4 finds four numbers with dots.
func (s *scan) ipv4(r *run) bool {
	if r.count != 4 || r.groups[0].sep != '.' || r.groups[1].sep != '.' || r.groups[2].sep != '.' {
		return false
	}
	at := 0
	var oct [4]int
	for k := range 4 {
		g := r.groups[k]
		oct[k] = num(r.digits[at : at+int(g.n)])
		if g.n > 3 || oct[k] > 255 || g.n > 1 && r.digits[at] == '0' {
			return false
		}
		at += int(g.n)
	}
	start, end := int(r.groups[0].start), int(r.groups[3].start)+int(r.groups[3].n)
	near := s.near(r.groups[0].tok, r.last)
	score := float32(0.75)
	switch {
	case oct[0] == 10, oct[0] == 127, oct[0] == 0, oct[0] == 192 && oct[1] == 168, oct[0] == 172 && oct[1]&0xf0 == 16, oct[0] == 255, oct[0] == 169 && oct[1] == 254,
		oct[0] == 192 && oct[1] == 0 && oct[2] == 2, oct[0] == 198 && oct[1] == 51 && oct[2] == 100, oct[0] == 203 && oct[1] == 0 && oct[2] == 113:
		score = 0.52 // of nobody, or of a network of one's own
	case oct[0] < 10 && oct[1] < 20 && oct[2] < 30 && !near.has(ctxIP):
		score = 0.4 // rather a version, or a section
	}
	if near.has(ctxVersion) || start > 0 && s.text[start-1]|0x20 == 'v' {
		score -= 0.4
	}
	if near.has(ctxIP) {
		score += 0.05
	}
	s.hit(kindIP, "ipv4", score, start, end)
	return true
}

// announced reports numbers that only words make personal.
func (s *scan) announced(r *run, near *contexts, total int) {
	for k := range r.count - 1 {
		if g := r.groups[k].sep; g == ',' || g == '.' || g == '/' || g != r.groups[0].sep {
			return
		}
	}
	if at := int(r.groups[0].start); at > 0 && s.text[at-1] == '/' {
		return
	}
	start, end := int(r.groups[0].start), int(r.groups[r.count-1].start)+int(r.groups[r.count-1].n)
	s.byContext(near, start, end, total, r.count)
}

// byContext reports a number or code whose kind only its context tells.
func (s *scan) byContext(near *contexts, start, end, digits, groups int) {
	if near.has(ctxOther) && !near.anyOf(ctxPassport, ctxLicence) {
		return
	}
	switch {
	case near.has(ctxPassport) && digits >= 6 && digits <= 10:
		s.hit(kindPassport, "passport", 0.65, start, end)
	case near.has(ctxLicence) && digits >= 5 && digits <= 16:
		s.hit(kindLicence, "licence", 0.6, start, end)
	case near.has(ctxMedical) && digits >= 5 && digits <= 14:
		s.hit(kindMedical, "medical", 0.6, start, end)
	case near.anyID() && digits >= 7 && digits <= 18, near.has(ctxNationalID) && digits >= 7 && digits <= 18:
		s.hit(kindNationalID, "announced", 0.55, start, end)
	case near.anyOf(ctxAccount, ctxIBAN) && digits >= 5 && digits <= 20:
		s.hit(kindAccount, "account", 0.55, start, end)
	case near.has(ctxCard) && digits >= 12 && digits <= 19:
		s.hit(kindCard, "card-typo", 0.5, start, end)
	case near.has(ctxPhone) && digits >= 6 && digits <= 15 && groups > 1:
		s.hit(kindPhone, "phone", 0.5, start, end)
	}
}
