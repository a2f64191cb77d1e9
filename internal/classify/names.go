package classify

import "bytes"

// namedScripts are those whose names and addresses are looked for. In others
// the answer is unknown.
var namedScripts = [scriptCount]bool{scriptLatin: true, scriptGreek: true, scriptCyrillic: true, scriptArmenian: true, scriptHebrew: true,
	scriptArabic: true, scriptDevanagari: true, scriptGeorgian: true}

// strangeLetters are so many letters of another script that names may hide in them.
const strangeLetters = 6

// names finds persons and addresses.
func (s *scan) names(scripts *[scriptCount]int32) {
	strange := int32(0)
	for i, n := range scripts {
		if !namedScripts[i] {
			strange += n
		}
	}
	if strange >= strangeLetters {
		s.res.cause(detNames, causeLanguage)
	}
	s.tag()
	s.codey = s.looksLikeCode()
	s.addresses()
	for i := 0; i < len(s.toks); {
		if s.tags[i] == tagNone {
			i++
			continue
		}
		j := i + 1
		for j < len(s.toks) && s.tags[j] == s.tags[i] && s.toks[j].gap < gapPara {
			j++
		}
		a, b := i, j
		for a < b && s.toks[a].kind == tokSign {
			a++
		}
		for b > a && s.toks[b-1].kind == tokSign {
			b--
		}
		if a < b {
			if s.tags[i] == tagPerson {
				s.person(a, b)
			} else {
				s.address(a, b)
			}
		}
		i = j
	}
	s.announcedNames()
}

// confidence turns a margin into a score around tagThreshold.
func confidence(m float32) float32 { return 0.5 + min(m, 4)*0.06 }

// person judges tokens [a, b), which the tagger takes for a name.
func (s *scan) person(a, b int) {
	var m float32
	words, known, long := 0, false, false
	for k := a; k < b; k++ {
		t := &s.toks[k]
		if t.kind == tokWord || t.kind == tokMixed {
			words++
			m += s.margins[k]
			known = known || t.lex&(lexFirst|lexLast) != 0
			long = long || t.len() > 2
		}
	}
	if words == 0 || !long {
		return
	}
	score := confidence(m / float32(words))
	if !known {
		score -= 0.04
	}
	// In code a capitalised word is a type or a word of a comment, unless both names are known.
	if s.codey && !s.fullName(a, b) {
		score -= 0.3
		if score < tagThreshold {
			return
		}
	}
	if s.private(a, b, words) {
		score = max(score, 0.55) + 0.25
	}
	// A title belongs to the name.
	if k := a - 1; k >= 0 && s.toks[k].lex&lexTitle != 0 {
		a = k
	} else if k > 0 && s.toks[k].sign == '.' && s.toks[k-1].lex&lexTitle != 0 {
		a = k - 1
	}
	s.hit(kindPerson, "tagger", min(score, 0.98), int(s.toks[a].start), int(s.toks[b-1].end))
}

// codeTokens are so many tokens that their signs tell code from prose.
const codeTokens = 40

// looksLikeCode reports whether a quarter of the tokens are signs of code.
func (s *scan) looksLikeCode() bool {
	if len(s.toks) < codeTokens {
		return false
	}
	n := 0
	for i := range s.toks {
		switch s.toks[i].sign {
		case '{', '}', '(', ')', ';', '=', '<', '>', '[', ']', '_', '*', '&', '|', '+':
			n++
		}
	}
	return n*6 > len(s.toks)
}

// fullName reports whether tokens [a, b) are a first and a last name of the lexicon.
func (s *scan) fullName(a, b int) bool {
	words := 0
	for k := a; k < b; k++ {
		if t := &s.toks[k]; t.kind == tokWord && t.len() > 1 {
			if t.shape != shapeTitle || t.lex&(lexFirst|lexLast) == 0 {
				return false
			}
			words++
		}
	}
	return words >= 2
}

