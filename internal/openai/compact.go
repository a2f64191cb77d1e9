package openai

import "bytes"

// Compact is JSON text without the white space between its parts, so that
// it is the same whichever library the client writes it with.
func Compact(text []byte) []byte {
	dst := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		switch c := text[i]; c {
		case ' ', '\t', '\n', '\r':
		case '"':
			end := i + 1
			for end < len(text) && text[end] != '"' {
				n := bytes.IndexAny(text[end:], `"\`)
				if n < 0 {
					return append(dst, text[i:]...)
				}
				if end += n; text[end] == '\\' {
					end += 2
				}
			}
			end = min(end+1, len(text))
			dst = append(dst, text[i:end]...)
			i = end - 1
		default:
			dst = append(dst, c)
		}
	}
	return dst
}
