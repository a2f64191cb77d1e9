package chat

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// segmentKind says what a segment of a template is.
type segmentKind int

const (
	plain      segmentKind = iota // text, which is printed
	expression                    // {{ ... }}
	statement                     // {% ... %}
)

// segment is a piece of a template: text as it is printed, or the code of a tag without its delimiters and white-space marks.
type segment struct {
	kind segmentKind
	text string
}

// segments cuts a template up by the rules of Jinja's lexer with the options that transformers sets: trim_blocks (a line break behind
// a statement or comment goes), lstrip_blocks (so does the indentation before one that starts its line), and one line break at the
// end of the source. The library has rules of its own, which look past the neighbouring tag and so drop line breaks that
// Jinja prints; it never sees white space outside of string literals.
func segments(source string) ([]segment, error) {
	source = strings.ReplaceAll(strings.ReplaceAll(source, "\r\n", "\n"), "\r", "\n")
	source = strings.TrimSuffix(source, "\n")
	var all []segment
	text := func(s string) {
		if s != "" {
			all = append(all, segment{plain, s})
		}
	}
	lineStart := true // what was consumed last ended a line
	for len(source) > 0 {
		open := tagStart(source)
		before := source[:open]
		source = source[open:]
		if source == "" {
			text(before)
			break
		}
		kind := source[1]
		source = source[2:]
		switch {
		case strings.HasPrefix(source, "-"):
			before = strings.TrimRightFunc(before, unicode.IsSpace)
			source = source[1:]
		case strings.HasPrefix(source, "+"):
			source = source[1:]
		case kind != '{':
			before = withoutIndent(before, lineStart)
		}
		text(before)

		code, rest, ok := tagBody(source, kind)
		if !ok {
			return nil, fmt.Errorf("tag {%c%.40s is not closed", kind, source)
		}
		if kind == '%' && strings.TrimSpace(strings.Trim(code, "-+")) == "raw" {
			if code, source, lineStart, ok = rawBlock(rest, code); !ok {
				return nil, fmt.Errorf("raw block is not closed")
			}
			text(code)
			continue
		}
		code, source, lineStart = closeTag(code, rest, kind)
		switch kind {
		case '{':
			all = append(all, segment{expression, code})
		case '%':
			all = append(all, segment{statement, code})
		}
	}
	return all, nil
}

// tagStart returns the offset of the first tag in s, or len(s).
func tagStart(s string) int {
	for i := 0; i+1 < len(s); i++ {
		if s[i] == '{' && (s[i+1] == '{' || s[i+1] == '%' || s[i+1] == '#') {
			return i
		}
	}
	return len(s)
}

// withoutIndent takes the indentation off the end of the text before a statement or comment that starts its line.
func withoutIndent(s string, lineStart bool) string {
	line := strings.LastIndexByte(s, '\n') + 1
	if (line > 0 || lineStart) && strings.TrimSpace(s[line:]) == "" {
		return s[:line]
	}
	return s
}

// tagBody splits the source behind a tag's opening at its closing, which may not stand in a string literal or among open brackets.
// The code keeps a mark at its end; rest starts behind the closing; ok is false if there is none.
func tagBody(s string, kind byte) (code, rest string, ok bool) {
	if kind == '#' {
		return strings.Cut(s, "#}")
	}
	closing := "%}"
	if kind == '{' {
		closing = "}}"
	}
	depth := 0
	for i := 0; i < len(s); {
		if depth == 0 && strings.HasPrefix(s[i:], closing) {
			return s[:i], s[i+2:], true
		}
		switch s[i] {
		case '\'', '"':
			i = literalEnd(s, i)
			continue
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		}
		i++
	}
	return s, "", false
}

// closeTag takes the mark off the end of a tag's code, and off the source behind it what the mark or trim_blocks takes. lineStart reports
// whether that ended a line.
func closeTag(code, rest string, kind byte) (body, after string, lineStart bool) {
	after = rest
	switch {
	case strings.HasSuffix(code, "-"):
		code = code[:len(code)-1]
		after = strings.TrimLeftFunc(rest, unicode.IsSpace)
	case strings.HasSuffix(code, "+") && kind != '{':
		code = code[:len(code)-1]
	case kind != '{':
		after = strings.TrimPrefix(rest, "\n")
	}
	taken := rest[:len(rest)-len(after)]
	return code, after, strings.HasSuffix(taken, "\n")
}

var endRaw = regexp.MustCompile(`\{%([-+]?)\s*endraw\s*([-+]?)%\}`)

