package kvindex_test

import (
	"encoding/binary"
	"errors"
	"hash/crc64"
	"math/rand/v2"
	"testing"

	"github.com/kinference/kinference/internal/kvindex"
	"github.com/kinference/kinference/internal/kvindex/ref"
)

// TestSnapshot goes on with a restored table again and again, beside the reference.
func TestSnapshot(t *testing.T) {
	for seed := range uint64(4) {
		c, table, reference := seeded(seed), kvindex.New(), ref.New()
		for i := range 600 {
			c.step(table, reference)
			if i%20 != 0 {
				continue
			}
			restored, err := kvindex.Restore(table.Snapshot(nil))
			if err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, i, err)
			}
			table = restored
			check(t, c, table, reference)
		}
	}
}

// TestSnapshotOfLongChains does so with a model of long conversations that leave holes.
func TestSnapshotOfLongChains(t *testing.T) {
	g := newTree(5, 4000, 70)
	x := kvindex.New()
	for i := range 600 {
		g.step(t, x, i%2 == 0)
		if i%100 == 0 {
			restored, err := kvindex.Restore(x.Snapshot(nil))
			if err != nil {
				t.Fatal(err)
			}
			x = restored
		}
		g.compare(t, x)
	}
}

// TestBrokenSnapshot changes snapshots, with a right checksum: they are refused or make
// a table that can be asked and cleared.
func TestBrokenSnapshot(t *testing.T) {
	c, table := seeded(1), kvindex.New()
	for range 300 {
		c.step(table)
	}
	good := table.Snapshot(nil)
	if _, err := kvindex.Restore(good[:len(good)-1]); !errors.Is(err, kvindex.ErrSnapshot) {
		t.Errorf("a cut snapshot: got %v", err)
	}
	r := rand.New(rand.NewPCG(2, 2))
	refused := 0
	for range 1000 {
		b := append([]byte{}, good[:len(good)-8]...)
		for range 1 + r.IntN(3) {
			b[8+r.IntN(len(b)-8)] = byte(r.Uint32())
		}
		if r.IntN(4) == 0 {
			b = b[:8+r.IntN(len(b)-8)]
		}
		if use(t, b) {
			refused++
		}
	}
	if refused < 100 {
		t.Errorf("%d of 1,000 were refused: too few to believe that anything is checked", refused)
	}
}

// use restores a snapshot whose checksum is made right and asks the table.
func use(t *testing.T, b []byte) (refused bool) {
	b = binary.LittleEndian.AppendUint64(b, crc64.Checksum(b, crc64.MakeTable(crc64.ECMA)))
	x, err := kvindex.Restore(b)
	if err != nil {
		if !errors.Is(err, kvindex.ErrSnapshot) {
			t.Errorf("got %v", err)
		}
		return true
	}
	for _, w := range workers {
		x.Stats(w)
		x.Match(nil, 2, hashes("", "", 2, 1, 2, 1, 2))
		x.Clear(w)
	}
	x.Sweep()
	return false
}

func FuzzRestore(f *testing.F) {
	c, table := seeded(1), kvindex.New()
	for range 40 {
		c.step(table)
	}
	good := table.Snapshot(nil)
	f.Add(good[:len(good)-8])
	f.Fuzz(func(t *testing.T, b []byte) { use(t, b) })
}
