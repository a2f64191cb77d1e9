package bus_test

import (
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/bus"
)

func TestSubjects(t *testing.T) {
	tests := []struct {
		name    string
		worker  bus.Worker
		subject string
	}{
		{"plain", bus.Worker{Namespace: "demo", Set: "sim", UID: "a-1_B", Rank: 0}, "demo.sim.a-1_B.0"},
		{"dots", bus.Worker{Namespace: "demo", Set: "sim", UID: "demo.sim.a", Rank: 12}, "demo.sim.demo=2Esim=2Ea.12"},
		{"wildcards and spaces", bus.Worker{Namespace: "*", Set: ">", UID: "a b", Rank: 1}, "=2A.=3E.a=20b.1"},
		{"escape character", bus.Worker{Namespace: "=", Set: "=2E", UID: "x", Rank: 1}, "=3D.=3D2E.x.1"},
		{"empty", bus.Worker{}, "=.=.=.0"},
		{"address", bus.Worker{Namespace: "n", Set: "s", UID: "http://[::1]:80/é", Rank: 65535},
			"n.s.http=3A=2F=2F=5B=3A=3A1=5D=3A80=2F=C3=A9.65535"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got, want := tt.worker.KVSubject(), "kv.events."+tt.subject; got != want {
				t.Errorf("KVSubject: got %q, want %q", got, want)
			}
			if got, want := tt.worker.StateSubject(), "worker.state."+tt.subject; got != want {
				t.Errorf("StateSubject: got %q, want %q", got, want)
			}
			for _, f := range []func() (bus.Worker, error){
				func() (bus.Worker, error) { return bus.ParseKVSubject(tt.worker.KVSubject()) },
				func() (bus.Worker, error) { return bus.ParseStateSubject(tt.worker.StateSubject()) },
				func() (bus.Worker, error) { return bus.ParseWorker(tt.worker.ID(), tt.worker.SetName()) },
			} {
				if got, err := f(); err != nil || got != tt.worker {
					t.Errorf("inverse: got %+v, %v; want %+v", got, err, tt.worker)
				}
			}
		})
	}
}

func TestBadSubjects(t *testing.T) {
	for _, s := range []string{
		"", "kv.events.", "kv.events.a.b.c", "kv.events.a.b.c.d", "kv.events.a.b.c.0.0", "worker.state.a.b.c.0",
		"kv.events.a.b.c.-1", "kv.events.a.b.c.00", "kv.events.a.b.c.+1", "kv.events.a.b.c.65536",
		"kv.events..b.c.0", "kv.events.a=2.b.c.0", "kv.events.a=2e.b.c.0", "kv.events.a=41.b.c.0", "kv.events.a b.b.c.0",
		"kv.events.a." + strings.Repeat("x", 300) + ".c.0",
	} {
		if w, err := bus.ParseKVSubject(s); err == nil {
			t.Errorf("%q: got %+v, want an error", s, w)
		}
	}
	for _, id := range [][2]string{{"a", "n/s"}, {"a/0", "n"}, {"a/x", "n/s"}, {"a/-1", "n/s"}, {strings.Repeat("x", 300) + "/0", "n/s"}} {
		if w, err := bus.ParseWorker(id[0], id[1]); err == nil {
			t.Errorf("%q: got %+v, want an error", id, w)
		}
	}
}

// FuzzSubject checks that one worker has one subject: what parses is written
// back the same.
func FuzzSubject(f *testing.F) {
	f.Add("kv.events.demo.sim.demo=2Esim=2Ea.0", "demo", "sim", "a.b")
	f.Fuzz(func(t *testing.T, subject, ns, set, uid string) {
		if w, err := bus.ParseKVSubject(subject); err == nil && w.KVSubject() != subject {
			t.Errorf("got %q, want %q", w.KVSubject(), subject)
		}
		w := bus.Worker{Namespace: ns, Set: set, UID: uid, Rank: 3}
		got, err := bus.ParseKVSubject(w.KVSubject())
		if long := max(len(ns), len(set), len(uid)) > 253; long != (err != nil) || !long && got != w {
			t.Errorf("got %+v, %v; want %+v", got, err, w)
		}
	})
}
