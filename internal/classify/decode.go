package classify

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/base64"
	"io"
	"unicode/utf8"
)

// Bounds of what is decoded; what they cut off is reported.
const (
	maxDepth = 2
	// minBase64 and minHex are the shortest runs worth a try: eight digits in base64, or four bytes in hex.
	minBase64, minHex = 11, 14
	maxInflated       = 256 << 10
	// opaqueRun is the length of base64 that decodes to nothing readable from which on we say so: shorter ones are hashes,
	// keys and signatures, which hold no text.
	opaqueRun = 400
	maxBlobs  = 512
)

// base64Class: 1 for letters and digits, 2 for + / - _.
var base64Class = func() (t [256]uint8) {
	for b := range 128 {
		if c := byteClass[b]; c == 1 || c == 2 {
			t[b] = 1
		}
	}
	t['+'], t['/'], t['-'], t['_'] = 2, 2, 2, 2
	return t
}()

// blobs finds base64 and hex in a view, and calls found with what they hold.
// It reports what could not be read.
func blobs(v *view, found func(*view), cause func(string)) {
	if v.depth >= maxDepth {
		if mayHide(v.text) {
			cause(causeDepth)
		}
		return
	}
	text := v.text
	count := 0
	for i := 0; i < len(text); {
		if base64Class[text[i]] == 0 {
			i++
			continue
		}
		j, digits, upper, lower := i, 0, 0, 0
		hex := true
		for j < len(text) {
			b := text[j]
			if base64Class[b] == 0 {
				// Lines of MIME: the run goes on behind a line's end.
				if (b == '\n' || b == '\r') && j-i >= 56 {
					k := j + 1
					if b == '\r' && k < len(text) && text[k] == '\n' {
						k++
					}
					if lineGoesOn(text[k:]) {
						j = k
						continue
					}
				}
				break
			}
			switch {
			case b >= '0' && b <= '9':
				digits++
			case b >= 'a' && b <= 'z':
				lower++
				hex = hex && b <= 'f'
			case b >= 'A' && b <= 'Z':
				upper++
				hex = hex && b <= 'F'
			default:
				hex = false
			}
			j++
		}
		run := text[i:j]
		if len(run) < minBase64 {
			// Pairs of hex digits with a sign between them: 34:31:31, 34 31 31, 0x34,0x31.
			if len(run) == 2 && hex && i+2 < len(text) {
				if n, out := spacedHex(text[i:]); n > 0 {
					if readable(out) {
						found(&view{text: out, source: n, base: i, blob: true, parent: v, enc: encHex, depth: v.depth + 1})
					}
					i += n
					continue
				}
			}
			i = max(j, i+1)
			continue
		}
		if count++; count > maxBlobs {
			cause(causeBlobs)
			return
		}
		if hex && len(run) >= minHex {
			if out, trim := hexDecode(run); readable(out) {
				found(&view{text: out, source: len(run), base: i + trim, blob: true, parent: v, enc: encHex, depth: v.depth + 1})
				i = j
				continue
			}
		}
		// A word of letters of one case is a word.
		if digits+upper > 0 && lower+digits > 0 && (digits > 0 || upper > 1) || upper > 0 && digits > 0 || len(run) >= 24 && upper > 2 {
			if tryBase64(v, i, j, found, cause) {
				i = j
				continue
			}
		}
		// A path or a name of several words may hold one piece of base64 behind / or _.
		if bytes.IndexByte(run, '/') >= 0 || bytes.IndexByte(run, '_') >= 0 {
			from := i
			for k := i; k <= j; k++ {
				if k < j && text[k] != '/' && text[k] != '_' {
					continue
				}
				if k-from >= minBase64 && k-from < len(run) {
					tryBase64(v, from, k, found, cause)
				}
				from = k + 1
			}
		}
		i = j
	}
}

// lineGoesOn tells the next line of base64 from the next line of prose.
func lineGoesOn(text []byte) bool {
	n := 0
	for n < len(text) && base64Class[text[n]] != 0 {
		n++
	}
	return n >= 24 || n > 0 && n < len(text) && text[n] == '='
}

// mayHide reports whether text holds a run that would be worth decoding.
func mayHide(text []byte) bool {
	run, digits, upper := 0, 0, 0
	for _, b := range text {
		if base64Class[b] == 0 {
			run, digits, upper = 0, 0, 0
			continue
		}
		run++
		if b <= '9' && b >= '0' {
			digits++
		} else if b <= 'Z' && b >= 'A' {
			upper++
		}
		if run >= 16 && digits > 1 && upper > 1 {
			return true
		}
	}
	return false
}

