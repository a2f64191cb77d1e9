package memory

import "container/heap"

// queue orders names by time, like a sorted set of Redis: equal times by name.
type queue struct {
	at    map[string]int64
	items items // a superset of at: what does not agree with it is skipped
}

type item struct {
	at   int64
	name string
}

type items []item

func (s items) Len() int { return len(s) }
func (s items) Less(i, j int) bool {
	if s[i].at != s[j].at {
		return s[i].at < s[j].at
	}
	return s[i].name < s[j].name
}
func (s items) Swap(i, j int) { s[i], s[j] = s[j], s[i] }
func (s *items) Push(x any)   { *s = append(*s, x.(item)) }
func (s *items) Pop() any {
	last := (*s)[len(*s)-1]
	*s = (*s)[:len(*s)-1]
	return last
}

func (q *queue) set(name string, at int64) {
	if q.at == nil {
		q.at = map[string]int64{}
	}
	if q.at[name] == at {
		return
	}
	q.at[name] = at
	heap.Push(&q.items, item{at, name})
	if len(q.items) > 2*len(q.at)+64 {
		q.items = q.items[:0]
		for name, at := range q.at {
			q.items = append(q.items, item{at, name})
		}
		heap.Init(&q.items)
	}
}

// remove reports whether name was there.
func (q *queue) remove(name string) bool {
	_, ok := q.at[name]
	delete(q.at, name)
	return ok
}

// first is the earliest, false if there is none.
func (q *queue) first() (item, bool) {
	for len(q.items) > 0 {
		top := q.items[0]
		if at, ok := q.at[top.name]; ok && at == top.at {
			return top, true
		}
		heap.Pop(&q.items)
	}
	return item{}, false
}

// due removes and returns the earliest if it is not later than now.
func (q *queue) due(now int64) (string, bool) {
	top, ok := q.first()
	if !ok || top.at > now {
		return "", false
	}
	heap.Pop(&q.items)
	delete(q.at, top.name)
	return top.name, true
}
