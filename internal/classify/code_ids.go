package classify

import (
	"bytes"
	"crypto/sha256"
	"net/netip"
	"unicode/utf8"
)

// codes finds what has letters and digits: identity numbers, IBANs, wallets,
// passports and the like.
func (s *scan) codes() {
	for i := 0; i < len(s.toks); i++ {
		t := &s.toks[i]
		if t.kind == tokSign || t.len() > 128 {
			continue
		}
		if t.kind == tokMixed || t.kind == tokWord && t.len() <= 12 && t.len() >= 1 {
			if t.kind == tokWord && !s.codeAhead(i) {
				continue
			}
		} else if t.kind != tokNumber || !s.codeAhead(i) {
			continue
		}
		if j := s.code(i); j > i {
			i = j - 1
		}
	}
}

// codeAhead reports whether a word or number may begin a code: the next token
// stands close and has digits, or is a short word behind a number.
func (s *scan) codeAhead(i int) bool {
	t := &s.toks[i]
	if t.kind == tokWord && (t.lex&(lexCommon|lexVery) != 0 && t.shape == shapeLower || t.shape == shapeLower && t.len() > 4) {
		return false
	}
	for k := i + 1; k < len(s.toks) && k < i+8; k++ {
		n := &s.toks[k]
		if n.gap >= gapLine {
			return false
		}
		switch n.kind {
		case tokSign:
			if n.sign != '-' && n.sign != '.' && n.sign != '/' && n.sign != '(' && n.sign != '+' || n.gap != gapNone {
				return false
			}
		case tokMixed:
			return true
		case tokNumber:
			if t.kind == tokWord {
				return true
			}
		case tokWord:
			return t.kind == tokNumber && n.len() <= 2
		}
	}
	return false
}

const maxCode = 36

// code reads the code that begins with token i: it tries ever more tokens, and
// takes the longest that means something. It returns the token behind it.
func (s *scan) code(i int) int {
	buf, raw := &s.codeBuf, &s.codeRaw // a checksum behind a function value makes locals escape
	n, k := 0, 0                       // letters and digits; with signs
	best := 0
	var found struct {
		kind  kind
		rule  string
		score float32
		end   int32
	}
	var near contexts
	haveNear := false
	around := func(j int) *contexts {
		if !haveNear {
			near, haveNear = s.near(i, j), true
		}
		return &near
	}
	digits, letters := 0, 0
	for j := i; j < len(s.toks) && j < i+18; j++ {
		t := &s.toks[j]
		if j > i && t.gap >= gapLine {
			break
		}
		if t.kind == tokSign {
			if t.sign != '-' && t.sign != '.' && t.sign != '/' && t.sign != '(' && t.sign != ')' && t.sign != '+' || t.gap != gapNone || k >= maxCode {
				break
			}
			raw[k] = t.sign
			k++
			continue
		}
		w := s.text[t.start:t.end]
		if n+len(w) > maxCode || k+len(w)+1 > maxCode || bytes.IndexFunc(w, func(r rune) bool { return r >= utf8.RuneSelf }) >= 0 {
			break
		}
		for _, b := range w {
			if b >= 'a' && b <= 'z' {
				b -= 0x20
			}
			if b <= '9' {
				digits++
			} else {
				letters++
			}
			buf[n], raw[k] = b, b
			n++
			k++
		}
		if digits < 3 || letters == 0 || n < 7 {
			continue
		}
		// What goes on without a gap is one code.
		if j+1 < len(s.toks) && s.toks[j+1].gap == gapNone && s.toks[j+1].kind != tokSign {
			continue
		}
		code := buf[:n]
		lower := s.toks[i].shape == shapeLower || t.shape == shapeLower
		take := func(k kind, rule string, score float32) {
			if score >= 0.3 && score >= found.score {
				found.kind, found.rule, found.score, found.end, best = k, rule, score, t.end, j+1
			}
		}
		if n >= 15 && byteClass[code[0]] == 1 && byteClass[code[1]] == 1 && byteClass[code[2]] == 2 && byteClass[code[3]] == 2 {
			if want := ibanLengths[string(code[:2])]; want == n {
				switch {
				case ibanValid(code):
					take(kindIBAN, "iban", 0.96)
				case around(j+1).anyOf(ctxIBAN, ctxAccount):
					take(kindIBAN, "iban-typo", 0.6)
				case digits >= 12 && (j == i || s.toks[i].len() == 4):
					take(kindIBAN, "iban-typo", 0.4)
				}
			}
		}
		for _, l := range s.m.lettersByLength[min(n, 19)] {
			id := &letterIDs[l]
			if !shaped(code, id.form) {
				continue
			}
			own := around(j + 1).has(s.m.letterContext[l])
			if !id.valid(code) {
				if own {
					take(kindNationalID, id.name, 0.55)
				}
				continue
			}
			score := [...]float32{0.35, 0.5, 0.7}[id.strength]
			if id.needsContext {
				score = 0.1
			}
			switch {
			case own:
				score += 0.4
			case near.has(ctxNationalID):
				score += 0.3
			case near.has(ctxOther):
				score -= 0.2
			}
			if j > i && id.strength != strong {
				score -= 0.1
			}
			if lower {
				score -= 0.15
			}
			if s.short {
				score += 0.2
			}
			take(kindNationalID, id.name, min(score, 0.98))
		}
		// A HETU's sign tells the century.
		if k == 11 && shaped(raw[:k], "999999s999X") && dmy(raw[:k]) {
			id := &letterIDs[s.m.hetu]
			if id.valid(raw[:k]) {
				take(kindNationalID, id.name, 0.85)
			} else if around(j + 1).has(s.m.letterContext[s.m.hetu]) {
				take(kindNationalID, id.name, 0.55)
			}
		}
	}
	if best > 0 {
		s.hit(found.kind, found.rule, found.score, int(s.toks[i].start), int(found.end))
		return best
	}
	t := &s.toks[i]
	if t.kind == tokMixed {
		s.mixed(i, t)
	} else if t.kind == tokWord && t.len() <= 3 && i+1 < len(s.toks) && (t.shape == shapeUpper || t.shape == shapeTitle) {
		// AB 123456, as passports and licences are written.
		for j := i + 1; j < min(len(s.toks), i+3); j++ {
			u := &s.toks[j]
			if u.kind == tokNumber && u.len() >= 5 && u.len() <= 9 && u.gap <= gapSpace {
				near := s.near(i, j+1)
				if near.anyOf(ctxPassport, ctxLicence, ctxMedical) {
					s.byContext(&near, int(t.start), int(u.end), u.len(), 1)
					return j + 1
				}
			}
		}
	}
	return i
}

