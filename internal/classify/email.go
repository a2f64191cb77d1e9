package classify

import (
	"bytes"
	"unicode/utf8"
)

// fileEndings look like top-level domains and are none.
var fileEndings = map[string]bool{"png": true, "jpg": true, "jpeg": true, "gif": true, "svg": true, "webp": true, "js": true, "ts": true, "css": true, "html": true,
	"json": true, "yaml": true, "yml": true, "txt": true, "md": true, "jsx": true, "tsx": true, "mjs": true, "map": true, "pdf": true, "exe": true, "dll": true, "zip": true, "gz": true, "tgz": true, "lock": true, "toml": true, "local": true, "service": true, "java": true, "scss": true}

func localByte(b byte) bool {
	return isAlnum(b) || b >= utf8.RuneSelf || b == '.' || b == '_' || b == '+' || b == '-' || b == '%' || b == '\'' || b == '!' || b == '#' || b == '$' || b == '&' || b == '*' || b == '~'
}

// email judges what stands around the @ of token i.
func (s *scan) email(i int) {
	at := int(s.toks[i].start)
	a := at
	for a > 0 && at-a < 64 && localByte(s.text[a-1]) {
		a--
	}
	for a < at && !isAlnum(s.text[a]) && s.text[a] < utf8.RuneSelf { // quotes and the like are none of it
		a++
	}
	b, dot, label := at+1, 0, 0
	for b < len(s.text) && b-at < 255 {
		c := s.text[b]
		if c == '.' {
			if label == 0 {
				break
			}
			// Only a letter behind it makes it a part of the domain.
			if b+1 >= len(s.text) || !isAlnum(s.text[b+1]) && s.text[b+1] < utf8.RuneSelf {
				break
			}
			dot, label = b, 0
			b++
			continue
		}
		if !isAlnum(c) && c != '-' && c < utf8.RuneSelf {
			break
		}
		label++
		b++
	}
	if a == at || b == at+1 {
		return
	}
	for b > at+1 && s.text[b-1] == '-' {
		b--
	}
	if at+1 < len(s.text) && s.text[at+1] == '[' {
		return
	}
	if dot == 0 {
		near := s.near(i, i+1)
		if near.has(ctxEmail) {
			s.hit(kindEmail, "email-host", 0.45, a, b)
		}
		return
	}
	tld := string(bytes.ToLower(s.text[dot+1 : b]))
	if len(tld) < 2 || tld[0] >= '0' && tld[0] <= '9' || fileEndings[tld] {
		return
	}
	score := float32(0.92)
	local := s.text[a:at]
	switch {
	case bytes.Equal(local, []byte("git")):
		score = 0.3
	case b < len(s.text) && s.text[b] == ':' && b+1 < len(s.text) && isAlnum(s.text[b+1]):
		score = 0.5
	case bytes.HasPrefix(s.text[at+1:], []byte("example.")) || bytes.HasSuffix(s.text[at+1:b], []byte(".example")):
		score = 0.55
	case a > 1 && s.text[a-1] == ':' && bytes.LastIndexByte(s.text[max(0, a-20):a], '/') >= 0:
		score = 0.5 // a password within a URL
	}
	s.hit(kindEmail, "email", score, a, b)
}

// spelledEmail judges "at" in "john at example dot com", from its token.
func (s *scan) spelledEmail(i int) {
	bracket := func(k int) bool {
		return k >= 0 && k < len(s.toks) && (s.toks[k].sign == '[' || s.toks[k].sign == '(' || s.toks[k].sign == '{' || s.toks[k].sign == '<')
	}
	left, right := i-1, i+1
	marked := bracket(left)
	if marked {
		left--
		right++
	}
	if left < 0 || right >= len(s.toks) || s.toks[left].kind == tokSign || s.toks[right].kind == tokSign || s.toks[right].gap >= gapLine {
		return
	}
	// Domain: words with "dot" or dots between them.
	k, dots, spelled, english := right, 0, false, false
	last := right
	for k < len(s.toks) && k < right+16 {
		n := k + 1
		if n >= len(s.toks) {
			break
		}
		open := bracket(n)
		if open {
			n++
		}
		if n >= len(s.toks) || s.toks[n].gap >= gapLine {
			break
		}
		isDot := s.toks[n].sign == '.' && (open || s.toks[n].gap == gapNone) || s.toks[n].kind == tokWord && s.toks[n].len() == 3 && (s.toks[n].hash == hashDot || s.toks[n].hash == hashPunkt) || s.toks[n].hash == hashPunto || s.toks[n].hash == hashPoint
		if !isDot && s.toks[n].sign == '-' && s.toks[n].gap == gapNone {
			k = n + 1
			continue
		}
		if !isDot {
			break
		}
		spelled = spelled || s.toks[n].kind == tokWord || open
		english = english || s.toks[n].hash == hashDot || s.toks[n].sign == '.'
		n++
		if open {
			n++
		}
		if n >= len(s.toks) || s.toks[n].kind != tokWord || s.toks[n].gap >= gapLine {
			break
		}
		dots++
		k, last = n, n
	}
	tld := s.toks[last].len()
	if dots == 0 || tld < 2 || tld > 10 || !marked && !spelled || !marked && (tld > 6 || s.toks[last].lex&lexVery != 0 && tld < 3 || !english && s.toks[last].lex&(lexCommon|lexVery) != 0) {
		return
	}
	first := left
	for first > 0 && left-first < 8 {
		p := &s.toks[first-1]
		if p.kind == tokSign && p.sign != '.' && p.sign != '_' && p.sign != '-' && p.sign != '+' || s.toks[first].gap != gapNone && (p.kind == tokSign || p.hash != hashDot) {
			break
		}
		first--
	}
	score := float32(0.8)
	if !marked && s.toks[last].lex&lexCommon != 0 && dots == 1 && tld > 4 {
		score = 0.4
	}
	s.hit(kindEmail, "email-spelled", score, int(s.toks[first].start), int(s.toks[last].end))
}

var hashAt, hashDot, hashPunkt, hashPunto, hashPoint, hashArroba = hashWord("at"), hashWord("dot"), hashWord("punkt"), hashWord("punto"), hashWord("point"), hashWord("arroba")

// mail finds addresses, plain and spelled, and IPv6 on the way.
func (s *scan) mail() {
	for i := range s.toks {
		t := &s.toks[i]
		switch {
		case t.sign == '@':
			s.email(i)
		case t.sign == ':':
			s.ipv6(i)
		case t.hash == hashAt && t.kind == tokWord, t.hash == hashArroba:
			s.spelledEmail(i)
		}
	}
}
