package classify_test

import (
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/classify/corpus"
)

// text is about n bytes of generated prompts.
func text(tb testing.TB, n int) string {
	tb.Helper()
	g, err := corpus.New(3)
	if err != nil {
		tb.Fatal(err)
	}
	var b strings.Builder
	for b.Len() < n {
		switch b.Len() % 3 {
		case 0:
			b.WriteString(g.Demanding())
		case 1:
			b.WriteString(g.Benign())
		default:
			b.WriteString(g.Doc().Text)
		}
		b.WriteString("\n")
	}
	return b.String()[:n]
}

// BenchmarkClassify: go test ./internal/classify -run '^$' -bench Classify -benchmem -count 10 | benchstat -
func BenchmarkClassify(b *testing.B) {
	c, err := classify.New(classify.Settings{CacheBytes: -1})
	if err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{2 << 10, 4 << 10, 32 << 10, 400 << 10} {
		in := classify.Input{Parts: []classify.Part{{Role: classify.RoleUser, Text: text(b, n)}}}
		b.Run(fmt.Sprintf("%dKB", n>>10), func(b *testing.B) {
			b.SetBytes(int64(n))
			b.ReportAllocs()
			before := cpu()
			for b.Loop() {
				c.Classify(b.Context(), in)
			}
			b.ReportMetric((cpu()-before)/float64(b.N)/float64(n)*1024, "cpu-µs/KB")
		})
	}
}

// BenchmarkTurn: the fiftieth turn of a conversation that the cache knows.
func BenchmarkTurn(b *testing.B) {
	c, err := classify.New(classify.Settings{})
	if err != nil {
		b.Fatal(err)
	}
	var in classify.Input
	for i := range 50 {
		in.Parts = append(in.Parts, classify.Part{Role: classify.RoleUser, Message: i, Text: text(b, 2<<10) + fmt.Sprint(i)})
	}
	n := 0
	for b.Loop() {
		in.Parts[49].Text = text2 + fmt.Sprint(n)
		n++
		c.Classify(b.Context(), in)
	}
	runtime.KeepAlive(in)
}

var text2 = strings.Repeat("Please write the next paragraph about gardens in spring. ", 36)

// cpu is the CPU time of this process in microseconds: the clock says little on a busy machine.
func cpu() float64 {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Sec+u.Stime.Sec)*1e6 + float64(u.Utime.Usec+u.Stime.Usec)
}

// BenchmarkLoad reads the embedded lists and weights.
func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		if err := classify.Use(nil, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
}
