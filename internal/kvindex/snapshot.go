package kvindex

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc64"
	"slices"
	"sync/atomic"

	"github.com/kinference/kinference/internal/kvhash"
	"github.com/kinference/kinference/internal/vllm"
)

// A snapshot is the table's arrays as they are, so that writing and reading one costs
// little more than copying the memory: 21 bytes a block. The slots are made anew. Numbers
// are little-endian; in front of everything stand the format and at the end a CRC-64.

const snapshotFormat = "kvindex1"

var crcTable = crc64.MakeTable(crc64.ECMA)

// ErrSnapshot is returned for bytes that are not a whole snapshot of this version.
var ErrSnapshot = errors.New("not a usable snapshot of the KV index")

// Snapshot appends all that the table knows to dst. Writers wait meanwhile, some 50 ms
// for five million blocks; readers do not.
func (t *Table) Snapshot(dst []byte) []byte {
	t.Sweep()
	t.mu.Lock()
	defer t.mu.Unlock()
	start := len(dst)
	w := packer{append(dst, snapshotFormat...)}
	states := t.packStates(&w)
	w.uint(uint64(len(t.columns)))
	for i := range t.columns {
		c := &t.columns[i]
		if w.uint(uint64(c.size)); c.size == 0 {
			continue
		}
		w.uint(uint64(c.holes.Load()))
		w.uint(uint64(len(c.more)))
		for k, n := range c.more {
			w.uint(k)
			w.uint(uint64(n))
		}
	}
	w.uint(uint64(len(t.workers)))
	for _, x := range t.workers {
		x.pack(&w)
	}
	t.packBlocks(&w, states)
	return w.u64(crc64.Checksum(w.b[start:], crcTable))
}

// packStates writes the states in use and returns the number that each has there.
func (t *Table) packStates(w *packer) []uint32 {
	numbers := make([]uint32, len(t.states.refs))
	sets := map[*set]uint64{}
	var order []*set
	var used []*state
	for id, refs := range t.states.refs {
		if refs <= 0 || id == 0 {
			continue
		}
		x := t.states.get(uint32(id))
		used = append(used, x)
		numbers[id] = uint32(len(used))
		for _, s := range x.sets {
			if _, ok := sets[s]; !ok {
				sets[s] = uint64(len(order))
				order = append(order, s)
			}
		}
	}
	w.uint(uint64(len(order)))
	for _, s := range order {
		w.uint(uint64(len(s.words)))
		for _, word := range s.words {
			w.b = w.u64(word)
		}
	}
	w.uint(uint64(len(used)))
	for _, x := range used {
		for _, s := range x.sets {
			w.uint(sets[s])
		}
	}
	return numbers
}

func (w *worker) pack(p *packer) {
	p.text(w.name)
	p.uint(uint64(w.options.Removals))
	p.uint(uint64(w.options.GPUBlocks))
	p.uint(uint64(len(w.groups)))
	for n, g := range w.groups {
		p.uint(uint64(n))
		if !g.main {
			p.uint(0)
			continue
		}
		p.uint(1)
		p.uint(uint64(g.blockSize))
		p.uint(uint64(g.column + 1))
		for m := range g.media {
			md := &g.media[m]
			p.uint(uint64(md.hashes))
			p.uint(uint64(md.blocks))
			p.uint(uint64(len(md.odd)))
			for engine, o := range md.odd {
				p.b = p.u64(engine)
				p.b = p.u64(uint64(o.own))
				p.uint(uint64(o.copies)<<1 | boolean(md.names[o.own].plain))
			}
		}
	}
	p.text(string(vllm.AppendBatch(nil, &vllm.Batch{Events: w.orphans, Rank: -1}, vllm.V0_32)))
}

