package tokens

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// class is a set of the character classes that pre-tokenizer patterns test.
type class uint8

const (
	letter  class = 1 << iota // \p{L}
	number                    // \p{N}
	space                     // \s: White_Space
	newline                   // [\r\n]
	mark                      // \p{M}
	upper                     // \p{Lu}, \p{Lt}
	lower                     // \p{Ll}
	punct                     // \p{P}, \p{S}
)

// Every rune has its class in pages[index[r>>8]][r&255]. About 60 different pages exist, so the table stays in the processor's caches.
type classTable struct {
	index [(unicode.MaxRune + 1) >> 8]uint8
	pages [][256]class
}

var (
	asciiClass [utf8.RuneSelf]class
	runeClass  *classTable
)

var initClasses = sync.OnceFunc(func() {
	all := make([]class, unicode.MaxRune+1)
	set := func(c class, tables ...*unicode.RangeTable) {
		for _, t := range tables {
			for _, r := range t.R16 {
				for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
					all[x] |= c
				}
			}
			for _, r := range t.R32 {
				for x := rune(r.Lo); x <= rune(r.Hi); x += rune(r.Stride) {
					all[x] |= c
				}
			}
		}
	}
	set(letter, unicode.L)
	set(number, unicode.N)
	set(space, unicode.White_Space)
	set(mark, unicode.M)
	set(upper, unicode.Lu, unicode.Lt)
	set(lower, unicode.Ll)
	set(punct, unicode.P, unicode.S)
	for _, r := range sinceUnicode15 {
		for x := r.from; x <= r.to; x++ {
			all[x] |= r.class
		}
	}
	all['\r'] |= newline
	all['\n'] |= newline

	t := new(classTable)
	seen := make(map[[256]class]uint8)
	for i := range t.index {
		page := [256]class(all[i<<8 : (i+1)<<8])
		n, ok := seen[page]
		if !ok {
			n = uint8(len(t.pages))
			seen[page] = n
			t.pages = append(t.pages, page)
		}
		t.index[i] = n
	}
	copy(asciiClass[:], all)
	runeClass = t
})

// classAt returns the class of the character that starts at s[i] and its length in bytes; s is valid UTF-8.
func classAt(s string, i int) (class, int) {
	if c := s[i]; c < utf8.RuneSelf {
		return asciiClass[c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return runeClass.pages[runeClass.index[r>>8]][r&255], n
}