// private reports whether something around a name says that it is not a public
// figure, a brand or a character: a title or role before it, a field's name, a
// greeting or a signature, another identifier.
func (s *scan) private(a, b, words int) bool {
	for k, n := a-1, 0; k >= 0 && n < 4; k-- {
		t := &s.toks[k]
		if s.toks[k+1].gap == gapPara || t.sign == '.' && s.toks[k+1].gap > gapNone && k < a-1 && s.toks[k-1].lex&lexTitle == 0 {
			break
		}
		if t.kind == tokSign {
			continue
		}
		n++
		if t.ctx == ctxName || t.ctx == ctxPhone || t.ctx == ctxEmail || t.ctx == ctxBirth || t.ctx == ctxAccount && n < 3 {
			return true
		}
		if t.lex&lexRole != 0 && n <= 2 || t.lex&lexTitle != 0 && n == 1 && words <= 2 && t.shape == shapeTitle {
			return true
		}
	}
	// A line of its own, as in letters and forms.
	lineEnd := b >= len(s.toks) || s.toks[b].gap >= gapLine || s.toks[b].sign == ',' && (b+1 >= len(s.toks) || s.toks[b+1].gap >= gapLine)
	if s.toks[a].gap >= gapLine && lineEnd && a > 0 && words >= 2 && words <= 4 {
		return true
	}
	end := int(s.toks[b-1].end)
	for k := b; k < len(s.toks) && k < b+6; k++ {
		t := &s.toks[k]
		if t.gap == gapPara || int(t.start)-end > 40 {
			break
		}
		if t.ctx == ctxBirth || t.ctx == ctxPhone || t.ctx == ctxAddress && k < b+3 {
			return true
		}
	}
	return s.identified(int(s.toks[a].start), end)
}

// identified reports whether an identifier was found nearby in this view.
func (s *scan) identified(a, b int) bool {
	x, y := s.view.span(a, b)
	for i := len(s.res.hits) - 1; i >= 0 && i > len(s.res.hits)-64; i-- {
		h := &s.res.hits[i]
		if structured(h.kind) && h.kind != kindIP && h.score >= 0.5 && h.start < y+160 && h.end > x-160 {
			return true
		}
	}
	return false
}

// announcedNames finds what "name:" says, also where the tagger knows no
// language: 姓名：张伟, 이름: 김철수.
func (s *scan) announcedNames() {
	for i := range s.toks {
		if s.toks[i].ctx != ctxName || i+2 >= len(s.toks) {
			continue
		}
		j := i + 1
		for j < len(s.toks) && j < i+4 && s.toks[j].kind == tokSign && s.toks[j].gap < gapLine && (s.toks[j].sign == ':' || s.toks[j].sign == '"' || s.toks[j].sign == '=' || s.toks[j].sign == '\'') {
			j++
		}
		if j == i+1 || j >= len(s.toks) || s.toks[j].kind != tokWord || s.toks[j].gap >= gapLine {
			continue
		}
		if s.tags[j] == tagPerson || (s.toks[j].lex&(lexFirst|lexLast) == 0 || s.toks[j].lex&(lexCommon|lexVery) != 0 || s.codey && s.toks[j].shape != shapeTitle) && s.text[s.toks[j].start] < 0x80 {
			continue
		}
		k := j + 1
		for k < len(s.toks) && k < j+3 && s.toks[k].kind == tokWord && s.toks[k].gap <= gapSpace {
			k++
		}
		s.hit(kindPerson, "announced", 0.8, int(s.toks[j].start), int(s.toks[k-1].end))
	}
}

// streetEndings end street names in one word; streetFirst stand before the name.
var streetEndings = [][]byte{[]byte("strasse"), []byte("straße"), []byte("str"), []byte("gatan"), []byte("gata"), []byte("gate"), []byte("gaten"), []byte("vägen"), []byte("vagen"), []byte("veien"), []byte("vegen"), []byte("gade"), []byte("vej"),
	[]byte("straat"), []byte("laan"), []byte("weg"), []byte("gracht"), []byte("plein"), []byte("allee"), []byte("gasse"), []byte("platz"), []byte("katu"), []byte("tie"), []byte("utca"), []byte("kade"), []byte("dreef"), []byte("singel"), []byte("damm"), []byte("ufer"), []byte("steenweg"), []byte("lei"), []byte("stígur"), []byte("gatan")}

var streetFirst = func() map[uint32]bool {
	m := map[uint32]bool{}
	for _, w := range []string{"rue", "via", "viale", "piazza", "corso", "vicolo", "calle", "avenida", "avda", "plaza", "paseo", "carrer", "rua", "travessa", "praca", "ulica", "ul", "aleja", "οδος", "λεωφορος", "улица", "ул", "проспект", "переулок", "strada", "bulevardul", "jalan", "impasse", "chemin", "allee", "quai", "avenue", "boulevard", "place"} {
		m[hashWord(w)] = true
	}
	return m
}()

var unitWords = func() map[uint32]bool {
	m := map[uint32]bool{}
	for _, w := range []string{"suite", "apt", "apartment", "unit", "flat", "room", "floor"} {
		m[hashWord(w)] = true
	}
	return m
}()

