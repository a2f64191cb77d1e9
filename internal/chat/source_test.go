package chat

import "testing"

func TestPrintParts(t *testing.T) {
	for source, want := range map[string]string{
		`{{ 'a' + b }}`:                            `{{ 'a' }}{{ b }}`,
		`x{{- 'a' + b.c['+'] + "d+" -}} y`:         `x{{- 'a' }}{{ b.c['+'] }}{{ "d+" -}} y`,
		`{{ 'a' + (b + c if d else e) + f|trim }}`: `{{ 'a' }}{{ (b + c if d else e) }}{{ f|trim }}`,
		`{{ a + 'b' }}`:                            `{{ a + 'b' }}`,
		`{{ 1 + 2 }}`:                              `{{ 1 + 2 }}`,
		`{{ 'a' + b if c else d }}`:                `{{ 'a' + b if c else d }}`,
		`{{ 'a' + b == c }}`:                       `{{ 'a' + b == c }}`,
		`{{ 'a' + b ~ c }}`:                        `{{ 'a' + b ~ c }}`,
		`{{ 'a' + b - c }}`:                        `{{ 'a' + b - c }}`,
		`{{ 'a' + -b }}`:                           `{{ 'a' + -b }}`,
		`{{ 'a' + b is string }}`:                  `{{ 'a' + b is string }}`,
		`{{ 'a' + iffy + island }}`:                `{{ 'a' }}{{ iffy }}{{ island }}`,
		`{{ 'a' }}`:                                `{{ 'a' }}`,
		`{% set x = 'a' + b %}{# {{ 'a' + b }} #}`: `{% set x = 'a' + b %}{# {{ 'a' + b }} #}`,
		`{{ 'a' + b[c - 1:] * 2 }}`:                `{{ 'a' }}{{ b[c - 1:] * 2 }}`,
	} {
		if got := printParts(source); got != want {
			t.Errorf("printParts(%s) = %s, want %s", source, got, want)
		}
	}
}
