package classify

// injectionWindow is how many tokens are judged together: instructions hidden
// in a long document must not drown in it.
const injectionWindow, injectionStride = 64, 16

// injection finds the window of tokens that looks most like an attempt to take
// over the model. s.margins holds each token's sum of weights.
func (s *scan) injection(f *features) {
	sums := s.margins
	n := len(sums)
	m := s.m.heads
	best, at, end := float32(-100), 0, 0
	for from := 0; from < n; from += injectionStride {
		to := min(from+injectionWindow, n)
		var sum float32
		for _, x := range sums[from:to] {
			sum += x
		}
		if v := m.Bias[headInjection] + sum*m.Scale[headInjection]/sqrt(float32(to-from)); v > best {
			best, at, end = v, from, to
		}
		if to == n {
			break
		}
	}
	if n > 0 {
		f.injection, f.injectionRule = sigmoid(best-m.InjectionThreshold), "head"
		f.injectionAt, f.injectionEnd = int(s.toks[at].start), int(s.toks[end-1].end)
	}
	if a, b, v := s.salad(); v > f.injection {
		f.injection, f.injectionRule = v, "suffix"
		f.injectionAt, f.injectionEnd = a, b
	}
	if s.norm.tags >= 4 && n > 0 && f.injection < 0.9 {
		f.injection, f.injectionRule = 0.9, "hidden-text"
	}
}

const saladTokens = 20

// salad finds suffixes made by optimisers (Zou et al., 2023): words without
// grammar, glued together with signs that belong to no language and no code.
func (s *scan) salad() (start, end int, score float32) {
	n := len(s.toks)
	if n < saladTokens {
		return 0, 0, 0
	}
	best, at := 0, 0
	for from := max(0, n-400); from+saladTokens <= n; from += 5 {
		points := 0
		lines, semicolons, common := 0, 0, 0
		for i := from; i < from+saladTokens; i++ {
			t := &s.toks[i]
			if t.gap >= gapLine {
				lines++
			}
			if t.kind == tokWord {
				if t.lex&lexVery != 0 {
					common++
				}
				// Glued: similarlyNow, oppositeley.]( and the like.
				if t.shape == shapeMixed && t.len() > 5 && byteClass[s.text[t.start]&0x7f] == 1 && s.text[t.start] >= 'a' {
					points += 2
				}
				continue
			}
			if t.kind != tokSign || i == 0 {
				continue
			}
			p := &s.toks[i-1]
			switch t.sign {
			case ';':
				semicolons++
			case '\\', '"', '[', ']', '(', ')', '{', '}', '*', '!', '?', '-', '<', '>', '|', '$', '#', '^', '~', '=', '+':
				// Two signs of different kinds in a row, without a gap.
				if t.gap == gapNone && p.kind == tokSign && p.sign != t.sign && p.sign != 0xff && !usual(p.sign, t.sign) {
					points += 2
				}
				if t.sign == '\\' && i+1 < n && s.toks[i+1].gap != gapNone {
					points += 2
				}
			}
		}
		if lines > 1 || semicolons > 1 {
			points -= 6
		}
		if common > 8 {
			points -= 3
		}
		if points > best {
			best, at = points, from
		}
	}
	if best < 10 {
		return 0, 0, 0
	}
	return int(s.toks[at].start), int(s.toks[min(n, at+saladTokens)-1].end), min(0.5+float32(best-10)*0.04, 0.95)
}

// usual reports whether two signs follow each other in ordinary writing and code.
func usual(a, b byte) bool {
	switch string([]byte{a, b}) {
	case ".\"", "\".", ",\"", "\",", ")\"", "\"(", "(\"", "\")", ").", "),", ");", "):", "()", "[]", "{}", "({", "})", "])", "([", "[(", "?\"", "!\"", "\"?", "\"!", ".)", "?)", "!)", "->", "=>", "<=", ">=", "!=", "==", "+=", "-=", "'(",
		"[\"", "\"]", "\":", ":\"", "**", "--", "//", "/*", "*/", "</", "/>", "<!", "?!", "!?", ".'", "'.", ",'", "',", "')", "('", "'[", "['", "']", "\\(", "\\)", "\\[", "\\]", "\\{", "\\}", "^{", "}{", "_{", ")^", "$\\", "}$", "$$", ")$", "$(", "${", "](", "](#", ")[", "][",
		"<\"", "\">", "=\"", "='", "#{", "||", "&&", "\\\"", "\"\\", "}(", ")}", ")=", ")-", "-(", ")+", "+(", "*(", ")*", "=(", "=-", "(-", "<-", "|-", "-|", "*{", "}.", "},", "{\"", "\"}", "'}", "{'", "(*", ")*\"", "].", "].\"", "],", "}]", "[{", "]}", ")]", "<$", "~/", "(!", "!(", "[^", "[-", "-[", "]-", "]+", "]*", ")?", "]?", "(?", ".*", ".+", "\\.", "\\$":
		return true
	}
	return false
}