func boolean(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (t *Table) packBlocks(w *packer, states []uint32) {
	tags := make([][]byte, len(t.blocks.segments)) // of the engines' slots, by block
	for i := range t.blocks.segments {
		tags[i] = make([]byte, t.blocks.segments[i].last+1)
	}
	for i := range t.blocks.engines {
		for _, slot := range t.blocks.engines[i].slots {
			if slot != 0 && slot != goneRef {
				r := ref(slot & (goneRef - 1))
				tags[r.segment()][r.local()] = byte(slot / goneRef)
			}
		}
	}
	for i := range t.blocks.segments {
		s := &t.blocks.segments[i]
		w.uint(uint64(s.last))
		w.b = slices.Grow(w.b, int(s.last)*21)
		for local := uint32(1); local <= s.last; local++ {
			b := s.at(local)
			if b.state == 0 {
				w.b = append(w.b, 0)
				continue
			}
			w.b = append(w.b, tags[i][local]+1)
			for _, v := range [...]uint32{b.lo, b.hi, states[b.state], b.link, b.engine} {
				w.b = binary.LittleEndian.AppendUint32(w.b, v)
			}
		}
	}
}

// Restore makes a table from a snapshot. The error is ErrSnapshot.
func Restore(snapshot []byte) (*Table, error) {
	n := len(snapshot) - 8
	if n < len(snapshotFormat) || string(snapshot[:len(snapshotFormat)]) != snapshotFormat {
		return nil, fmt.Errorf("%w: unknown format", ErrSnapshot)
	}
	if crc64.Checksum(snapshot[:n], crcTable) != binary.LittleEndian.Uint64(snapshot[n:]) {
		return nil, fmt.Errorf("%w: wrong checksum", ErrSnapshot)
	}
	t := New()
	u := &unpacker{b: snapshot[len(snapshotFormat):n]}
	states := t.unpackStates(u)
	t.unpackColumns(u)
	for range u.count(MaxWorkers) {
		t.unpackWorker(u)
	}
	for i := range t.columns {
		if c := &t.columns[i]; c.size > 0 && c.w == nil {
			u.bad = true
		} else if c.size == 0 {
			t.free = append(t.free, i)
		}
	}
	t.unpackBlocks(u, states)
	if u.bad || len(u.b) > 0 {
		return nil, fmt.Errorf("%w: its parts contradict each other", ErrSnapshot)
	}
	t.publish()
	return t, nil
}

func (t *Table) unpackStates(u *unpacker) (numbers []uint32) {
	var sets []*set
	for range u.count(1 << 24) {
		words := make([]uint64, u.count(MaxWorkers/64))
		for i := range words {
			words[i] = u.u64()
		}
		sets = append(sets, t.states.intern(words))
	}
	numbers = append(numbers, 0)
	for range u.count(1 << 24) {
		var x [planes]*set
		for p := range x {
			n := u.uint()
			if n >= uint64(len(sets)) {
				u.bad = true
				return nil
			}
			x[p] = sets[n]
		}
		numbers = append(numbers, t.states.id(x))
	}
	t.states.next = max(2*t.states.used, minStates)
	return numbers
}

func (t *Table) unpackColumns(u *unpacker) {
	for range u.count(MaxWorkers) {
		c := column{size: int(u.uint())}
		if c.size < 0 || c.size > MaxBlockSize {
			u.bad = true
		}
		if c.size > 0 && !u.bad {
			c.holes = new(atomic.Int64)
			c.holes.Store(int64(u.uint()))
			for range u.count(1 << 32) {
				if c.more == nil {
					c.more = map[uint64]uint32{}
				}
				k := u.uint()
				c.more[k] = uint32(u.uint())
			}
		}
		t.columns = append(t.columns, c)
	}
}

func (t *Table) unpackWorker(u *unpacker) {
	w := &worker{table: t, name: u.text(), groups: map[int]*group{}}
	w.options = Options{Removals: Removals(u.uint()), GPUBlocks: int(u.uint())}
	if t.workers[w.name] != nil {
		u.bad = true
	}
	for range u.count(MaxGroups) {
		n := int(u.uint())
		g := &group{column: -1}
		w.groups[n] = g
		if g.main = u.uint() == 1; !g.main || u.bad {
			continue
		}
		g.blockSize, g.column = int(u.uint()), int(u.uint())-1
		if g.column >= len(t.columns) || g.column < -1 || g.column >= 0 && (t.columns[g.column].w != nil || t.columns[g.column].size != g.blockSize) {
			u.bad = true
			return
		}
		if g.column >= 0 {
			c := &t.columns[g.column]
			c.name, c.w = w.name, w
			w.columns = append(w.columns, g.column)
		}
		for m := range g.media {
			md := &g.media[m]
			md.hashes, md.blocks = int(u.uint()), int(u.uint())
			w.blocks[m] += md.hashes
			for range u.count(1 << 32) {
				engine, own, n := u.u64(), kvhash.Hash(u.u64()), u.uint()
				w.list(md, engine, odd{own, int32(n >> 1)}, false)
				md.names[own] = names{odd: md.names[own].odd + 1, plain: n&1 != 0}
			}
		}
	}
	var d vllm.Decoder
	var b vllm.Batch
	if err := d.Decode([]byte(u.text()), &b); err != nil || len(b.Events) > maxOrphans {
		u.bad = true
		return
	}
	for i := range b.Events {
		w.adopt(&b.Events[i], new(Result))
	}
	t.workers[w.name] = w
}

func (t *Table) unpackBlocks(u *unpacker, states []uint32) {
	var tags [1 << segmentBits][]byte
	for i := range t.blocks.segments {
		s := &t.blocks.segments[i]
		s.last = uint32(u.count(1<<localBits - 1))
		chunks := make([]*[chunkSize]block, (s.last+chunkSize)>>chunkBits)
		for k := range chunks {
			chunks[k] = new([chunkSize]block)
		}
		s.chunks.Store(&chunks)
		tags[i] = make([]byte, s.last+1)
		for local := uint32(1); local <= s.last; local++ {
			b := s.at(local)
			if tags[i][local] = u.byte(); tags[i][local] == 0 {
				b.link, s.free = s.free, local
				continue
			}
			var v [5]uint32
			for k := range v {
				v[k] = u.u32()
			}
			if u.bad || v[2] == 0 || int(v[2]) >= len(states) || int(v[1]>>(32-segmentBits)) != i {
				u.bad = true
				return
			}
			*b = block{lo: v[0], hi: v[1], state: states[v[2]], link: v[3], engine: v[4]}
			t.states.refs[b.state]++
			s.live++
			if b.engine != 0 {
				t.blocks.engines[b.link/goneRef].live++
			}
		}
	}
	for i := range t.blocks.engines {
		if e := &t.blocks.engines[i]; e.live > 0 {
			e.slots, e.used = make([]uint32, size(e.live, 0)), e.live
		}
	}
	for i := range t.blocks.segments {
		s := &t.blocks.segments[i]
		slots := make([]uint32, size(s.live, 0))
		for local := uint32(1); local <= s.last; local++ {
			b := s.at(local)
			if b.state == 0 {
				continue
			}
			_, home, tag := place(uint64(b.own()))
			insert(slots, home, tag<<localBits|local)
			if b.engine != 0 {
				insert(t.blocks.engines[b.link/goneRef].slots, b.engine, uint32(tags[i][local]-1)*goneRef|uint32(newRef(i, local)))
			}
			// What nobody holds may follow a block that has gone.
			if p := b.parent(); p != 0 && p != start && len(t.states.get(b.state).any.words) > 0 &&
				(p.local() == 0 || p.local() > t.blocks.segments[p.segment()].last || t.blocks.at(p).state == 0) {
				u.bad = true
				return
			}
		}
		if s.used = s.live; s.live > 0 {
			s.table.Store(&slots)
		}
	}
}

// packer writes the parts of a snapshot.
type packer struct{ b []byte }

func (w *packer) uint(v uint64) { w.b = binary.AppendUvarint(w.b, v) }

func (w *packer) u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(w.b, v) }