// mixed judges one token of letters and digits.
func (s *scan) mixed(i int, t *token) {
	w := s.text[t.start:t.end]
	if s.wallet(w, i, t) {
		return
	}
	digits := 0
	for _, b := range w {
		if b >= '0' && b <= '9' {
			digits++
		}
	}
	if digits >= 4 && len(w) >= 5 && len(w) <= 20 && (t.start == 0 || s.text[t.start-1] != '/' && s.text[t.start-1] != '-') {
		near := s.near(i, i+1)
		switch {
		case near.has(ctxPassport) && len(w) <= 12:
			s.hit(kindPassport, "passport", 0.65, int(t.start), int(t.end))
		case near.has(ctxLicence):
			s.hit(kindLicence, "licence", 0.6, int(t.start), int(t.end))
		case near.has(ctxMedical):
			s.hit(kindMedical, "medical", 0.6, int(t.start), int(t.end))
		case (near.anyID() || near.has(ctxNationalID)) && digits >= 6:
			s.hit(kindNationalID, "announced", 0.5, int(t.start), int(t.end))
		case near.has(ctxAccount) && !near.has(ctxOther):
			s.hit(kindAccount, "account", 0.5, int(t.start), int(t.end))
		}
	}
	// Digits glued to a word: ssn123456789.
	if digits >= 7 {
		s.glued(t, w)
	}
}

// glued reads the longest stretch of digits within a token.
func (s *scan) glued(t *token, w []byte) {
	from, to := 0, 0
	for i := 0; i < len(w); {
		j := i
		for j < len(w) && w[j] >= '0' && w[j] <= '9' {
			j++
		}
		if j-i > to-from {
			from, to = i, j
		}
		i = j + 1
	}
	d := w[from:to]
	if len(d) < 7 || len(d) > 19 || len(w)-len(d) > 16 || from > 0 && to < len(w)-1 {
		return
	}
	start := int(t.start) + from
	if len(d) >= 13 && cardNetwork(d) && luhn(d) && !same(d) {
		s.hit(kindCard, "card", 0.5, start, start+len(d))
		return
	}
	// dni12345678Z, as it comes out of letters with spaces between them.
	if from > 0 {
		if c := s.m.lexicon.announces(hashWord(string(w[:from]))); c != 0 {
			t.ctx = c
		}
	}
	if t.ctx > 0 && (t.ctx >= ctxIDs || t.ctx == ctxPhone || t.ctx == ctxNationalID || t.ctx == ctxAccount) {
		s.hit(kindNationalID, "announced", 0.5, start, start+len(d))
	}
}

const base58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

var base58Value = func() (t [256]int8) {
	for i := range t {
		t[i] = -1
	}
	for i := range len(base58) {
		t[base58[i]] = int8(i)
	}
	return t
}()

