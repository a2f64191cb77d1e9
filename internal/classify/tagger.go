package classify

import (
	"bytes"
	"compress/gzip"
	_ "embed" // the weights
	"errors"
	"fmt"
	"io"
	"math"
)

// taggerFile holds the weights of the name tagger; see TrainTagger.
//
//go:embed data/tagger.bin.gz
var taggerFile []byte

// Tags of tokens.
const (
	tagNone = iota
	tagPerson
	tagAddress
	tagCount
)

const (
	taggerBits     = 16
	taggerFeatures = 30
)

// tagger is a greedy averaged perceptron over hashed features of a token, its
// neighbours and the tags before it (Collins, 2002). Four bytes a feature lie
// together, so that each costs one access.
type tagger struct {
	scale float32
	w     [][4]int8
}

// letterCase of a text: names are looked for differently where all is small or large.
const (
	caseMixed = iota
	caseLower
	caseUpper
)

func (s *scan) letterCase() uint32 {
	title, lower, upper := 0, 0, 0
	for i := range s.toks {
		t := &s.toks[i]
		if t.kind != tokWord || t.len() < 2 {
			continue
		}
		switch t.shape {
		case shapeTitle:
			title++
		case shapeLower:
			lower++
		case shapeUpper:
			upper++
		}
	}
	switch {
	case title == 0 && lower > 0 && upper*4 < lower:
		return caseLower
	case upper > 2*(lower+title):
		return caseUpper
	}
	return caseMixed
}

const lexNameMask = lexFirst | lexLast | lexPlace | lexStreet | lexCommon | lexVery | lexTitle | lexMonth | lexRole | lexOrg | lexParticle | lexNumber

// form sums up what a token looks like.
func (s *scan) form(i int) uint32 {
	if i < 0 || i >= len(s.toks) {
		return 0xfff
	}
	t := &s.toks[i]
	switch t.kind {
	case tokSign:
		return 0x100 | uint32(t.sign)
	case tokNumber:
		return 0x200 | uint32(min(t.len(), 7))
	case tokMixed:
		return 0x300 | uint32(min(t.len(), 7))
	}
	n := uint32(1)
	if t.len() > 3 {
		n = 2
	}
	if t.len() == 1 {
		n = 0
	}
	return 0x400 | uint32(t.shape)<<2 | n
}

func mix(id, v uint32) uint32 {
	h := (id*0x9e3779b1 ^ v) * 0x85ebca6b
	h ^= h >> 15
	h *= 0xc2b2ae35
	return h >> (32 - taggerBits)
}

// ends hashes the first and last bytes of a word, in lower case.
func (s *scan) ends(i int) (pre, suf2, suf3 uint32) {
	t := &s.toks[i]
	w := s.text[t.start:t.end]
	n := len(w)
	at := func(k int) uint32 {
		if k < 0 || k >= n {
			return 0
		}
		return uint32(lowerByte(w[k]))
	}
	return at(0)<<16 | at(1)<<8 | at(2), at(n-2)<<8 | at(n-1), at(n-3)<<16 | at(n-2)<<8 | at(n-1)
}