// measures follow numbers that are no house's.
var measures = splitWords("feet|foot|meters|metres|meter|inches|inch|miles|mile|yards|kilometers|square|units|hours|minutes|days|percent|drive|stars|people|pages")

var hardDrives = splitWords("hard|flash|disk|test|usb|state|thumb|tape|solid|food|blood")

var fieldPost = splitWords("fpo|apo|dpo")

var placeWords = splitWords("on|at|in|near|from|to|along|of|off|down|up")

var hashBox, hashPO, hashPostfach = hashWord("box"), hashWord("po"), hashWord("postfach")

// addresses finds what has the form of an address: number and street, post
// boxes, units, postcodes.
func (s *scan) addresses() {
	for i := range s.toks {
		t := &s.toks[i]
		if t.kind != tokWord {
			if t.kind == tokMixed {
				s.postcode(i)
			}
			continue
		}
		switch {
		case fieldPost[t.hash] && i+2 < len(s.toks) && s.toks[i+1].len() == 2 && s.toks[i+2].kind == tokNumber && s.toks[i+2].len() == 5:
			s.addressHit("field-post", 0.8, max(0, i-2), i+3)
		case (t.hash == hashBox || t.hash == hashPostfach) && s.number(i+1):
			a := i
			for a > 0 && i-a < 4 && (s.toks[a-1].sign == '.' || s.toks[a-1].hash == hashPO || s.toks[a-1].len() == 1 && s.toks[a-1].kind == tokWord) {
				a--
			}
			if a < i || t.hash == hashPostfach {
				s.addressHit("post-box", 0.75, a, i+2)
			}
		case unitWords[t.hash] && t.shape != shapeLower && (s.number(i+1) || i+2 < len(s.toks) && s.toks[i+1].sign == '.' && s.number(i+2)):
			j := i + 2
			if s.toks[i+1].kind == tokSign {
				j++
			}
			s.addressHit("unit", 0.6, i, j)
		case t.lex&lexStreet != 0 && !unitWords[t.hash] && t.shape != shapeMixed && t.len() > 1 || s.streetWord(t):
			s.street(i, t)
		}
	}
}

func (s *scan) number(i int) bool {
	if i >= len(s.toks) || s.toks[i].gap >= gapLine {
		return false
	}
	t := &s.toks[i]
	return t.kind == tokNumber && t.len() <= 6 || t.kind == tokMixed && t.len() <= 6 && byteClass[s.text[t.start]&0x7f] == 2
}

func (s *scan) streetWord(t *token) bool {
	if t.len() < 7 || t.lex&(lexCommon|lexVery) != 0 && t.shape == shapeLower {
		return false
	}
	w := s.text[t.start:t.end]
	for _, e := range streetEndings {
		if len(w) > len(e)+2 && lowerByte(w[len(w)-1]) == e[len(e)-1] && bytes.EqualFold(w[len(w)-len(e):], e) {
			return true
		}
	}
	return false
}

// street judges a street word at i: a number before "Main Street", or behind
// "Hauptstraße" and "rue de Rivoli".
func (s *scan) street(i int, t *token) {
	named := func(k int) bool {
		u := &s.toks[k]
		return u.kind == tokWord && (u.shape == shapeTitle || u.shape == shapeUpper || u.shape == shapeMixed || u.lex&(lexFirst|lexLast|lexPlace|lexParticle) != 0 && u.lex&lexVery == 0 || u.lex&(lexCommon|lexVery) == 0)
	}
	ordinal := func(k int) bool { return s.toks[k].kind == tokMixed && s.toks[k].len() <= 5 }
	// 221B Baker Street
	names := 0
	for k := i - 1; k >= 0 && i-k < 7; k-- {
		u := &s.toks[k]
		if s.toks[k+1].gap >= gapLine {
			break
		}
		if u.sign == '.' || u.sign == '\'' || u.sign == '-' || u.sign == '/' && names == 0 {
			continue
		}
		if names > 0 && (u.kind == tokNumber && u.len() <= 5 || u.kind == tokMixed && u.len() <= 6 && byteClass[s.text[u.start]&0x7f] == 2 && !bytes.HasSuffix(bytes.ToLower(s.text[u.start:u.end]), []byte("th"))) {
			if names <= 3 && !hardDrives[s.toks[i-1].hash] {
				s.addressHit("street", 0.78, k, i+1)
			}
			return
		}
		if !named(k) && !ordinal(k) {
			if names > 0 && placeWords[u.hash] && t.len() > 2 && (t.shape == shapeTitle || s.toks[k+1].lex&(lexFirst|lexLast) != 0) {
				s.addressHit("street-name", 0.55, k+1, i+1)
			}
			break
		}
		names++
	}
	// Behind it.
	limit := 2
	if streetFirst[t.hash] {
		limit = 7
	} else if !s.streetWord(t) {
		return
	}
	words := 0
	for k := i + 1; k < len(s.toks) && k <= i+limit; k++ {
		u := &s.toks[k]
		if u.gap >= gapLine {
			break
		}
		if s.number(k) {
			if words > 0 || limit == 2 {
				s.addressHit("street", 0.75, i, k+1)
			}
			return
		}
		if u.kind == tokSign && (u.sign == ',' || u.sign == '.' || u.sign == '-' || u.sign == '\'') {
			continue
		}
		if !named(k) {
			break
		}
		words++
	}
}

