package classify

import (
	"bytes"
	"unicode/utf8"
)

// encoding tells how text was hidden from a plain look.
type encoding uint8

const (
	encPlain encoding = iota
	encEscaped
	encBase64
	encHex
	encGzip
	encSpaced
	encSpelled
	encJoined
	encField
)

var encodingNames = [...]string{"", "escaped", "base64", "hex", "gzip", "spaced", "spelled", "joined", "fields"}

// segment begins a stretch of a view: from norm on, its bytes are those of the
// source from orig on (same), or all stand for the source's [orig, next segment's orig).
type segment struct {
	norm, orig int32
	same       bool
}

// view is text to scan with a map back to the part. A nil parent is the part.
type view struct {
	text   []byte
	segs   []segment // nil: the same bytes, shifted by base
	source int       // length of what the segments describe
	base   int       // where that begins in the parent
	blob   bool      // every span is the whole of [base, base+source)
	parent *view
	enc    encoding
	depth  int
}

// span maps [a, b) of the view to bytes of the part.
func (v *view) span(a, b int) (int, int) {
	for ; v != nil; v = v.parent {
		switch {
		case v.blob:
			a, b = 0, v.source
		case v.segs != nil:
			a, b = v.start(a), v.stop(b)
		}
		a, b = a+v.base, b+v.base
	}
	return a, b
}

// encoding is that of the outermost hidden layer.
func (v *view) encoding() encoding {
	e := encPlain
	for ; v != nil; v = v.parent {
		if v.enc != encPlain {
			e = max(e, v.enc)
		}
	}
	return e
}

// at is the index of the segment that holds a position of the view.
func (v *view) at(p int) int {
	lo, hi := 0, len(v.segs)
	for lo+1 < hi {
		m := (lo + hi) / 2
		if int(v.segs[m].norm) <= p {
			lo = m
		} else {
			hi = m
		}
	}
	return lo
}

func (v *view) start(p int) int {
	if len(v.segs) == 0 {
		return 0
	}
	s := v.segs[v.at(p)]
	if s.same {
		return min(int(s.orig)+p-int(s.norm), v.source)
	}
	return int(s.orig)
}

func (v *view) stop(p int) int {
	if p <= 0 || len(v.segs) == 0 {
		return 0
	}
	i := v.at(p - 1)
	s := v.segs[i]
	if s.same {
		return min(int(s.orig)+p-int(s.norm), v.source)
	}
	if i+1 < len(v.segs) {
		return int(v.segs[i+1].orig)
	}
	return v.source
}

// look marks bytes that the normaliser must look at.
var look = func() (t [256]bool) {
	for b := range 256 {
		t[b] = b >= utf8.RuneSelf || b == '\\' || b == '&' || b == '%' || b == '=' || b < ' ' && b != '\n' && b != '\t' && b != '\r' || b == 0x7f
	}
	return t
}()

// normaliser turns text into what a reader would take it for: no escapes, no
// invisible signs, narrow forms, one alphabet a word. Its buffers are reused.
type normaliser struct {
	out  []byte
	segs []segment
	// Found on the way.
	invisible, tags, badUTF8 int
	escaped                  bool
}

const maxPasses = 3

// normalise returns the view of text, which is plain if nothing was to be done.
// Escapes within escapes are undone up to maxPasses deep; deeper says that
// there are more.
func (n *normaliser) normalise(text []byte, base int) (v *view, deeper bool) {
	v = &view{text: text, source: len(text), base: base}
	for pass := range maxPasses {
		n.out, n.segs, n.escaped = nil, nil, false
		if !n.pass(v.text) {
			return v, false
		}
		next := &view{text: n.out, segs: n.segs, source: len(v.text), parent: v}
		if pass == 0 {
			next.parent, next.base = nil, base
		}
		if n.escaped {
			next.enc = encEscaped
		}
		v = next
		if !n.escaped {
			return v, false
		}
	}
	return v, hasEscape(v.text)
}

func hasEscape(text []byte) bool {
	for i, b := range text {
		if b == '\\' || b == '&' || b == '%' {
			var buf [8]byte
			if w, _, _ := escape(text[i:], &buf); w > 0 && b != '\\' {
				return true
			}
		}
	}
	return false
}

