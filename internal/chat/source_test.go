package chat

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSegments(t *testing.T) {
	for source, want := range map[string][]segment{
		"a":                                     {{plain, "a"}},
		"a\n":                                   {{plain, "a"}},
		"a\n\n":                                 {{plain, "a\n"}},
		"a\r\nb\rc":                             {{plain, "a\nb\nc"}},
		"a {{ b }} c":                           {{plain, "a "}, {expression, " b "}, {plain, " c"}},
		"a {{- b -}} c":                         {{plain, "a"}, {expression, " b "}, {plain, "c"}},
		"{{ x }}\ny":                            {{expression, " x "}, {plain, "\ny"}},
		"  {% if a %}\n  b\n  {% endif %}\n  c": {{statement, " if a "}, {plain, "  b\n"}, {statement, " endif "}, {plain, "  c"}},
		"x {% if a %} {% endif %} y":            {{plain, "x "}, {statement, " if a "}, {plain, " "}, {statement, " endif "}, {plain, " y"}},
		"{% if a %}{{ b }}\nc{% endif %}":       {{statement, " if a "}, {expression, " b "}, {plain, "\nc"}, {statement, " endif "}},
		"a {{ b }}{%- if c %}":                  {{plain, "a "}, {expression, " b "}, {statement, " if c "}},
		"{{ b }} {% if c %}":                    {{expression, " b "}, {plain, " "}, {statement, " if c "}},
		"{% a -%}\n  {% b %}":                   {{statement, " a "}, {statement, " b "}},
		"a\n  {%+ if b +%}\nc":                  {{plain, "a\n  "}, {statement, " if b "}, {plain, "\nc"}},
		"a\n  {# x %} {{ ' #}\nb":               {{plain, "a\n"}, {plain, "b"}},
		"a {#- x -#} b":                         {{plain, "a"}, {plain, "b"}},
		"{{ {'a': {'b': 1}} }}{{ '}}' }}":       {{expression, " {'a': {'b': 1}} "}, {expression, " '}}' "}},
		"{% raw %}\n{{ x }} {% y %}{% endraw %}z": {{plain, "{{ x }} {% y %}"}, {plain, "z"}},
		"a {%- raw -%} {{ {%- endraw %}\nz":       {{plain, "a"}, {plain, "{{"}, {plain, "z"}},
	} {
		got, err := segments(source)
		if err != nil {
			t.Errorf("segments(%q): %v", source, err)
		} else if diff := cmp.Diff(want, got, cmp.AllowUnexported(segment{})); diff != "" {
			t.Errorf("segments(%q) (-want +got):\n%s", source, diff)
		}
	}
	for _, source := range []string{"{{ x", "{% if x }}", "{# x", "{{ '}}", "{{ (}}", "{% raw %} x"} {
		if got, err := segments(source); err == nil {
			t.Errorf("segments(%q) = %v, want an error", source, got)
		}
	}
}

func TestPrintParts(t *testing.T) {
	for code, want := range map[string][]string{
		`'a' + b`:                            {`'a' `, ` b`},
		`'a' + b.c['+'] + "d+"`:              {`'a' `, ` b.c['+'] `, ` "d+"`},
		`'a' + (b + c if d else e) + f|trim`: {`'a' `, ` (b + c if d else e) `, ` f|trim`},
		`'a' + b[c - 1:] * 2`:                {`'a' `, ` b[c - 1:] * 2`},
		`'a' + iffy + island`:                {`'a' `, ` iffy `, ` island`},
		`a + 'b'`:                            nil,
		`1 + 2`:                              nil,
		`'12' | int + 1`:                     nil,
		`'a'`:                                nil,
		`'a' + b if c else d`:                nil,
		`'a' + b == c`:                       nil,
		`'a' + b ~ c`:                        nil,
		`'a' + b - c`:                        nil,
		`'a' + -b`:                           nil,
		`'a' + b is string`:                  nil,
	} {
		if want == nil {
			want = []string{code}
		}
		if diff := cmp.Diff(want, printParts(code)); diff != "" {
			t.Errorf("printParts(%s) (-want +got):\n%s", code, diff)
		}
	}
}