// postcode finds British, Canadian and Dutch postcodes, which no other text has.
func (s *scan) postcode(i int) {
	t := &s.toks[i]
	if i+1 >= len(s.toks) || s.toks[i+1].gap != gapSpace || s.toks[i+1].kind != tokMixed || s.toks[i+1].len() != 3 || t.len() < 2 || t.len() > 4 {
		return
	}
	a, b := bytes.ToUpper(s.text[t.start:t.end]), bytes.ToUpper(s.text[s.toks[i+1].start:s.toks[i+1].end])
	switch {
	case shaped(b, "9AA") && (shaped(a, "A9") || shaped(a, "A99") || shaped(a, "AA9") || shaped(a, "AA99") || shaped(a, "A9A") || shaped(a, "AA9A")),
		shaped(a, "A9A") && shaped(b, "9A9"):
		s.addressHit("postcode", 0.62, i, i+2)
	}
}

// address judges tokens [a, b), which the tagger takes for an address.
func (s *scan) address(a, b int) {
	numbers, words, street, lines := 0, 0, false, false
	var m float32
	for k := a; k < b; k++ {
		t := &s.toks[k]
		m += s.margins[k]
		switch t.kind {
		case tokNumber, tokMixed:
			numbers++
		case tokWord:
			words++
			// A square, a drive or a place are more often something else.
			street = street || t.lex&lexStreet != 0 && (t.shape != shapeLower || t.lex&(lexCommon|lexVery) == 0 || k > a && s.toks[k-1].kind == tokWord && s.toks[k-1].lex&(lexCommon|lexVery) == 0) || s.streetWord(t)
		}
		lines = lines || k > a && t.gap == gapLine
	}
	near := s.near(a, b)
	evidence := 0
	for _, e := range []struct {
		holds bool
		n     int
	}{{street, 2}, {numbers > 0, 1}, {numbers > 1, 1}, {words > 2, 1}, {near.has(ctxAddress), 2}, {lines, 1}} {
		if e.holds {
			evidence += e.n
		}
	}
	if words == 0 && evidence < 3 || s.codey && !street && !near.has(ctxAddress) {
		return
	}
	score := confidence(m/float32(b-a)) - 0.2 + 0.08*float32(min(evidence, 5))
	if numbers > 0 && b < len(s.toks) && measures[s.toks[b].hash] || numbers == 1 && words == 1 && measures[s.toks[b-1].hash] {
		score -= 0.3
	}
	s.addressHit("tagger", score, a, b)
}

func (s *scan) addressHit(rule string, score float32, a, b int) {
	b = min(b, len(s.toks))
	if score >= tagThreshold {
		a, b = s.wholeAddress(a, b)
	}
	s.hit(kindAddress, rule, score, int(s.toks[a].start), int(s.toks[b-1].end))
}

// wholeAddress takes in the house number before an address, and what leads to a
// postcode behind it.
func (s *scan) wholeAddress(a, b int) (int, int) {
	for n := 0; a > 0 && n < 2 && s.toks[a].gap < gapPara; n++ {
		p := &s.toks[a-1]
		if (p.kind != tokNumber || p.len() > 5) && (p.kind != tokMixed || p.len() > 6 || s.text[p.start] > '9') {
			break
		}
		a--
	}
	lower := b > a && s.toks[b-1].shape == shapeLower
	for k := b; k < len(s.toks) && k < b+12; k++ {
		t := &s.toks[k]
		if t.gap == gapPara {
			break
		}
		if t.kind == tokNumber {
			if t.len() >= 4 && t.len() <= 6 {
				return a, k + 1
			}
			continue
		}
		if t.kind == tokSign && t.sign != ',' && t.sign != '.' && t.sign != '-' && t.sign != '\'' && t.sign != '>' || t.kind == tokWord && t.shape == shapeLower && !lower && t.lex&lexVery != 0 {
			break
		}
	}
	return a, b
}
