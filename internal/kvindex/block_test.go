package kvindex

import (
	"math/rand/v2"
	"testing"

	"github.com/kinference/kinference/internal/kvhash"
)

// TestBlocksCollide drives the block store with hashes that all begin their searches at a
// few slots, with few different tags, beside a map.
func TestBlocksCollide(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	narrow := func() kvhash.Hash { // two segments, two homes, two tags; the rest tells them apart
		return kvhash.Hash(r.Uint64N(2)<<58 | r.Uint64N(2)<<57 | r.Uint64N(2)<<20 | r.Uint64N(600))
	}
	var b blocks
	want := map[kvhash.Hash]ref{}
	for i := range 30_000 {
		h := narrow()
		got := b.find(h)
		if got != want[h] {
			t.Fatalf("step %d: %x is at %d, want %d", i, h, got, want[h])
		}
		switch {
		case got == 0:
			want[h] = b.add(h)
			b.at(want[h]).state = uint32(h) | 1<<31
		case r.IntN(2) == 0:
			b.remove(got)
			delete(want, h)
		case b.state(h) != uint32(h)|1<<31:
			t.Fatalf("%x has the state of another block", h)
		}
	}
	for h, at := range want {
		b.remove(at)
		if b.find(h) != 0 {
			t.Fatalf("%x is found after its removal", h)
		}
	}
	for i := range b.segments {
		if s := &b.segments[i]; s.live != 0 {
			t.Errorf("segment %d counts %d blocks, want none", i, s.live)
		}
	}
}

// TestEngineHashesCollide does the same with engine hashes; some are the same in all the
// bits that the table keeps.
func TestEngineHashesCollide(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 3))
	hashes := make([]uint64, 500)
	for i := range hashes {
		hashes[i] = unmix(1<<40 | r.Uint64N(2)<<22 | r.Uint64N(250)<<26 | r.Uint64N(2)<<60 | r.Uint64N(2))
	}
	var b blocks
	named := map[[3]uint32]ref{}
	key := func(engine uint64) [3]uint32 {
		segment, home, tag := enginePlace(engine)
		return [3]uint32{uint32(segment), home, tag}
	}
	for i := range 100_000 {
		engine := hashes[r.IntN(len(hashes))]
		got, want := b.byEngine(engine), named[key(engine)]
		if got != want {
			t.Fatalf("step %d: got block %d, want %d", i, got, want)
		}
		if got == 0 {
			at := b.add(kvhash.Hash(r.Uint64()))
			if !b.name(at, engine) {
				t.Fatalf("step %d: the block could not be named", i)
			}
			if b.name(at, engine+1) {
				t.Fatalf("step %d: the block has two names", i)
			}
			named[key(engine)] = at
		} else if r.IntN(2) == 0 {
			b.remove(got)
			delete(named, key(engine))
		}
	}
}

// unmix is the inverse of the mixing in enginePlace.
func unmix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0x9cb4b2f8129337db // inverse of 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	x *= 0x4f74430c22a54005 // inverse of 0xff51afd7ed558ccd
	x ^= x >> 33
	return x
}

// TestStatesAreRecycled makes far more states than may stay.
func TestStatesAreRecycled(t *testing.T) {
	var s states
	s.start()
	r := rand.New(rand.NewPCG(5, 5))
	state := uint32(0)
	want := map[int]bool{}
	for i := range 100_000 {
		s.collect()
		col := r.IntN(300)
		enter, leave := inGPU.bit(), uint8(0)
		if want[col] {
			enter, leave = leave, enter
		}
		to, _ := s.move(state, col, enter, leave)
		s.count(state, to)
		state = to
		if want[col] = !want[col]; !want[col] {
			delete(want, col)
		}
		x := s.get(state)
		if x.in(inGPU, col) != want[col] || x.any != x.sets[inGPU] {
			t.Fatalf("step %d: column %d is wrong", i, col)
		}
	}
	got := 0
	for k, w := range s.get(state).sets[inGPU].words {
		each(w, k, func(c int) {
			got++
			if !want[c] {
				t.Errorf("column %d is in", c)
			}
		})
	}
	if got != len(want) || len(s.refs) > 3*minStates {
		t.Errorf("%d columns in %d states, want %d in some %d", got, len(s.refs), len(want), minStates)
	}
}
