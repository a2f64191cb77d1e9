package blocks_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/blocks"
	"github.com/kinference/kinference/internal/blocks/blockstest"
	"github.com/kinference/kinference/internal/openai"
)

// recorder writes blocks as <kind name>…</>.
type recorder struct{ open bool }

func (r *recorder) Begin(dst []byte, b blocks.Block) []byte {
	if r.open {
		return append(dst, "OVERLAP"...)
	}
	r.open = true
	return fmt.Appendf(dst, "<%d %d %s>", b.Index, b.Kind, b.Name)
}

func (r *recorder) Delta(dst, raw []byte) []byte { return append(dst, raw...) }

func (r *recorder) End(dst []byte) []byte {
	r.open = false
	return append(dst, "</>"...)
}

func play(t *testing.T, chunks ...string) string {
	t.Helper()
	s := blocks.New(&recorder{}, false)
	var out []byte
	for _, c := range chunks {
		if c == "[DONE]" {
			continue
		}
		if e := s.Parse([]byte(c)); e != nil {
			t.Fatal(e)
		}
		var e *openai.Error
		if out, e = s.Take(out); e != nil {
			t.Fatal(e)
		}
	}
	return string(s.Close(out))
}

// A call that is not complete keeps everything else waiting; what is complete
// ends as soon as something else comes.
func TestOrder(t *testing.T) {
	delta := func(members string) string { return `{"choices":[{"index":0,"delta":{` + members + `}}]}` }
	call := func(i int, name, args string) string {
		return delta(fmt.Sprintf(`"tool_calls":[{"index":%d,"function":{"name":%q,"arguments":%q}}]`, i, name, args))
	}
	got := play(t, delta(`"content":"a"`), call(0, "f", `{"x"`), call(1, "g", `{`), delta(`"content":"b"`), call(0, "", `:1}`), call(1, "", `}`), delta(`"reasoning":"c"`))
	want := `<0 0 >a</><1 2 f>{\"x\":1}</><2 2 g>{}</><3 0 >b</><4 1 >c</>`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestNoOverlap(t *testing.T) {
	for seed := range uint64(500) {
		b := blockstest.New(seed)
		got := play(t, b.Chunks...)
		if strings.Contains(got, "OVERLAP") || strings.Count(got, "</>") < len(b.Calls) {
			t.Fatalf("seed %d: %s", seed, got)
		}
	}
}
