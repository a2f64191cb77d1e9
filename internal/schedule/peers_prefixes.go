package schedule

import (
	"container/list"

	"github.com/kinference/kinference/internal/kvhash"
)

// prefixes remembers the blocks that were sent to one worker, the least recently
// sent forgotten first.
type prefixes struct {
	most   int
	blocks map[kvhash.Hash]*list.Element
	recent *list.List // of sentBlock, newest first
	clock  *int
}

type sentBlock struct {
	hash kvhash.Hash
	at   int
}

func newPrefixes(most int) *prefixes {
	return &prefixes{most: most, blocks: map[kvhash.Hash]*list.Element{}, recent: list.New(), clock: new(int)}
}

func (p *prefixes) len() int { return len(p.blocks) }

// match is how many leading blocks of a prompt are remembered.
func (p *prefixes) match(hashes []kvhash.Hash) int {
	n := 0
	for n < len(hashes) && p.blocks[hashes[n]] != nil {
		n++
	}
	return n
}

// last tells when the n-th block of a prompt was sent, by the clock that counts
// what was added.
func (p *prefixes) last(hashes []kvhash.Hash, n int) int {
	if n == 0 {
		return 0
	}
	return p.blocks[hashes[n-1]].Value.(*sentBlock).at
}

// add remembers a prompt; its first blocks are forgotten last.
func (p *prefixes) add(hashes []kvhash.Hash) {
	*p.clock++
	for i := len(hashes) - 1; i >= 0; i-- {
		if el := p.blocks[hashes[i]]; el != nil {
			el.Value.(*sentBlock).at = *p.clock
			p.recent.MoveToFront(el)
			continue
		}
		p.blocks[hashes[i]] = p.recent.PushFront(&sentBlock{hashes[i], *p.clock})
	}
	for len(p.blocks) > p.most {
		el := p.recent.Back()
		delete(p.blocks, el.Value.(*sentBlock).hash)
		p.recent.Remove(el)
	}
}