func (w *packer) text(s string) {
	w.uint(uint64(len(s)))
	w.b = append(w.b, s...)
}

// unpacker reads them again. After a fault it is bad and returns zeros.
type unpacker struct {
	b   []byte
	bad bool
}

func (u *unpacker) take(n int) []byte {
	if n > len(u.b) {
		u.bad, u.b = true, nil
	}
	if u.bad {
		return make([]byte, 8)[:min(n, 8)]
	}
	v := u.b[:n]
	u.b = u.b[n:]
	return v
}

func (u *unpacker) byte() byte { return u.take(1)[0] }

func (u *unpacker) u32() uint32 { return binary.LittleEndian.Uint32(u.take(4)) }

func (u *unpacker) u64() uint64 { return binary.LittleEndian.Uint64(u.take(8)) }

func (u *unpacker) uint() uint64 {
	v, n := binary.Uvarint(u.b)
	if n <= 0 {
		u.bad, u.b = true, nil
		return 0
	}
	u.b = u.b[n:]
	return v
}

// count reads how many parts follow; each has at least a byte.
func (u *unpacker) count(limit int) int {
	n := u.uint()
	if n > uint64(limit) || n > uint64(len(u.b)) {
		u.bad = true
		return 0
	}
	return int(n)
}

func (u *unpacker) text() string { return string(u.take(u.count(1 << 30))) }