// base58Check reports whether w carries a valid checksum (Bitcoin's Base58Check).
func base58Check(w []byte) bool {
	var n [40]byte
	for _, b := range w {
		v := base58Value[b]
		if v < 0 {
			return false
		}
		carry := int(v)
		for i := len(n) - 1; i >= 0; i-- {
			carry += int(n[i]) * 58
			n[i] = byte(carry)
			carry >>= 8
		}
	}
	body := n[len(n)-25:]
	a := sha256.Sum256(body[:21])
	b := sha256.Sum256(a[:])
	return bytes.Equal(b[:4], body[21:])
}

// bech32 reports whether w carries a valid checksum of BIP 173 or 350.
func bech32(w []byte) bool {
	const charset = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
	sep := bytes.LastIndexByte(w, '1')
	if sep < 1 || sep+7 > len(w) {
		return false
	}
	chk := uint32(1)
	step := func(v byte) {
		top := chk >> 25
		chk = chk&0x1ffffff<<5 ^ uint32(v)
		for i, g := range [...]uint32{0x3b6a57b2, 0x26508e6d, 0x1ea119fa, 0x3d4233dd, 0x2a1462b3} {
			if top>>i&1 != 0 {
				chk ^= g
			}
		}
	}
	for _, b := range w[:sep] {
		step(lowerByte(b) >> 5)
	}
	step(0)
	for _, b := range w[:sep] {
		step(lowerByte(b) & 31)
	}
	for _, b := range w[sep+1:] {
		v := bytes.IndexByte([]byte(charset), lowerByte(b))
		if v < 0 {
			return false
		}
		step(byte(v))
	}
	return chk == 1 || chk == 0x2bc830a3
}

// wallet finds addresses of crypto currencies, most by their checksums.
func (s *scan) wallet(w []byte, i int, t *token) bool {
	n := len(w)
	if n < 25 || n > 110 {
		return false
	}
	found := func(rule string, score float32) bool {
		s.hit(kindWallet, rule, score, int(t.start), int(t.end))
		return true
	}
	switch {
	case n == 42 && w[0] == '0' && w[1]|0x20 == 'x' && allHex(w[2:]):
		return found("ethereum", 0.9)
	case n <= 35 && (w[0] == '1' || w[0] == '3' || w[0] == 'L' || w[0] == 'M' || w[0] == 'D' || w[0] == 'T' || w[0] == 'X') && base58Check(w):
		return found("base58check", 0.95)
	case (bytes.HasPrefix(w, []byte("bc1")) || bytes.HasPrefix(w, []byte("ltc1")) || bytes.HasPrefix(w, []byte("addr1")) || bytes.HasPrefix(w, []byte("BC1"))) && bech32(w):
		return found("bech32", 0.95)
	}
	near := s.near(i, i+1)
	if !near.has(ctxWallet) {
		if n == 95 && (w[0] == '4' || w[0] == '8') && allBase58(w) {
			return found("monero", 0.8)
		}
		return false
	}
	if n <= 64 && allBase58(w) || n == 64 && allHex(w) || bytes.HasPrefix(w, []byte("bc1")) || bytes.HasPrefix(w, []byte("addr1")) || n == 95 {
		return found("announced-wallet", 0.7)
	}
	return false
}

func allHex(w []byte) bool {
	for _, b := range w {
		if hexValue(b) < 0 {
			return false
		}
	}
	return true
}

func allBase58(w []byte) bool {
	for _, b := range w {
		if base58Value[b] < 0 {
			return false
		}
	}
	return true
}

// ipv6 judges what stands around the colon of token i.
func (s *scan) ipv6(i int) {
	at := int(s.toks[i].start)
	if at+1 >= len(s.text) || at == 0 && s.text[1] != ':' {
		return
	}
	in := func(b byte) bool { return hexValue(b) >= 0 || b == ':' || b == '.' }
	a, b := at, at
	for a > 0 && in(s.text[a-1]) && at-a < 46 {
		a--
	}
	for b < len(s.text) && in(s.text[b]) && b-at < 46 {
		b++
	}
	for b > a && (s.text[b-1] == '.' || s.text[b-1] == ':' && (b-2 < a || s.text[b-2] != ':')) {
		b--
	}
	w := s.text[a:b]
	if int(s.lastIP) >= b || len(w) < 6 || bytes.Count(w, []byte(":")) < 2 || a > 0 && isAlnum(s.text[a-1]) || b < len(s.text) && isAlnum(s.text[b]) {
		return
	}
	addr, err := netip.ParseAddr(string(w))
	if err != nil || !addr.Is6() {
		return
	}
	if bytes.Contains(w, []byte("::")) && !bytes.ContainsAny(w, "0123456789") {
		return
	}
	s.lastIP = int32(b)
	score := float32(0.75)
	if addr.IsLoopback() || addr.IsPrivate() || addr.IsLinkLocalUnicast() || bytes.HasPrefix(w, []byte("2001:db8")) {
		score = 0.52
	}
	s.hit(kindIP, "ipv6", score, a, b)
}

func isAlnum(b byte) bool { return b < utf8.RuneSelf && (byteClass[b] == 1 || byteClass[b] == 2) }
