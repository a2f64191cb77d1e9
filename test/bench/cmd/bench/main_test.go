package main

import (
	"strings"
	"testing"
)

func TestRun(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want string // in the output
		err  string
	}{
		{"no command", nil, "usage: kinbench", ""},
		{"help", []string{"help"}, "mooncake", ""},
		{"unknown command", []string{"fast"}, "usage: kinbench", `unknown command "fast"`},
		{"routing", []string{"routing", "-scenarios", "S0s", "-policies", "random,kinference", "-seeds", "1", "-tuning"}, "no GPU was used", ""},
		{"unknown scenario", []string{"routing", "-scenarios", "S99"}, "", `unknown scenario "S99"`},
		{"unknown policy", []string{"routing", "-scenarios", "S0s", "-policies", "best", "-seeds", "1"}, "no GPU was used", "best"},
		{"policy without wall-clock form", []string{"wall", "-policies", "roundrobin"}, "", "does not run in wall time"},
		{"unknown profile", []string{"mooncake", "-profile", "tpu"}, "", `unknown profile "tpu"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			err := run(t.Context(), c.args, &out)
			if (c.err == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if !strings.Contains(out.String(), c.want) {
				t.Errorf("output %q, want it to hold %q", out.String(), c.want)
			}
		})
	}
}