// pass undoes one layer, and reports whether anything changed.
func (n *normaliser) pass(text []byte) bool {
	flushed := 0
	started := false
	begin := func(i int) {
		if !started {
			started = true
			n.out = make([]byte, 0, len(text)+16)
		}
		if i > flushed {
			n.segs = append(n.segs, segment{int32(len(n.out)), int32(flushed), true})
			n.out = append(n.out, text[flushed:i]...)
		}
	}
	replace := func(i, width int, with []byte) {
		begin(i)
		if len(with) > 0 {
			n.segs = append(n.segs, segment{int32(len(n.out)), int32(i), false})
			n.out = append(n.out, with...)
		}
		flushed = i + width
	}
	var buf [8]byte
	mixed := false
	for i := 0; i < len(text); {
		b := text[i]
		if !look[b] {
			i++
			continue
		}
		if b < utf8.RuneSelf {
			if b == '=' {
				if w, k := quotedPrintable(text, i, &buf); w > 0 {
					replace(i, w, buf[:k])
					n.escaped = true
					i += w
					continue
				}
			} else if w, k, ctl := escape(text[i:], &buf); w > 0 {
				replace(i, w, buf[:k])
				n.escaped = n.escaped || !ctl
				i += w
				continue
			}
			i++
			continue
		}
		r, w := utf8.DecodeRune(text[i:])
		switch {
		case r == utf8.RuneError && w == 1:
			n.badUTF8++
			replace(i, 1, []byte{' '})
		case plain(r):
			mixed = mixed || r >= 0x370
		case invisible(r):
			n.invisible++
			replace(i, w, nil)
		case r >= 0x300 && r < 0x370 || r >= 0x1ab0 && r < 0x1b00 || r >= 0x20d0 && r < 0x2100:
			replace(i, w, nil) // a mark on the letter before; names are compared without
		default:
			if k := foldWidth(r, &buf); k > 0 {
				if r >= 0xe0000 {
					n.tags++
				}
				replace(i, w, buf[:k])
			} else if _, ok := confusables[r]; ok {
				mixed = true
			}
		}
		i += w
	}
	if mixed {
		if !started {
			begin(0)
		}
		if flushed < len(text) {
			begin(len(text))
			flushed = len(text)
		}
		if !n.latinise() && len(n.segs) == 1 && n.segs[0].same && len(n.out) == len(text) {
			return false
		}
		return true
	}
	if !started {
		return false
	}
	begin(len(text))
	return true
}

// latinise replaces look-alikes in words that mix them with Latin letters or
// digits, in place where the length allows and else by cutting segments.
func (n *normaliser) latinise() bool {
	type swap struct {
		at, width int
		with      byte
	}
	var swaps []swap
	text := n.out
	for i := 0; i < len(text); {
		// One word: letters, digits, and the signs inside of addresses.
		j, latin, alike, other := i, false, 0, false
		for j < len(text) {
			b := text[j]
			if b < utf8.RuneSelf {
				c := byteClass[b]
				if c != 1 && c != 2 && b != '@' && b != '.' && b != '-' && b != '_' {
					break
				}
				latin = latin || c == 1 || b == '@' || c == 2 && !other && alike > 0
				j++
				continue
			}
			r, w := utf8.DecodeRune(text[j:])
			if _, ok := confusables[r]; ok {
				alike++
			} else if s := scriptOf(r); s >= scriptSign {
				break
			} else if s != scriptLatin {
				other = true
			}
			j += w
		}
		if alike > 0 && latin && !other || alike > 0 && latin && bytes.IndexByte(text[i:j], '@') >= 0 {
			for k := i; k < j; {
				r, w := utf8.DecodeRune(text[k:])
				if b, ok := confusables[r]; ok {
					swaps = append(swaps, swap{k, w, b})
				}
				k += w
			}
		}
		if j == i {
			_, w := utf8.DecodeRune(text[i:])
			j += w
		}
		i = j
	}
	if len(swaps) == 0 {
		return false
	}
	out := make([]byte, 0, len(text))
	var segs []segment
	from, si := 0, 0
	// copyRange copies [from, to) with the segments that describe it.
	copyRange := func(to int) {
		for from < to {
			for si+1 < len(n.segs) && int(n.segs[si+1].norm) <= from {
				si++
			}
			s := n.segs[si]
			stop := to
			if si+1 < len(n.segs) {
				stop = min(stop, int(n.segs[si+1].norm))
			}
			orig := s.orig
			if s.same {
				orig += int32(from) - s.norm
			}
			segs = append(segs, segment{int32(len(out)), orig, s.same})
			out = append(out, text[from:stop]...)
			from = stop
		}
	}
	for _, w := range swaps {
		copyRange(w.at)
		for si+1 < len(n.segs) && int(n.segs[si+1].norm) <= w.at {
			si++
		}
		s := n.segs[si]
		orig := s.orig
		if s.same {
			orig += int32(w.at) - s.norm
		}
		segs = append(segs, segment{int32(len(out)), orig, false})
		out = append(out, w.with)
		from = w.at + w.width
	}
	copyRange(len(text))
	n.out, n.segs = out, segs
	return true
}

