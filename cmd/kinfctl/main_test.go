package main

import (
	"io"
	"strings"
	"testing"
)

// A wrong call ends with 2, whether it is a word, an argument or a flag that is wrong,
// and nothing that is no command ends well.
func TestMisuse(t *testing.T) {
	for call, want := range map[string]int{
		"": 0, "get": 0, "help": 0, "validate testdata/nothing": 1,
		"nonsense": 2, "stats": 2, "get nothing": 2, "get workers x": 2, "keys nothing": 2, "classifier nothing": 2, "completion fishy": 2, "usage nothing": 2,
		"validate": 2, "status extra": 2, "index x": 2, "keys create": 2, "keys create a b": 2, "top --nope": 2, "explain": 2, "get workers -o xml": 2,
	} {
		cmd := command()
		cmd.SetArgs(strings.Fields(call))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); exitCode(err) != want {
			t.Errorf("kinfctl %s: %d, want %d: %v", call, exitCode(err), want, err)
		} else if call == "stats" && !strings.Contains(err.Error(), "status") {
			t.Errorf("no hint in %v", err)
		}
	}
}
