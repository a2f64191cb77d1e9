package ingress

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/openai"
)

func tools(t testing.TB, list string) openai.Value {
	var o openai.Object
	if err := o.Parse([]byte(`{"tools":`+list+`}`), openai.DefaultDepth); err != nil {
		t.Fatal(err)
	}
	return o.Get("tools")
}

func TestToolNames(t *testing.T) {
	for list, want := range map[string][]string{
		`null`: nil, `{}`: nil, `"x"`: nil, `[]`: nil, `[null, 1, {}, {"function":"x"}, {"function":{"name":1}}, {"function":{"name":""}}]`: nil,
		`[{"type":"function","function":{"name":"a","parameters":{"name":"no"}}},{"function":{"name":"\u0062"}}]`: {"a", "b"},
		`[{"type":"custom","custom":{"name":"c"}},{"name":"of functions, as they were before tools"}]`:            {"c", "of functions, as they were before tools"},
		`[{"name":"a","function":{"name":"b"},"custom":{"name":"c"}}]`:                                            {"a", "b", "c"},
		`[{"function":{"name":"` + strings.Repeat("ä", maxToolName) + `"}}]`:                                      {strings.Repeat("ä", maxToolName/2)},
		"[" + strings.TrimSuffix(strings.Repeat(`{"function":{"name":"x"}},`, mostTools), ",") + "]":              slices.Repeat([]string{"x"}, mostTools),
	} {
		if got := toolNames(tools(t, list)); !slices.Equal(got, want) {
			t.Errorf("%.80s: got %.80q", list, got)
		}
	}
}

// BenchmarkToolNames is an agent's 60 tools of 1.6 KB each.
//
//	go test -run '^$' -bench ToolNames ./services/ingress
func BenchmarkToolNames(b *testing.B) {
	var list []string
	for i := range 60 {
		list = append(list, fmt.Sprintf(`{"type":"function","function":{"name":"tool_%d","description":%q,"parameters":{"type":"object","properties":{%s}}}}`, i,
			strings.Repeat("Reads a file of the project and tells what is in it. ", 15), strings.TrimSuffix(strings.Repeat(`"path_of_it":{"type":"string","description":"where it is"},`, 1), ",")))
	}
	v := tools(b, "["+strings.Join(list, ",")+"]")
	b.SetBytes(int64(len(v.Raw)))
	b.ReportAllocs()
	for b.Loop() {
		if n := len(toolNames(v)); n != 60 {
			b.Fatal(n)
		}
	}
}
