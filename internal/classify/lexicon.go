package classify

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed" // the lists
	"fmt"
)

// lexiconFile lists words with what they can be: f first name, l last name,
// g place, s part of a street's name (not used), w common, W very common. services/classifier/train/lexicon.py
// writes it and tells where the words come from.
//
//go:embed data/lexicon.txt.gz
var lexiconFile []byte

// What a word can be.
const (
	lexFirst = 1 << iota
	lexLast
	lexPlace
	lexStreet
	lexCommon
	lexVery
	lexTitle
	lexMonth
	lexNumber
	lexRole
	lexOrg
	lexParticle
	lexPair // begins a pair of words that announces something
)

type entry struct {
	hash  uint32
	lex   uint16
	group uint16
	ctx   uint8
	lang  uint8
}

// lexicon is a hash table of words. Two words of one hash count as one: with a
// hundred thousand words in 32 bits, about one pair does.
type lexicon struct {
	mask    uint32
	entries []entry
	pairs   map[uint64]uint8
	langs   []uint32 // sets of languages, by entry.lang
	words   int
}

const lexiconSlots = 1 << 17

func loadLexicon() (*lexicon, error) {
	l := &lexicon{mask: lexiconSlots - 1, entries: make([]entry, lexiconSlots), pairs: map[uint64]uint8{}}
	z, err := gzip.NewReader(bytes.NewReader(lexiconFile))
	if err != nil {
		return nil, fmt.Errorf("lexicon: %w", err)
	}
	s := bufio.NewScanner(z)
	for s.Scan() {
		w, f, ok := bytes.Cut(s.Bytes(), []byte("\t"))
		if !ok {
			return nil, fmt.Errorf("lexicon: line %d has no flags", l.words+1)
		}
		var lex uint16
		for _, b := range f {
			switch b {
			case 'f':
				lex |= lexFirst
			case 'l':
				lex |= lexLast
			case 'g':
				lex |= lexPlace
			case 'w':
				lex |= lexCommon
			case 'W':
				lex |= lexVery
			}
		}
		l.setLex(hashWord(string(w)), lex)
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("lexicon: %w", err)
	}
	l.addContext()
	l.addLanguages()
	for h, g := range wordGroups {
		l.put(h).group = g
	}
	return l, nil
}

// slot finds the entry of a hash, or the free one where it belongs.
func (l *lexicon) slot(h uint32) *entry {
	if h == 0 {
		h = 1
	}
	for i := h * 0x9e3779b1 >> 15 & l.mask; ; i = (i + 1) & l.mask {
		e := &l.entries[i]
		if e.hash == h || e.hash == 0 {
			return e
		}
	}
}

// announces is what a word announces; a free slot says nothing.
func (l *lexicon) announces(h uint32) uint8 { return l.slot(h).ctx }

func (l *lexicon) put(h uint32) *entry {
	e := l.slot(h)
	if e.hash == 0 {
		e.hash = max(h, 1)
		l.words++
	}
	return e
}

func (l *lexicon) setLex(h uint32, lex uint16) { l.put(h).lex |= lex }

func (l *lexicon) setContext(h uint32, ctx uint8) { l.put(h).ctx = ctx }
