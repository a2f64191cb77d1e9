package workload

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// TraceBlock is the number of tokens that one id of a trace stands for.
const TraceBlock = 512

// TraceRequest is one request of an open-loop trace.
type TraceRequest struct {
	// At is the time of arrival in seconds from the trace's start.
	At float64
	// Input and Output are lengths in tokens.
	Input, Output int
	// IDs name the prompt's blocks of TraceBlock tokens, the last one partial:
	// two requests share a prefix exactly as far as their ids agree.
	IDs []uint64
}

// Tokens expands the request's ids to token ids, each block determined by its
// id alone: equal ids give equal tokens in every request, run and process.
func (t TraceRequest) Tokens(vocab []uint32) []uint32 {
	out := make([]uint32, 0, t.Input)
	for _, id := range t.IDs {
		r := rand.New(rand.NewPCG(id, 0x6d6f6f6e63616b65)) // "mooncake"
		for range min(TraceBlock, t.Input-len(out)) {
			if vocab != nil {
				out = append(out, vocab[r.IntN(len(vocab))])
			} else {
				out = append(out, 1000+r.Uint32N(100000))
			}
		}
	}
	return out
}

// Reusable is what an infinite cache without forgetting would have served of
// the requests' prompts in this order: the bound that no fleet can exceed.
func Reusable(requests []TraceRequest) (reusable, total int) {
	seen := map[uint64]bool{}
	for _, r := range requests {
		total += r.Input
		shared := 0
		for shared < len(r.IDs) && seen[r.IDs[shared]] {
			shared++
		}
		reusable += min(shared*TraceBlock, r.Input)
		for _, id := range r.IDs {
			seen[id] = true
		}
	}
	return reusable, total
}

// maxTraceLine bounds a line of a trace: the longest real one has 247 ids.
const maxTraceLine = 1 << 20

// ReadTrace reads Mooncake's JSON lines. Lines that are no request, or whose
// ids do not fit their length, are counted in skipped. limit > 0 ends the
// reading after so many requests. The error is the reader's.
func ReadTrace(r io.Reader, limit int) (requests []TraceRequest, skipped int, err error) {
	in := bufio.NewScanner(r)
	in.Buffer(nil, maxTraceLine)
	for in.Scan() {
		if limit > 0 && len(requests) == limit {
			return requests, skipped, nil
		}
		var line struct {
			Timestamp    float64  `json:"timestamp"` // ms
			InputLength  int      `json:"input_length"`
			OutputLength int      `json:"output_length"`
			HashIDs      []uint64 `json:"hash_ids"`
		}
		if len(in.Bytes()) == 0 {
			continue
		}
		if json.Unmarshal(in.Bytes(), &line) != nil || line.InputLength < 1 || line.OutputLength < 1 || line.Timestamp < 0 ||
			len(line.HashIDs) != (line.InputLength+TraceBlock-1)/TraceBlock {
			skipped++
			continue
		}
		requests = append(requests, TraceRequest{At: line.Timestamp / 1000, Input: line.InputLength, Output: line.OutputLength, IDs: line.HashIDs})
	}
	return requests, skipped, in.Err()
}

// DataEnv names the environment variable that overrides where data lies.
const DataEnv = "KINFERENCE_DATA"

// DataDir is the folder with public data sets: the value of DataEnv, or
// shared/data beside the repository that holds the working directory.
func DataDir() string {
	if dir := os.Getenv(DataEnv); dir != "" {
		return dir
	}
	dir, err := os.Getwd()
	for err == nil && dir != filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return filepath.Join(filepath.Dir(dir), "shared", "data")
		}
		dir = filepath.Dir(dir)
	}
	return filepath.Join("..", "shared", "data")
}