// rawBlock returns the text of a raw block, behind whose opening tag (with this code) s starts, and what follows the block.
func rawBlock(s, code string) (text, rest string, lineStart, ok bool) {
	_, s, lineStart = closeTag(code, s, '%')
	at := endRaw.FindStringSubmatchIndex(s)
	if at == nil {
		return "", "", false, false
	}
	text = s[:at[0]]
	switch s[at[2]:at[3]] {
	case "-":
		text = strings.TrimRightFunc(text, unicode.IsSpace)
	case "":
		text = withoutIndent(text, lineStart)
	}
	_, rest, lineStart = closeTag(s[at[4]:at[5]], s[at[1]:], '%')
	return text, rest, lineStart, true
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

// rewrite returns the template that the library gets in place of a model's: the same output, but text stands in string literals, sums
// are printed part by part, and filters are ours where the library's differ.
func rewrite(all []segment) string {
	var b strings.Builder
	names := setInLoops(all)
	for i, s := range all {
		switch s.kind {
		case plain:
			b.WriteString(`{{ "`)
			b.WriteString(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s.text))
			b.WriteString(`" }}`)
		case expression:
			parts := printParts(s.text)
			for _, part := range parts {
				b.WriteString("{{ ")
				if literal := strings.TrimSpace(part); len(parts) > 1 || literal != "" && (literal[0] == '\'' || literal[0] == '"') {
					writeCode(&b, part) // text, or what only text can be added to
				} else {
					b.WriteByte('(')
					writeCode(&b, part)
					b.WriteString(") | " + ours + "print")
				}
				b.WriteString(" }}")
			}
		case statement:
			for _, name := range names[i] {
				fmt.Fprintf(&b, "{%% set %s%d_%s = %s %%}", ours, i, name, name)
			}
			b.WriteString("{% ")
			writeCode(&b, s.text)
			b.WriteString(" %}")
			for _, name := range names[i] {
				fmt.Fprintf(&b, "{%% set %s = %s%d_%s %%}", name, ours, i, name)
			}
		}
	}
	return b.String()
}

var (
	firstWord  = regexp.MustCompile(`^\s*(\w+)`)
	forTargets = regexp.MustCompile(`^\s*for\s+([\w\s,()]+?)\s+in\b`)
	identifier = regexp.MustCompile(`\w+`)
	setName    = regexp.MustCompile(`^\s*set\s+(\w+)\s*(?:=|$)`)
)

// setInLoops returns, for each for statement by its index, the variables that its body sets. In Jinja each turn of a loop starts with
// what they are outside; the library keeps them from turn to turn unless they are set back.
func setInLoops(all []segment) map[int][]string {
	names := make(map[int][]string)
	var open []int // statements with a scope of their own
	for i, s := range all {
		if s.kind != statement {
			continue
		}
		word := firstWord.FindStringSubmatch(s.text)
		if word == nil {
			continue
		}
		switch word[1] {
		case "for", "macro", "call":
			open = append(open, i)
		case "endfor", "endmacro", "endcall":
			if len(open) > 0 {
				open = open[:len(open)-1]
			}
		case "set":
			m := setName.FindStringSubmatch(s.text)
			if m == nil || len(open) == 0 {
				continue
			}
			loop := open[len(open)-1]
			head := forTargets.FindStringSubmatch(all[loop].text)
			if head == nil || slices.Contains(names[loop], m[1]) || slices.Contains(identifier.FindAllString(head[1], -1), m[1]) {
				continue // no loop, known, or the loop's own variable, which each turn sets anew
			}
			names[loop] = append(names[loop], m[1])
		}
	}
	return names
}

var (
	ourFilter = regexp.MustCompile(`(\|\s*)(tojson|map|trim|string)\b`)
	braces    = strings.NewReplacer("}}", "} }", "%}", "% }")
)

// ours starts the names of this package's variables and filters in a template.
const ours = "kinference_"

// writeCode writes a tag's code with this package's filters, and so that the library does not take brackets in it for the tag's end.
func writeCode(b *strings.Builder, code string) {
	code = strings.TrimSpace(code)
	for code != "" {
		literal := strings.IndexAny(code, `'"`)
		if literal < 0 {
			literal = len(code)
		}
		b.WriteString(braces.Replace(braces.Replace(ourFilter.ReplaceAllString(code[:literal], "${1}"+ours+"$2"))))
		code = code[literal:]
		if code != "" {
			end := literalEnd(code, 0)
			b.WriteString(code[:end])
			code = code[end:]
		}
	}
}

// printParts returns the expressions that an expression may be printed as, one after the other: the operands of 'text' + a + b, for
// which the library would copy a long message once for every operand. A sum that starts with text is the text of each
// operand, joined. Any expression with an operator that binds looser than + is left whole.
func printParts(code string) []string {
	whole := []string{code}
	var operands []string
	depth, from := 0, 0
	for i := 0; i < len(code); {
		switch c := code[i]; c {
		case '\'', '"':
			i = literalEnd(code, i)
			continue
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case '+':
			if depth == 0 {
				operands = append(operands, code[from:i])
				from = i + 1
			}
		default:
			if depth == 0 && looser[wordAt(code, i)] {
				return whole
			}
		}
		i += len(wordAt(code, i))
	}
	if operands == nil {
		return whole
	}
	operands = append(operands, code[from:])
	for i, o := range operands {
		o = strings.TrimSpace(o)
		if o == "" || i == 0 && (o[0] != '\'' && o[0] != '"' || literalEnd(o, 0) != len(o)) {
			return whole
		}
	}
	return operands
}

// looser holds what may make + not the outermost operator of an expression.
var looser = map[string]bool{
	"-": true, "~": true, "<": true, ">": true, "=": true, "!": true,
	"if": true, "else": true, "and": true, "or": true, "not": true, "in": true, "is": true,
}

// wordAt returns the identifier or number at s[i], or the one character there.
func wordAt(s string, i int) string {
	end := i
	for end < len(s) && (s[end] == '_' || '0' <= s[end] && s[end] <= '9' || 'a' <= s[end]|0x20 && s[end]|0x20 <= 'z') {
		end++
	}
	return s[i:max(end, i+1)]
}
