package chat

import "testing"

// TestContentFormat: vLLM's _detect_content_format says the same of these templates ("openai" is true).
func TestContentFormat(t *testing.T) {
	for source, want := range map[string]bool{
		`{% for m in messages %}{{ m.content }}{% endfor %}`:                                                                                                                                                                              false,
		`{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                                             true,
		`{% for m in messages %}{% for c in m['content'] | list %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                                   true,
		`{% macro render(content, n) %}{% for item in content %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ render(m.content, 1) }}{% endfor %}`:                                                                   true,
		`{% macro render(content, n) %}{% for item in content %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ render(m.role, 1) }}{% endfor %}`:                                                                      false,
		`{% macro render(n, body='') %}{% for item in body %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{% set x = render(1, body=m['content']) %}{% endfor %}`:                                                      true,
		`{% macro render(n, body='') %}{% for item in n %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{% set x = render(1, body=m['content']) %}{% endfor %}`:                                                         false,
		`{% for m in messages %}{% set content = m.content %}{% for c in content %}{{ c }}{% endfor %}{% endfor %}`:                                                                                                                       true,
		`{% macro f() %}{% for c in content %}{{ c }}{% endfor %}{% endmacro %}{% for m in messages %}{{ m.content }}{% endfor %}`:                                                                                                        false,
		`{% set loop_messages = messages[1:] %}{% for m in loop_messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                  true,
		`{% macro render(c) %}{% if c is string %}{{ c }}{% else %}{% for item in c | list %}{{ item.text }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ render(m.content) }}{% endfor %}`:                              false,
		`{% macro render(c) %}{% if c is string %}{{ c }}{% else %}{% for item in c %}{{ item.text }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{- '<' + m.role + '>' + render(m.content | trim) + '\n' }}{% endfor %}`: true,
		`{% macro outer(a) %}{% macro inner(b) %}{% for item in b %}{{ item.text }}{% endfor %}{% endmacro %}{{ inner(a) }}{% endmacro %}{% for m in messages %}{{ inner(m.content) }}{% endfor %}`:                                       true,
		`{% macro render(c) %}{% for item in c %}{{ item.text }}{% endfor %}{% endmacro %}{% for m in messages %}{{ render(')', m.content) }}{% endfor %}`:                                                                                false,
		`{% for content in messages %}{% for c in content['content'] %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                              true,
		`{% for m in messages %}{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                         true,
		`{% for m in messages %}{% for c in content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                           true,
		`{% for m in messages if m.role != 'x' %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                            true,
		`{% for m in messages %}{% for c in m.get('content') %}{{ c.text }}{% endfor %}{% endfor %}`:                                                                                                                                      false,
	} {
		parts, err := segments(source)
		if err != nil {
			t.Errorf("%s: %v", source, err)
		} else if got := loopsOverContent(parts); got != want {
			t.Errorf("loopsOverContent(%s) = %v, want %v", source, got, want)
		}
	}
}
