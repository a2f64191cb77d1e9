package chat

import (
	"regexp"
	"slices"
	"strings"
)

var (
	setStatement   = regexp.MustCompile(`(?s)^\s*set\s+(\w+)\s*=\s*(.*?)\s*$`)
	forStatement   = regexp.MustCompile(`(?s)^\s*for\s+(\w+)\s+in\s+(.*?)(?:\s+if\s.*|\s+recursive)?\s*$`)
	macroStatement = regexp.MustCompile(`(?s)^\s*macro\s+(\w+)\s*\((.*)\)\s*$`)
	plainName      = regexp.MustCompile(`^\w+$`)
	keyword        = regexp.MustCompile(`(?s)^\s*(\w+)\s*=([^=].*)$`)
	// A variable or one of its keys, perhaps sliced, filtered or tested.
	access = regexp.MustCompile(`(?s)^(\w+)(?:\.(\w+)|\[\s*(?:'(\w+)'|"(\w+)")\s*\])?(?:\s*\[[^\]]*:[^\]]*\])*(?:\s*\|.*|\s+is\s.*)?$`)
)

// step says that a name takes the value, or in a loop the items, of a variable or of one of its keys.
type step struct{ name, variable, key string }

// loop is a for statement over what is no more than an access.
type loop struct {
	step
	bare  bool // over a variable as it stands
	macro int  // the innermost macro around it, -1 if there is none
}

type macro struct {
	name   string
	params []string
}

// loopsOverContent reports whether a template walks through a message's content parts, so that vLLM gives it content in OpenAI's
// list form ("openai" format) and not flattened to a string. It does by vLLM's rules: assignments from messages are followed without
// regard to scope; a macro's parameter that some call gives a message's content is content within the macro; a variable
// of the name content is content outside of macros.
func loopsOverContent(all []segment) bool {
	var sets []step
	var loops []loop
	var macros []macro
	var open []int // macros around the statement
	for _, t := range all {
		if t.kind != statement {
			continue
		}
		if m := macroStatement.FindStringSubmatch(t.text); m != nil {
			open = append(open, len(macros))
			macros = append(macros, macro{m[1], parameters(m[2])})
		} else if strings.TrimSpace(t.text) == "endmacro" && len(open) > 0 {
			open = open[:len(open)-1]
		} else if m := setStatement.FindStringSubmatch(t.text); m != nil {
			if a := access.FindStringSubmatch(m[2]); a != nil {
				sets = append(sets, step{m[1], a[1], a[2] + a[3] + a[4]})
			}
		} else if m := forStatement.FindStringSubmatch(t.text); m != nil {
			if a := access.FindStringSubmatch(m[2]); a != nil {
				l := loop{step{m[1], a[1], a[2] + a[3] + a[4]}, plainName.MatchString(m[2]), -1}
				if len(open) > 0 {
					l.macro = open[len(open)-1]
				}
				loops = append(loops, l)
			}
		}
	}
	messages := map[string]bool{"messages": true}
	for changed := true; changed; {
		changed = false
		for _, s := range sets {
			if s.key == "" && messages[s.variable] && !messages[s.name] {
				messages[s.name], changed = true, true
			}
		}
	}
	message := make(map[string]bool)
	for _, l := range loops {
		if l.key == "" && messages[l.variable] {
			message[l.name] = true
		}
	}
	isContent := func(code string) bool {
		a := access.FindStringSubmatch(strings.TrimSpace(code))
		return a != nil && a[2]+a[3]+a[4] == "content" && message[a[1]]
	}
	for _, l := range loops {
		switch {
		case l.key == "content" && message[l.variable]:
			return true
		case l.bare && l.macro >= 0 && slices.Contains(contentParameters(all, &macros[l.macro], isContent), l.variable):
			return true
		case l.bare && l.macro < 0 && l.variable == "content":
			return true
		}
	}
	return false
}

// parameters returns the names in a macro's list of parameters.
func parameters(list string) (names []string) {
	for _, p := range splitArguments(list) {
		name, _, _ := strings.Cut(p, "=")
		names = append(names, strings.TrimSpace(name))
	}
	return names
}

// contentParameters returns the parameters of a macro that any call of it gives a message's content.
func contentParameters(all []segment, m *macro, isContent func(code string) bool) (names []string) {
	for _, t := range all {
		if t.kind == plain {
			continue
		}
		for _, arguments := range calls(t.text, m.name) {
			for i, a := range splitArguments(arguments) {
				if k := keyword.FindStringSubmatch(a); k != nil {
					if slices.Contains(m.params, k[1]) && isContent(k[2]) {
						names = append(names, k[1])
					}
				} else if i < len(m.params) && isContent(a) {
					names = append(names, m.params[i])
				}
			}
		}
	}
	return names
}

// calls returns the arguments of each call of a function in code.
func calls(code, function string) (arguments []string) {
	for i := 0; i < len(code); {
		if code[i] == '\'' || code[i] == '"' {
			i = literalEnd(code, i)
			continue
		}
		word := wordAt(code, i)
		i += len(word)
		rest := strings.TrimLeft(code[i:], " \t\r\n")
		if word == function && strings.HasPrefix(rest, "(") {
			arguments = append(arguments, rest[1:bracketEnd(rest, 1)])
		}
	}
	return arguments
}

// bracketEnd returns the offset of the bracket that closes the one open at i, or len(code).
func bracketEnd(code string, i int) int {
	for depth := 0; i < len(code); i++ {
		switch code[i] {
		case '\'', '"':
			i = literalEnd(code, i) - 1
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			if depth == 0 {
				return i
			}
			depth--
		}
	}
	return len(code)
}

// splitArguments splits code at the commas outside of brackets and literals.
func splitArguments(code string) (parts []string) {
	from, depth := 0, 0
	for i := 0; i < len(code); i++ {
		switch code[i] {
		case '\'', '"':
			i = literalEnd(code, i) - 1
		case '(', '[', '{':
			depth++
		case ')', ']', '}':
			depth--
		case ',':
			if depth == 0 {
				parts = append(parts, code[from:i])
				from = i + 1
			}
		}
	}
	if strings.TrimSpace(code[from:]) != "" {
		parts = append(parts, code[from:])
	}
	return parts
}
