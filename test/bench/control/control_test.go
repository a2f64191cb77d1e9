package control

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/kinference/kinference/internal/bench/wall"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/fleetsim/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The whole stack serves a small scenario, finds prefixes where they are, and
// can say why. No time is asserted: the benchmark does that.
func TestStart(t *testing.T) {
	const scale = 100
	text, err := wall.NewText()
	if err != nil {
		t.Fatal(err)
	}
	fleet, err := wall.StartFleet(t.Context(), 3, engine.L40SQwen27B, scale, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer fleet.Stop()
	c, err := Start(t.Context(), scale, 1, fleet.WriteConfig)
	if err != nil {
		t.Fatal(err)
	}
	sc := workload.Scenario{Name: "t", Prefixes: 3, PrefixTokens: 8000, FirstTokens: 100, Turns: 1, OutputTokens: 10, Streams: 2, Warm: 10, Count: 30}
	run, err := wall.Run(t.Context(), text, sc, 1, scale, wall.Gateway(c.URL))
	if s := run.Summarise(); err != nil || s.Failed != 0 || s.Requests != sc.Count || s.Hit < .5 {
		t.Errorf("%+v, error %v; want all answered and most of the prefixes reused", s, err)
	}

	trace := []workload.TraceRequest{{At: 0, Input: 1600, Output: 2, IDs: []uint64{0, 1, 2, 3}}, {At: 100, Input: 1700, Output: 2, IDs: []uint64{0, 1, 2, 4}}}
	_, reuse, err := wall.RunTrace(t.Context(), text, trace, fleet, wall.TraceOptions{Stretch: 1, Route: wall.Gateway(c.URL),
		Explain: c.Explain})
	if err != nil || reuse.Failed != 0 || reuse.Unexplained != 0 || reuse.Cached != 784 || reuse.Matched != 784 || reuse.Truth != 784 {
		t.Errorf("%+v, error %v; want one page matched, held and reused", reuse, err)
	}
	if err := c.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
}

func TestStartFails(t *testing.T) {
	write := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "broken.yaml"), []byte("kind: Nothing\n"), 0o644)
	}
	was := readyTimeout
	readyTimeout = was / 10
	defer func() { readyTimeout = was }()
	if _, err := Start(t.Context(), 1, 1, write); err == nil || !strings.Contains(err.Error(), "broken.yaml") {
		t.Errorf("error %v, want one that names the broken file", err)
	}
	if _, err := Start(t.Context(), 1, 1, func(string) error { return os.ErrPermission }); err == nil {
		t.Error("no error where the resources cannot be written")
	}
}