// tagFeatures fills out with the features of token i. drop leaves out the word
// itself and what the lexicon says of it, as for a name it has never seen.
func (s *scan) tagFeatures(i int, mode, prev, prev2 uint32, drop bool, out *[taggerFeatures]uint32) int {
	hash := func(k int) uint32 {
		if k < 0 || k >= len(s.toks) {
			return 7
		}
		return s.toks[k].hash
	}
	lex := func(k int) uint32 {
		if k < 0 || k >= len(s.toks) {
			return 1 << 15
		}
		return uint32(s.toks[k].lex & lexNameMask)
	}
	gap := uint32(s.toks[i].gap)
	next := uint32(4)
	if i+1 < len(s.toks) {
		next = uint32(s.toks[i+1].gap)
	}
	w, l0 := hash(i), lex(i)
	if drop {
		w, l0 = 1, 0
	}
	f0, f1, fn := s.form(i), s.form(i-1), s.form(i+1)
	l1, ln := lex(i-1), lex(i+1)
	pre, suf2, suf3 := s.ends(i)
	n := 0
	add := func(id, v uint32) {
		out[n] = mix(id, v)
		n++
	}
	add(1, 0)
	add(2, w)
	add(3, hash(i-1))
	add(4, hash(i+1))
	add(5, hash(i-2))
	add(6, hash(i+2))
	add(7, f0<<2|mode)
	add(8, f0<<12|f1)
	add(9, f0<<12|fn)
	add(10, f0<<16|l0)
	add(11, l0<<2|mode)
	add(12, l0<<16|l1)
	add(13, l0<<16|ln)
	add(14, l1<<16|ln<<4|f0&15)
	add(15, pre)
	add(16, suf2<<12|f0)
	add(17, suf3)
	add(18, hash(i-1)*31+l0)
	add(19, hash(i+1)*31+l0)
	add(20, hash(i-1)*31+f0)
	add(21, hash(i+1)*31+f0)
	add(22, prev<<2|mode)
	add(23, prev<<18|prev2<<16|l0)
	add(24, prev<<18|f0)
	add(25, prev*0x1000193^w)
	add(26, prev<<20|gap<<18|next<<14|f0)
	add(27, hash(i-1)*0x1000193^hash(i-2))
	add(28, lex(i-2)<<14^l1<<7^l0)
	add(29, f1<<14|fn<<2|mode)
	add(30, prev<<20^ln<<4^l0)
	return n
}

// tagBias is by how much a name or address may lose against nothing.
const tagBias = 6

// tag tags all tokens; margins are how far the best tag is ahead of none.
func (s *scan) tag() {
	n := len(s.toks)
	if cap(s.tags) < n {
		s.tags, s.margins = make([]uint8, n+n/2), make([]float32, n+n/2)
	}
	s.tags, s.margins = s.tags[:n], s.margins[:n]
	mode := s.letterCase()
	var f [taggerFeatures]uint32
	prev, prev2 := uint32(0), uint32(0)
	bias := int32(tagBias / s.m.tagger.scale) // scale is that of the weights
	for i := range n {
		t := &s.toks[i]
		best, margin := uint8(tagNone), float32(0)
		if mayName(t, prev) {
			k := s.tagFeatures(i, mode, prev, prev2, false, &f)
			var sum [4]int32
			for _, x := range f[:k] {
				w := &s.m.tagger.w[x]
				sum[0] += int32(w[0])
				sum[1] += int32(w[1])
				sum[2] += int32(w[2])
			}
			// A name that is missed leaves; one too many only stays at home.
			sum[tagPerson] += bias
			sum[tagAddress] += bias
			for c := uint8(1); c < tagCount; c++ {
				if sum[c] > sum[best] {
					best = c
				}
			}
			if best != tagNone {
				margin = float32(sum[best]-sum[0]) * s.m.tagger.scale
			}
		}
		if best == tagNone && mode == caseMixed && s.surely(i, t) {
			best, margin = tagPerson, 1
		}
		s.tags[i], s.margins[i] = best, margin
		prev2, prev = prev, uint32(best)
	}
	if mode == caseMixed {
		s.lists()
	}
}

// lists takes what stands in a list of names for one: Kovalev, Lee and Phillips.
func (s *scan) lists() {
	name := func(i int) bool {
		return i >= 0 && i < len(s.toks) && s.tags[i] == tagPerson && s.toks[i].kind == tokWord
	}
	for i := range s.toks {
		t := &s.toks[i]
		if s.tags[i] != tagNone || t.kind != tokWord || t.shape != shapeTitle || t.len() < 3 || t.lex&(lexVery|lexPlace|lexOrg) != 0 {
			continue
		}
		joins := func(k int) bool {
			return k >= 0 && k < len(s.toks) && (s.toks[k].sign == ',' || s.toks[k].hash == hashAnd)
		}
		if joins(i+1) && (name(i+2) || joins(i+2) && name(i+3)) && (i == 0 || !name(i-1)) && s.toks[i+2].gap <= gapSpace || joins(i-1) && name(i-2) && (i+1 >= len(s.toks) || s.toks[i+1].kind == tokSign || joins(i+1)) {
			s.tags[i], s.margins[i] = tagPerson, 1
		}
	}
}

var hashAnd = hashWord("and")