// tryBase64 decodes text[i:j] and reports whether it held something.
func tryBase64(v *view, i, j int, found func(*view), cause func(string)) bool {
	run := v.text[i:j]
	clean := run
	if bytes.ContainsAny(run, "\r\n-_") {
		clean = bytes.Map(func(r rune) rune {
			switch r {
			case '\r', '\n':
				return -1
			case '-':
				return '+'
			case '_':
				return '/'
			}
			return r
		}, run)
	}
	// A word may be glued to the front; a start of a quantum is found within four.
	for trim := range 4 {
		c := clean[trim:]
		if len(c)%4 == 1 {
			c = c[:len(c)-1]
		}
		if len(c) < minBase64-1 {
			break
		}
		// Most that is not base64 of text shows it in its first bytes.
		var head [12]byte
		k, err := base64.RawStdEncoding.Decode(head[:], c[:8])
		if err != nil {
			return false
		}
		zipped := head[0] == 0x1f && head[1] == 0x8b || head[0] == 0x78 && (head[1] == 0x9c || head[1] == 1 || head[1] == 0xda)
		if !zipped && !readableHead(head[:k]) {
			continue
		}
		out := make([]byte, base64.RawStdEncoding.DecodedLen(len(c)))
		k, err = base64.RawStdEncoding.Decode(out, c)
		if err != nil {
			// The last quantum may hold stray bits.
			k, err = base64.RawStdEncoding.Decode(out, c[:len(c)/4*4])
			if err != nil {
				continue
			}
		}
		out = out[:k]
		at := &view{text: out, source: j - i, base: i, blob: true, parent: v, enc: encBase64, depth: v.depth + 1}
		if zipped {
			plain, cut, err := inflate(out)
			if err == nil && readable(plain) {
				if cut {
					cause(causeInflated)
				}
				at.text, at.enc = plain, encGzip
				found(at)
				return true
			}
			if err != nil && len(plain) == 0 {
				continue
			}
			cause(causeOpaque)
			return true
		}
		if readable(out) {
			found(at)
			return true
		}
	}
	if len(clean) >= opaqueRun && mixedRun(clean) {
		cause(causeOpaque)
	}
	return false
}

// mixedRun tells base64 from a long line of one letter or of hex.
func mixedRun(run []byte) bool {
	var seen [256]bool
	n := 0
	for _, b := range run {
		if !seen[b] {
			seen[b] = true
			n++
		}
	}
	return n > 40
}

func inflate(data []byte) (out []byte, cut bool, err error) {
	var r io.Reader
	if data[0] == 0x1f {
		r, err = gzip.NewReader(bytes.NewReader(data))
	} else {
		r, err = zlib.NewReader(bytes.NewReader(data))
	}
	if err != nil {
		return nil, false, err
	}
	out, err = io.ReadAll(io.LimitReader(r, maxInflated+1))
	if len(out) > maxInflated {
		return out[:maxInflated], true, nil
	}
	if len(out) > 0 && err != nil { // cut off in the middle: what was read is read
		return out, true, nil
	}
	return out, false, err
}

func readableHead(b []byte) bool {
	for i, c := range b {
		if c < ' ' && c != '\n' && c != '\r' && c != '\t' || c == 0x7f {
			return false
		}
		if c >= utf8.RuneSelf {
			r, _ := utf8.DecodeRune(b[i:])
			if r == utf8.RuneError && len(b)-i >= 4 {
				return false
			}
			return c >= 0xc2 && c < 0xf5
		}
	}
	return true
}

// readable reports whether bytes are text: valid UTF-8 without control bytes,
// most of it letters and digits of scripts people write in.
func readable(b []byte) bool {
	if len(b) < 4 {
		return false
	}
	good, runes := 0, 0
	for i := 0; i < len(b); {
		c := b[i]
		if c < utf8.RuneSelf {
			if c < ' ' && c != '\n' && c != '\r' && c != '\t' || c == 0x7f {
				return false
			}
			if k := byteClass[c]; k != 0 || c == '@' || c == '.' || c == '-' || c == '+' || c == ':' || c == ',' || c == '"' || c == '_' || c == '/' || c == '=' {
				good++
			}
			runes++
			i++
			continue
		}
		r, w := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError {
			// A cut at the end is none of the text's fault.
			if len(b)-i < 4 && i > 8 {
				break
			}
			return false
		}
		if plain(r) {
			good++
		}
		runes++
		i += w
	}
	return good*10 >= runes*8
}

func hexDecode(run []byte) (out []byte, trim int) {
	if len(run)%2 == 1 {
		return nil, 0
	}
	if run[0] == '0' && run[1] == 'x' {
		run, trim = run[2:], 2
	}
	out = make([]byte, len(run)/2)
	for i := range out {
		out[i] = byte(hexValue(run[2*i])<<4 | hexValue(run[2*i+1]))
	}
	return out, trim
}

// spacedHex decodes pairs of hex digits with one and the same sign between.
func spacedHex(text []byte) (n int, out []byte) {
	sep := text[2]
	if sep != ' ' && sep != ':' && sep != '-' && sep != ',' {
		return 0, nil
	}
	i := 0
	for i+1 < len(text) && hexValue(text[i]) >= 0 && hexValue(text[i+1]) >= 0 {
		out = append(out, byte(hexValue(text[i])<<4|hexValue(text[i+1])))
		i += 2
		if i >= len(text) || text[i] != sep {
			break
		}
		i++
	}
	if len(out) < 6 || i < len(text) && base64Class[text[i]] == 1 {
		return 0, nil
	}
	return i, out
}
