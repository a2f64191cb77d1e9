package tokens

import (
	"strings"
	"unicode"
)

// addedToken is an entry of added_tokens: text that is one token wherever it occurs, before any other rule.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// addedSet finds added tokens in text: leftmost first, the longest of those that start there.
type addedSet struct {
	tokens []addedToken
	first  [256]bool // bytes that start a token
	only   int       // the byte that starts every token, or -1
	nodes  [][]edge
	accept []int32 // token at a node, or -1
}

// edge leads from a node to the one that a byte makes of it. Nodes have few of them.
type edge struct {
	b  byte
	to int32
}

// follow returns the node that a byte leads to.
func (a *addedSet) follow(at int32, b byte) (next int32, ok bool) {
	for _, e := range a.nodes[at] {
		if e.b == b {
			return e.to, true
		}
	}
	return 0, false
}

func newAddedSet(tokens []addedToken) *addedSet {
	if len(tokens) == 0 {
		return nil
	}
	a := &addedSet{tokens: tokens, only: -1}
	node := func() int32 {
		a.nodes = append(a.nodes, nil)
		a.accept = append(a.accept, -1)
		return int32(len(a.nodes) - 1)
	}
	node()
	for i, t := range tokens {
		at := int32(0)
		for j := range len(t.Content) {
			b := t.Content[j]
			next, ok := a.follow(at, b)
			if !ok {
				next = node()
				a.nodes[at] = append(a.nodes[at], edge{b, next})
			}
			at = next
		}
		a.accept[at] = int32(i)
		a.first[t.Content[0]] = true
		a.only = int(t.Content[0])
	}
	for b, ok := range a.first {
		if ok && b != a.only {
			a.only = -1
			break
		}
	}
	return a
}

// next returns the first added token in s at or after from: s[start:end] is replaced by token, which is nil if there is none.
func (a *addedSet) next(s string, from int) (start, end int, token *addedToken) {
	for i := from; i < len(s); i++ {
		if a.only >= 0 {
			j := strings.IndexByte(s[i:], byte(a.only))
			if j < 0 {
				break
			}
			i += j
		} else if !a.first[s[i]] {
			continue
		}
		found, at := int32(-1), int32(0)
		for j := i; j < len(s); j++ {
			next, ok := a.follow(at, s[j])
			if !ok {
				break
			}
			at = next
			if a.accept[at] >= 0 {
				found, end = a.accept[at], j+1
			}
		}
		if found < 0 {
			continue
		}
		token = &a.tokens[found]
		start = i
		if token.LStrip {
			start = from + len(strings.TrimRightFunc(s[from:start], unicode.IsSpace))
		}
		if token.RStrip {
			end = len(s) - len(strings.TrimLeftFunc(s[end:], unicode.IsSpace))
		}
		return start, end, token
	}
	return len(s), len(s), nil
}
