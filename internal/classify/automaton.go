package classify

// automaton finds many keywords in one pass (Aho and Corasick, 1975), in any
// case of ASCII letters. Bytes that no keyword has share one class, so that the
// table stays small enough for the second-level cache.
type automaton struct {
	class   [256]uint8
	classes int
	next    []int32 // state × class; ≥ 0
	out     [][]int32
}

func lowerByte(b byte) byte {
	if 'A' <= b && b <= 'Z' {
		return b | 0x20
	}
	return b
}

// newAutomaton builds one for keywords; empty ones are never found.
func newAutomaton(keywords []string) *automaton {
	a := &automaton{classes: 1}
	for _, k := range keywords {
		for i := range len(k) {
			if b := lowerByte(k[i]); a.class[b] == 0 {
				a.class[b] = uint8(min(a.classes, 255))
				a.classes++
			}
		}
	}
	for b := range 256 {
		a.class[b] = a.class[lowerByte(byte(b))]
	}
	row := func() int32 {
		n := len(a.next) / a.classes
		for range a.classes {
			a.next = append(a.next, -1)
		}
		a.out = append(a.out, nil)
		return int32(n)
	}
	row()
	for id, k := range keywords {
		if k == "" {
			continue
		}
		s := int32(0)
		for i := range len(k) {
			at := int(s)*a.classes + int(a.class[k[i]])
			if a.next[at] < 0 {
				n := row()
				a.next[at] = n
			}
			s = a.next[at]
		}
		a.out[s] = append(a.out[s], int32(id))
	}
	fail := make([]int32, len(a.out))
	var queue []int32
	for c := range a.classes {
		if n := a.next[c]; n > 0 {
			queue = append(queue, n)
		} else {
			a.next[c] = 0
		}
	}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		a.out[s] = append(a.out[s], a.out[fail[s]]...)
		for c := range a.classes {
			at := int(s)*a.classes + c
			other := a.next[int(fail[s])*a.classes+c]
			if n := a.next[at]; n >= 0 {
				fail[n] = other
				queue = append(queue, n)
			} else {
				a.next[at] = other
			}
		}
	}
	return a
}

// find calls hit with each keyword and the offset of its end.
func (a *automaton) find(text []byte, hit func(id int32, end int)) {
	s := int32(0)
	next, classes := a.next, int32(a.classes)
	for i, b := range text {
		s = next[s*classes+int32(a.class[b])]
		if o := a.out[s]; o != nil {
			for _, id := range o {
				hit(id, i+1)
			}
		}
	}
}
