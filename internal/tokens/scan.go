package tokens

import "slices"

// A scanner returns the end of the pre-token that starts at s[i]; s is valid UTF-8 and i < len(s). Scanners are hand-written
// because Go's regexp has no look-ahead, and a scanner is ten times faster than a backtracking engine.
type scanner func(s string, i int) int

// Split patterns as they stand in tokenizer.json. A pattern that differs in one character is another pattern.
const (
	patternQwen2     = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternQwen3Next = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternLlama3    = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternO200k     = `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|` +
		`\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	patternDeepSeekDigits = `\p{N}{1,3}`
	patternDeepSeekCJK    = `[一-龥぀-ゟ゠-ヿ]+`
	patternDeepSeekText   = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|" +
		" ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

// scanners lists the sequences of Split patterns that have a scanner.
var scanners = []struct {
	patterns []string
	scan     scanner
}{
	{[]string{patternQwen2}, gpt4Scanner(letter, 1)},
	{[]string{patternQwen3Next}, gpt4Scanner(letter|mark, 1)},
	{[]string{patternLlama3}, gpt4Scanner(letter, 3)},
	{[]string{patternO200k}, scanO200k},
	{[]string{patternDeepSeekDigits, patternDeepSeekCJK, patternDeepSeekText}, scanDeepSeek},
}

func findScanner(patterns []string) (scanner, bool) {
	for _, s := range scanners {
		if slices.Equal(s.patterns, patterns) {
			return s.scan, true
		}
	}
	return nil, false
}

// contraction returns the length of (?i:'s|'t|'re|'ve|'m|'ll|'d) at s[i], or 0. U+017F (long s) folds to s; no other letter
// of these has a fold outside ASCII.
func contraction(s string, i int) int {
	if i+1 >= len(s) || s[i] != '\'' {
		return 0
	}
	two := byte(0)
	if i+2 < len(s) {
		two = s[i+2] | 0x20
	}
	switch s[i+1] | 0x20 {
	case 's', 't', 'm', 'd':
		return 2
	case 'r', 'v':
		if two == 'e' {
			return 3
		}
	case 'l':
		if two == 'l' {
			return 3
		}
	}
	if s[i+1] == 0xC5 && i+2 < len(s) && s[i+2] == 0xBF {
		return 3
	}
	return 0
}

// run returns the end of the longest run from i of characters that have a bit of want.
func run(s string, i int, want class) int {
	for i < len(s) {
		c, n := classAt(s, i)
		if c&want == 0 {
			break
		}
		i += n
	}
	return i
}

// runNot returns the end of the longest run from i of characters that have no bit of avoid.
func runNot(s string, i int, avoid class) int {
	for i < len(s) {
		c, n := classAt(s, i)
		if c&avoid != 0 {
			break
		}
		i += n
	}
	return i
}

// digits returns the end of at most most numbers from i.
func digits(s string, i, most int) int {
	for ; most > 0 && i < len(s); most-- {
		c, n := classAt(s, i)
		if c&number == 0 {
			break
		}
		i += n
	}
	return i
}

// whitespace matches \s*[\r\n]+|\s+(?!\S)|\s+ at s[i], which is whitespace: up to the last line break of the run if it has
// one; the whole run at the end of the text; else all but its last character, which goes with what follows.
func whitespace(s string, i int) int {
	end, last, lastBreak := i, i, -1
	for end < len(s) {
		c, n := classAt(s, end)
		if c&space == 0 {
			break
		}
		last = end
		end += n
		if c&newline != 0 {
			lastBreak = end
		}
	}
	switch {
	case lastBreak >= 0:
		return lastBreak
	case end == len(s) || last == i:
		return end
	default:
		return last
	}
}

// gpt4Scanner scans the patterns derived from cl100k: words of the word class, numbers in groups of at most group digits.
func gpt4Scanner(word class, group int) scanner {
	return func(s string, i int) int {
		c, n := classAt(s, i)
		if c&word != 0 && c&mark == 0 {
			return run(s, i+n, word)
		}
		if s[i] == '\'' {
			if m := contraction(s, i); m > 0 {
				return i + m
			}
		}
		if c&number != 0 {
			return digits(s, i, group)
		}
		if c&newline == 0 { // any other character may lead a word
			if end := run(s, i+n, word); end > i+n {
				return end
			}
			if c&word != 0 {
				return i + n
			}
		}
		if c&space == 0 {
			return run(s, runNot(s, i+n, space|word|number), newline)
		}
		if s[i] == ' ' {
			if end := runNot(s, i+1, space|word|number); end > i+1 {
				return run(s, end, newline)
			}
		}
		return whitespace(s, i)
	}
}

// scanO200k scans the pattern of gpt-oss: words change at a lower-to-upper step and keep their contraction.
func scanO200k(s string, i int) int {
	c, n := classAt(s, i)
	if c&(newline|number) == 0 {
		start := i
		if c&letter == 0 {
			start = i + n
		}
		end, lowered := o200kWord(s, start)
		if c&mark != 0 && !lowered { // a mark may also be the word itself, which the pattern tries before an all-upper word behind it
			end, _ = o200kWord(s, i)
		}
		if end > start || end > i && c&mark != 0 {
			return end
		}
	}
	if c&number != 0 {
		return digits(s, i, 3)
	}
	from := i
	if s[i] == ' ' {
		from++
	}
	if end := runNot(s, from, space|letter|number); end > from {
		for end < len(s) && (s[end] == '\r' || s[end] == '\n' || s[end] == '/') {
			end++
		}
		return end
	}
	return whitespace(s, i)
}

// o200kWord matches the first two alternatives of the pattern at s[i] without their leading character: U*L+ (lowered) and
// else U+L*, where U and L share modifiers, other letters and marks. It returns i if neither matches.
func o200kWord(s string, i int) (end int, lowered bool) {
	end = i
	shared := -1 // end of the last character of the run of U that is in L too
	for end < len(s) {
		c, n := classAt(s, end)
		if c&(letter|mark) == 0 || c&lower != 0 {
			break
		}
		end += n
		if c&upper == 0 {
			shared = end
		}
	}
	tail := end
	for tail < len(s) {
		c, n := classAt(s, tail)
		if c&(letter|mark) == 0 || c&upper != 0 {
			break
		}
		tail += n
	}
	switch {
	case tail > end: // U*L+
		return tail + contraction(s, tail), true
	case shared >= 0: // U* gave its last shared character to L+
		return shared + contraction(s, shared), true
	case end > i: // U+
		return end + contraction(s, end), false
	}
	return i, false
}