// surnameEndings end family names of many languages, and few other words.
var surnameEndings = [][]byte{[]byte("ov"), []byte("ev"), []byte("ova"), []byte("eva"), []byte("enko"), []byte("ski"), []byte("sky"), []byte("ska"), []byte("cki"), []byte("sson"), []byte("ssen"), []byte("elsen"), []byte("ensen"), []byte("ansen"), []byte("dottir"), []byte("dóttir"),
	[]byte("ić"), []byte("vic"), []byte("wicz"), []byte("czyk"), []byte("ová"), []byte("idis"), []byte("akis"), []byte("opoulos"), []byte("oglu"), []byte("shvili"), []byte("dze"), []byte("chuk"), []byte("yan"), []byte("berg"), []byte("mann"), []byte("stein"), []byte("moto"), []byte("mura"), []byte("shita"), []byte("awa"), []byte("ez")}

func surname(w []byte) bool {
	for _, e := range surnameEndings {
		if len(w) > len(e)+2 && bytes.HasSuffix(w, e) {
			return true
		}
	}
	return false
}

var formOfAddress = splitWords("mr|mrs|ms|miss|dr|prof|herr|frau|monsieur|madame|mme|senor|senora|signor|signora|mister|doctor")

// surely reports whether a capitalised word is a name whatever the weights say:
// behind a form of address, or a first name with a last name.
func (s *scan) surely(i int, t *token) bool {
	if t.kind != tokWord || t.shape != shapeTitle && t.shape != shapeMixed || t.len() < 3 {
		return false
	}
	rare := func(u *token) bool { return u.lex&(lexCommon|lexVery|lexPlace|lexMonth|lexOrg) == 0 }
	if k := i - 1; k >= 0 && t.gap == gapSpace {
		if s.toks[k].sign == '.' && k > 0 && s.toks[k].gap == gapNone {
			k--
		}
		p := &s.toks[k]
		if formOfAddress[p.hash] && p.shape == shapeTitle {
			return true
		}
		if p.kind == tokWord && p.shape == shapeTitle && p.lex&lexFirst != 0 && rare(p) && t.lex&(lexLast|lexFirst) != 0 && rare(t) {
			return true
		}
	}
	if t.lex == 0 && t.shape == shapeTitle && t.gap == gapSpace && i > 0 && s.toks[i-1].kind == tokWord && surname(s.text[t.start:t.end]) {
		return true
	}
	if i+1 < len(s.toks) {
		u := &s.toks[i+1]
		return t.lex&lexFirst != 0 && rare(t) && u.kind == tokWord && u.gap == gapSpace && u.shape == shapeTitle && u.lex&(lexLast|lexFirst) != 0 && rare(u)
	}
	return false
}

// mayName spares what cannot be part of a name or an address: signs, and words
// everybody uses, where nothing before them was part of one.
func mayName(t *token, prev uint32) bool {
	if prev != tagNone {
		return true
	}
	switch t.kind {
	case tokSign:
		return false
	case tokWord:
		if t.shape == shapeLower && t.lex&lexVery != 0 && t.lex&(lexFirst|lexLast) == 0 && t.lex&lexStreet == 0 {
			return false
		}
		return t.shape != shapeLower || t.lex&(lexFirst|lexLast|lexStreet|lexPlace) != 0 || t.lex == 0
	}
	return true
}

func loadTagger() (*tagger, error) {
	raw, err := unzip(taggerFile)
	if err != nil {
		return nil, fmt.Errorf("tagger: %w", err)
	}
	if len(raw) != 4+4<<taggerBits {
		return nil, fmt.Errorf("tagger: %d bytes", len(raw))
	}
	t := &tagger{scale: math.Float32frombits(uint32(raw[0])<<24 | uint32(raw[1])<<16 | uint32(raw[2])<<8 | uint32(raw[3])), w: make([][4]int8, 1<<taggerBits)}
	for i := range t.w {
		for k := range 4 {
			t.w[i][k] = int8(raw[4+4*i+k])
		}
	}
	return t, nil
}

func unzip(file []byte) ([]byte, error) {
	if len(file) == 0 {
		return nil, errors.New("no weights")
	}
	z, err := gzip.NewReader(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}
