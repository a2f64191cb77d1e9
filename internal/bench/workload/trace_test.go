package workload

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

const traceLines = `{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}

{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [0]}
not json
{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0]}
{"timestamp": 3000, "input_length": 0, "output_length": 7, "hash_ids": []}
{"timestamp": 6000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 9]}
`

func TestReadTrace(t *testing.T) {
	got, skipped, err := ReadTrace(strings.NewReader(traceLines), 0)
	want := []TraceRequest{{0, 1030, 5, []uint64{0, 1, 2}}, {3, 512, 7, []uint64{0}}, {6, 1025, 7, []uint64{0, 1, 9}}}
	if diff := cmp.Diff(want, got); diff != "" || skipped != 3 || err != nil {
		t.Errorf("skipped %d, error %v, requests (-want +got):\n%s", skipped, err, diff)
	}
	if got, _, _ := ReadTrace(strings.NewReader(traceLines), 2); len(got) != 2 {
		t.Errorf("%d requests with a limit of 2", len(got))
	}
	broken := errors.New("broken")
	if _, _, err := ReadTrace(iotest.ErrReader(broken), 0); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	if reusable, total := Reusable(want); reusable != 512+1024 || total != 2567 {
		t.Errorf("Reusable = %d of %d, want 1536 of 2567", reusable, total)
	}
}

func TestTraceTokens(t *testing.T) {
	a := TraceRequest{Input: 1030, IDs: []uint64{0, 1, 2}}.Tokens(nil)
	b := TraceRequest{Input: 1200, IDs: []uint64{0, 1, 3}}.Tokens(nil)
	if len(a) != 1030 || len(b) != 1200 {
		t.Fatalf("%d and %d tokens, want 1030 and 1200", len(a), len(b))
	}
	if !slices.Equal(a[:1024], b[:1024]) || slices.Equal(a[1024:], b[1024:1030]) {
		t.Error("prompts must agree exactly as far as their ids do")
	}
}

func TestMooncake(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(DataEnv, dir)
	got, source, err := Mooncake(5)
	if err != nil || len(got) != 5 || !strings.HasPrefix(source, "GENERATED DATA") || !strings.Contains(source, DataEnv) {
		t.Errorf("absent: %d requests, %q, %v", len(got), source, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "traces"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "traces", "mooncake_conversation_trace.jsonl"), []byte(traceLines), 0o644); err != nil {
		t.Fatal(err)
	}
	got, source, err = Mooncake(0)
	if want := "first 3 requests of the Mooncake conversation trace (3 lines skipped as malformed)"; err != nil || len(got) != 3 || source != want {
		t.Errorf("present: %d requests, %q, %v", len(got), source, err)
	}
}

// The statistics are those measured on the trace: 36.6 % reusable, mean input
// 12,035, mean output 343, 12,031 requests within 3,537 s.
func TestGenerateTrace(t *testing.T) {
	requests := GenerateTrace(1, 12031)
	reusable, total := Reusable(requests)
	outputs := 0
	for i, r := range requests {
		if len(r.IDs) != (r.Input+TraceBlock-1)/TraceBlock || r.Output < 1 {
			t.Fatalf("request %d: %d ids for %d tokens", i, len(r.IDs), r.Input)
		}
		outputs += r.Output
	}
	n := float64(len(requests))
	for _, c := range []struct {
		what            string
		got, want, over float64
	}{
		{"reusable share", float64(reusable) / float64(total), .366, .03},
		{"mean input", float64(total) / n, 12035, 800},
		{"mean output", float64(outputs) / n, 343, 40},
		{"duration", requests[len(requests)-1].At, 3537, 30},
	} {
		if c.got < c.want-c.over || c.got > c.want+c.over {
			t.Errorf("%s = %.4g, want %.4g ± %.2g", c.what, c.got, c.want, c.over)
		}
	}
}

func FuzzReadTrace(f *testing.F) {
	f.Add([]byte(traceLines))
	f.Fuzz(func(t *testing.T, data []byte) {
		got, _, _ := ReadTrace(strings.NewReader(string(data)), 100)
		for _, r := range got {
			if len(r.IDs) != (r.Input+TraceBlock-1)/TraceBlock {
				t.Errorf("request with %d ids for %d tokens", len(r.IDs), r.Input)
			}
		}
	})
}
