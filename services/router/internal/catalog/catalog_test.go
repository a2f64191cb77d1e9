package catalog

import (
	"testing"
	"time"

	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/window"
	"github.com/kinference/kinference/services/router/internal/fleet"
)

// states knows one block size for all sets.
type states int

func (states) Lookup(time.Time, string, string) fleet.State   { return fleet.State{} }
func (states) Mean(string, time.Duration) (window.Load, bool) { return window.Load{}, false }
func (s states) BlockSize(string) int                         { return int(s) }
func (states) MaxModelLen([]string, string) int               { return 0 }

// A tracker that restarts knows no block size for a moment: the learned one
// holds, since prompts could not be hashed without.
func TestBlockSizeIsKept(t *testing.T) {
	set := &resources.WorkerSet{Name: "ns/s"}
	set.Profiles = []*resources.Profile{{ID: "ns/s/m", Set: set}}
	c := &resources.Catalog{Sets: []*resources.WorkerSet{set}}
	p := NewPublisher()
	for i, step := range []struct {
		known states
		want  uint32
	}{{0, 0}, {16, 16}, {0, 16}, {784, 784}} {
		v := p.Publish(c, step.known, nil)
		if got := v.Message.Catalog.Profiles[0].BlockSize; got != step.want {
			t.Errorf("step %d: block size %d, want %d", i, got, step.want)
		}
	}
}