// escape decodes one escape at the start of text: width is 0 if there is none,
// n the bytes put into buf. control says that only a control byte was dropped.
func escape(text []byte, buf *[8]byte) (width, n int, control bool) {
	switch b := text[0]; {
	case b == '\\':
		return backslash(text, buf)
	case b == '%':
		if len(text) >= 5 && text[1] == '2' && text[2] == '5' && hexValue(text[3]) >= 0 && hexValue(text[4]) >= 0 {
			buf[0] = byte(hexValue(text[3])<<4 | hexValue(text[4]))
			return 5, 1, false
		}
		if len(text) >= 3 && hexValue(text[1]) >= 0 && hexValue(text[2]) >= 0 {
			r := byte(hexValue(text[1])<<4 | hexValue(text[2]))
			if r < utf8.RuneSelf {
				if r < ' ' && r != '\n' && r != '\t' {
					return 0, 0, false
				}
				buf[0] = r
				return 3, 1, false
			}
			// UTF-8 in percent signs.
			k := 0
			for i := 0; i+2 < len(text) && k < 4 && text[i] == '%' && hexValue(text[i+1]) >= 0 && hexValue(text[i+2]) >= 0; i += 3 {
				buf[k] = byte(hexValue(text[i+1])<<4 | hexValue(text[i+2]))
				k++
				if utf8.Valid(buf[:k]) {
					return i + 3, k, false
				}
			}
		}
	case b == '&':
		return entity(text, buf)
	case b < ' ' || b == 0x7f:
		return 1, 0, true
	}
	return 0, 0, false
}

func hexValue(b byte) int {
	switch {
	case b >= '0' && b <= '9':
		return int(b - '0')
	case b >= 'a' && b <= 'f':
		return int(b-'a') + 10
	case b >= 'A' && b <= 'F':
		return int(b-'A') + 10
	}
	return -1
}

func hexRune(text []byte, digits int) (rune, bool) {
	if len(text) < digits {
		return 0, false
	}
	var r rune
	for _, b := range text[:digits] {
		v := hexValue(b)
		if v < 0 {
			return 0, false
		}
		r = r<<4 | rune(v)
	}
	return r, true
}

func backslash(text []byte, buf *[8]byte) (width, n int, control bool) {
	i := 1
	for i < len(text) && i < 4 && text[i] == '\\' { // JSON within JSON
		i++
	}
	if i >= len(text) {
		return 0, 0, false
	}
	switch text[i] {
	case 'n', 'r':
		// C:\new is spared: a word goes on behind it and one stands before.
		buf[0] = '\n'
		return i + 1, 1, false
	case 't':
		buf[0] = '\t'
		return i + 1, 1, false
	case '"', '/', '\'':
		buf[0] = text[i]
		return i + 1, 1, false
	case 'x':
		if r, ok := hexRune(text[i+1:], 2); ok && r >= ' ' && r < utf8.RuneSelf {
			buf[0] = byte(r)
			return i + 3, 1, false
		}
	case 'u':
		if i+1 < len(text) && text[i+1] == '{' {
			if e := bytes.IndexByte(text[i:min(len(text), i+10)], '}'); e > 2 {
				if r, ok := hexRune(text[i+2:], e-2); ok {
					return i + e + 1, len(utf8.AppendRune(buf[:0], r)), false
				}
			}
			return 0, 0, false
		}
		r, ok := hexRune(text[i+1:], 4)
		if !ok {
			return 0, 0, false
		}
		w := i + 5
		if r >= 0xd800 && r < 0xdc00 && len(text) >= w+6 && text[w] == '\\' && text[w+1] == 'u' {
			if lo, ok := hexRune(text[w+2:], 4); ok && lo >= 0xdc00 && lo < 0xe000 {
				r = (r-0xd800)<<10 + (lo - 0xdc00) + 0x10000
				w += 6
			}
		}
		if r == 0 {
			return w, 0, false
		}
		return w, len(utf8.AppendRune(buf[:0], r)), false
	}
	return 0, 0, false
}