// Mooncake returns the first limit requests, or with 0 all, of the Mooncake conversation trace
// (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl,
// Apache-2.0) and a sentence that names the source. Where the file is absent
// the requests are generated with the same statistics and the sentence says so
// at length, because figures from it are not figures from the trace.
func Mooncake(limit int) (requests []TraceRequest, source string, err error) {
	path := filepath.Join(DataDir(), "traces", "mooncake_conversation_trace.jsonl")
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		if limit <= 0 {
			limit = generated
		}
		return GenerateTrace(1, limit), fmt.Sprintf("%s: there is no %s; set %s to a folder that holds traces/mooncake_conversation_trace.jsonl",
			notTheTrace, filepath.Base(path), DataEnv), nil
	}
	if err != nil {
		return nil, "", fmt.Errorf("open the Mooncake trace: %w", err)
	}
	defer f.Close()
	requests, skipped, err := ReadTrace(f, limit)
	if err != nil {
		return nil, "", fmt.Errorf("read the Mooncake trace: %w", err)
	}
	source = fmt.Sprintf("first %d requests of the Mooncake conversation trace", len(requests))
	if skipped > 0 {
		source += fmt.Sprintf(" (%d lines skipped as malformed)", skipped)
	}
	return requests, source, nil
}

// notTheTrace begins what Mooncake says of requests that stand for the trace.
const notTheTrace = "GENERATED DATA, NOT THE MOONCAKE TRACE"

// whole is the trace, read once.
var whole = sync.OnceValues(func() (trace struct {
	requests []TraceRequest
	source   string
}, err error) {
	trace.requests, trace.source, err = Mooncake(0)
	return trace, err
})

// MooncakeWindow returns n requests of the trace (or of what stands for it, see
// MooncakeMissing) from a place that is drawn from the seed. They begin at time 0.
func MooncakeWindow(n int, seed uint64) ([]TraceRequest, error) {
	trace, err := whole()
	if err != nil {
		return nil, err
	}
	all := trace.requests
	n = min(n, len(all))
	from := rand.New(rand.NewPCG(seed, 0x77696e646f77)).IntN(len(all) - n + 1) // "window"
	requests := slices.Clone(all[from : from+n])
	for i := range requests {
		requests[i].At -= all[from].At
	}
	return requests, nil
}

// MooncakeMissing says at length that the requests of MooncakeWindow are generated,
// because the trace is missing; empty if they are the trace's. Figures from them
// must carry it.
func MooncakeMissing() (string, error) {
	trace, err := whole()
	if err != nil || !strings.HasPrefix(trace.source, notTheTrace) {
		return "", err
	}
	return trace.source, nil
}

// generated is how many requests stand for the whole trace where it is missing:
// as many as it has.
const generated = 12031

// GenerateTrace makes requests with the statistics of the Mooncake
// conversation trace: all start with one common block, a third continues an
// earlier conversation, prompts have a mean of 12,000 tokens with a long tail,
// answers a mean of 340, and arrivals come in batches each 3 s at 3.4/s.
func GenerateTrace(seed uint64, n int) []TraceRequest {
	r := rand.New(rand.NewPCG(seed, 0x7472616365)) // "trace"
	logNormal := func(median, sigma float64, lo, hi int) int {
		return min(max(int(median*math.Exp(sigma*r.NormFloat64())), lo), hi)
	}
	out := make([]TraceRequest, 0, n)
	nextID := uint64(1)
	var open []int // requests that a later one may continue
	for i := range n {
		t := TraceRequest{At: 3 * math.Floor(float64(i)/10.2), Output: logNormal(262, 0.73, 1, 2000)}
		ids := []uint64{0}
		grow := logNormal(5200, 1.1, 600, 120000)
		if len(open) > 0 && r.Float64() < 0.34 {
			// Recent conversations go on more often than old ones.
			at := len(open) - 1 - min(int(r.ExpFloat64()*60), len(open)-1)
			earlier := out[open[at]]
			// The partial block at its end is never equal to a grown one.
			ids = slices.Clone(earlier.IDs[:max(len(earlier.IDs)-1, 1)])
			grow = logNormal(1700, 1.0, 100, 60000)
			open = slices.Delete(open, at, at+1)
		}
		t.Input = min(len(ids)*TraceBlock+grow, 126000)
		blocks := (t.Input + TraceBlock - 1) / TraceBlock
		ids = ids[:min(len(ids), blocks)]
		for len(ids) < blocks {
			ids = append(ids, nextID)
			nextID++
		}
		t.IDs = ids
		open = append(open, i)
		out = append(out, t)
	}
	return out
}
