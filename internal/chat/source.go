package chat

import (
	"regexp"
	"strings"
)

// tag is one {{ expression }} or {% statement %} of a template: source[start:end] lies between its delimiters.
type tag struct {
	statement  bool
	start, end int
}

// tags finds the tags of a template. It knows as much of Jinja as the compiler's own scanner: comments are skipped, and
// delimiters in string literals do not count.
func tags(source string) []tag {
	var all []tag
	for i := 0; i+1 < len(source); i++ {
		if source[i] != '{' {
			continue
		}
		t := tag{start: i + 2}
		closer := ""
		switch source[i+1] {
		case '{':
			closer = "}}"
		case '%':
			closer = "%}"
			t.statement = true
		case '#':
			n := strings.Index(source[i:], "#}")
			if n < 0 {
				return all
			}
			i += n + 1
			continue
		default:
			continue
		}
		j := t.start
		for j < len(source) && !strings.HasPrefix(source[j:], closer) {
			if c := source[j]; c == '\'' || c == '"' {
				j = literalEnd(source, j)
				continue
			}
			j++
		}
		t.end = min(j, len(source))
		all = append(all, t)
		i = t.end + 1
	}
	return all
}

// literalEnd returns the end of the string literal that starts at i.
func literalEnd(s string, i int) int {
	quote := s[i]
	for i++; i < len(s) && s[i] != quote; i++ {
		if s[i] == '\\' {
			i++
		}
	}
	return min(i+1, len(s))
}

var tojsonFilter = regexp.MustCompile(`(\|\s*)tojson\b`)

// ownFilters makes a template use this package's filters in place of the library's, which cannot be replaced.
func ownFilters(source string) string {
	var b strings.Builder
	done := 0
	for _, t := range tags(source) {
		b.WriteString(source[done:t.start])
		for i := t.start; i < t.end; {
			quote := strings.IndexAny(source[i:t.end], `'"`)
			code := t.end
			if quote >= 0 {
				code = i + quote
			}
			b.WriteString(tojsonFilter.ReplaceAllString(source[i:code], "${1}"+tojsonName))
			if i = code; i < t.end {
				end := min(literalEnd(source, i), t.end)
				b.WriteString(source[i:end])
				i = end
			}
		}
		done = t.end
	}
	b.WriteString(source[done:])
	return b.String()
}

const tojsonName = "kinference_tojson"

var (
	setStatement = regexp.MustCompile(`^-?\s*set\s+(\w+)\s*=\s*(.*?)\s*-?$`)
	forStatement = regexp.MustCompile(`(?s)^-?\s*for\s+(\w+)\s+in\s+(.*?)\s*-?$`)
	// A variable or one of its keys, perhaps sliced, filtered or tested.
	access = regexp.MustCompile(`(?s)^(\w+)(?:\.(\w+)|\[\s*(?:'(\w+)'|"(\w+)")\s*\])?(?:\s*\[[^\]]*:[^\]]*\])*(?:\s*\|.*|\s+is\s.*)?$`)
)

// loopsOverContent reports whether a template walks through a message's content parts, so that vLLM gives it content in OpenAI's
// list form ("openai" format) and not flattened to a string. Like vLLM it follows assignments from messages without regard to
// scope.
func loopsOverContent(source string) bool {
	type step struct{ name, variable, key string } // name takes its value, or its loop's items, from variable[key]
	var sets, loops []step
	for _, t := range tags(source) {
		if !t.statement {
			continue
		}
		text := source[t.start:t.end]
		for _, s := range []struct {
			re   *regexp.Regexp
			into *[]step
		}{{setStatement, &sets}, {forStatement, &loops}} {
			m := s.re.FindStringSubmatch(text)
			if m == nil {
				continue
			}
			if a := access.FindStringSubmatch(m[2]); a != nil {
				*s.into = append(*s.into, step{m[1], a[1], a[2] + a[3] + a[4]})
			}
		}
	}
	closure := func(start map[string]bool) map[string]bool {
		for changed := true; changed; {
			changed = false
			for _, s := range sets {
				if s.key == "" && start[s.variable] && !start[s.name] {
					start[s.name], changed = true, true
				}
			}
		}
		return start
	}
	messages := closure(map[string]bool{"messages": true})
	message := make(map[string]bool)
	for _, l := range loops {
		if l.key == "" && messages[l.variable] {
			message[l.name] = true
		}
	}
	for _, l := range loops {
		if l.key == "content" && message[l.variable] {
			return true
		}
	}
	return false
}

// printParts turns {{ 'text' + a + b }} into {{ 'text' }}{{ a }}{{ b }}, for which the library does not copy a long message once for
// every operand. The two print the same: a sum that starts with text is the text of each operand, joined. Any expression with an
// operator that binds looser than + stays as it is.
func printParts(source string) string {
	var b strings.Builder
	done := 0
	for _, t := range tags(source) {
		if t.statement {
			continue
		}
		operands := sumOfTexts(source[t.start:t.end])
		if operands == nil {
			continue
		}
		b.WriteString(source[done:t.start])
		b.WriteString(strings.Join(operands, "}}{{"))
		done = t.end
	}
	b.WriteString(source[done:])
	return b.String()
}

// looser matches what may make + not the outermost operator of an expression.
var looser = regexp.MustCompile(`[-~<>=!]|\b(?:if|else|and|or|not|in|is)\b`)

// sumOfTexts returns the operands of an expression that is a sum whose first operand is a string literal, with the tag's marks
// for white space at its ends; nil if it is anything else.
func sumOfTexts(expression string) []string {
	inner := strings.TrimSuffix(strings.TrimPrefix(expression, "-"), "-")
	if trimmed := strings.TrimSpace(inner); trimmed == "" || trimmed[0] != '\'' && trimmed[0] != '"' {
		return nil
	}
	var operands []string
	depth, from := 0, 0
	for i := 0; i < len(expression); {
		switch c := expression[i]; c {
		case '\'', '"':
			i = literalEnd(expression, i)
			continue
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case '+':
			if depth == 0 {
				operands = append(operands, expression[from:i])
				from = i + 1
			}
		default:
			edge := c == '-' && (i == 0 || i == len(expression)-1)
			if depth == 0 && !edge && looser.MatchString(wordAt(expression, i)) {
				return nil
			}
		}
		i += len(wordAt(expression, i))
	}
	if len(operands) == 0 {
		return nil
	}
	operands = append(operands, expression[from:])
	for i, o := range operands {
		if strings.TrimSpace(strings.Trim(o, "-")) == "" {
			return nil
		}
		if i > 0 && strings.HasPrefix(o, "-") || i < len(operands)-1 && strings.HasSuffix(o, "-") {
			return nil // would read as a mark for white space
		}
	}
	return operands
}

// wordAt returns the identifier or number at s[i], or the one character there.
func wordAt(s string, i int) string {
	end := i
	for end < len(s) && (s[end] == '_' || '0' <= s[end] && s[end] <= '9' || 'a' <= s[end]|0x20 && s[end]|0x20 <= 'z') {
		end++
	}
	return s[i:max(end, i+1)]
}