var entities = map[string]byte{
	"amp": '&', "lt": '<', "gt": '>', "quot": '"', "apos": '\'', "nbsp": ' ', "commat": '@', "period": '.', "hyphen": '-', "dash": '-', "lowbar": '_', "plus": '+',
	"colon": ':', "comma": ',', "sol": '/', "lpar": '(', "rpar": ')', "num": '#', "ensp": ' ', "emsp": ' ', "thinsp": ' ', "ndash": '-', "mdash": '-', "equals": '=', "Tab": ' ', "NewLine": '\n',
}

func entity(text []byte, buf *[8]byte) (width, n int, control bool) {
	if len(text) < 4 {
		return 0, 0, false
	}
	if text[1] == '#' {
		i, r, base := 2, rune(0), rune(10)
		if text[2] == 'x' || text[2] == 'X' {
			i, base = 3, 16
		}
		first := i
		for i < len(text) && i < first+8 {
			v := hexValue(text[i])
			if v < 0 || rune(v) >= base {
				break
			}
			r = r*base + rune(v)
			i++
		}
		if i == first || r == 0 || r > utf8.MaxRune {
			return 0, 0, false
		}
		if i < len(text) && text[i] == ';' {
			i++
		}
		return i, len(utf8.AppendRune(buf[:0], r)), false
	}
	e := bytes.IndexByte(text[:min(len(text), 10)], ';')
	if e < 3 {
		return 0, 0, false
	}
	b, ok := entities[string(text[1:e])]
	if !ok {
		return 0, 0, false
	}
	// &amp;#64; is an escape within an escape.
	buf[0] = b
	return e + 1, 1, false
}

// quotedPrintable decodes =40, where more such signs or an address stand
// around it: a=40 in code means something else.
func quotedPrintable(text []byte, i int, buf *[8]byte) (width, n int) {
	if i+1 < len(text) && text[i+1] == '\n' && softBreak(text[max(0, i-76):i]) {
		return 2, 0
	}
	if i+2 >= len(text) || upperHex(text[i+1]) < 0 || upperHex(text[i+2]) < 0 {
		return 0, 0
	}
	v := byte(upperHex(text[i+1])<<4 | upperHex(text[i+2]))
	if v < ' ' {
		return 0, 0
	}
	near := i+5 < len(text) && text[i+3] == '=' && upperHex(text[i+4]) >= 0 && upperHex(text[i+5]) >= 0 ||
		i >= 3 && text[i-3] == '=' && upperHex(text[i-2]) >= 0 && upperHex(text[i-1]) >= 0
	address := v == '@' && i > 0 && i+3 < len(text) && byteClass[text[i-1]&0x7f] == 1 && byteClass[text[i+3]&0x7f] == 1
	if !near && !address {
		return 0, 0
	}
	if v >= utf8.RuneSelf {
		k := 0
		for j := i; j+2 < len(text) && k < 4 && text[j] == '=' && upperHex(text[j+1]) >= 0 && upperHex(text[j+2]) >= 0; j += 3 {
			buf[k] = byte(upperHex(text[j+1])<<4 | upperHex(text[j+2]))
			k++
			if utf8.Valid(buf[:k]) {
				return j + 3 - i, k
			}
		}
		return 0, 0
	}
	buf[0] = v
	return 3, 1
}

// softBreak reports whether a line is quoted-printable by other signs than its end.
func softBreak(line []byte) bool {
	for i := 0; i+2 < len(line); i++ {
		if line[i] == '=' && upperHex(line[i+1]) >= 0 && upperHex(line[i+2]) >= 0 {
			return true
		}
	}
	return false
}

func upperHex(b byte) int {
	if b >= 'a' && b <= 'f' {
		return -1
	}
	return hexValue(b)
}
