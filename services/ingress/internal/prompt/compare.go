package prompt

import (
	"context"
	"slices"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// Comparison is how the token ids made here compare with a worker's.
type Comparison int

// The comparisons. Silent: nothing was compared, because the ids cannot be made
// here, or the worker refuses the request or has no route that tells.
const (
	Silent Comparison = iota
	Same
	Differs
)

// Compare makes the token ids of r with the tokenizer of p and has the worker at
// url make them. An error says that the worker could not be asked now.
func (m *Maker) Compare(ctx context.Context, r *openai.Request, p *catalog.Profile, url string) (Comparison, error) {
	m.mu.RLock()
	local := m.models[p.TokenizerPath]
	m.mu.RUnlock()
	ours := local.encode(r)
	if !ours.ok {
		return Silent, nil
	}
	for _, mode := range [...]Mode{Render, Tokenize} {
		theirs, status, err := query(ctx, m.set.Transport, mode, url, r, p)
		switch {
		case err == nil && slices.Equal(ours.ids, theirs):
			return Same, nil
		case err == nil:
			return Differs, nil
		case lacking(status):
			continue
		case status >= 400 && status < 500:
			return Silent, nil
		}
		return Silent, err
	}
	return Silent, nil
}

// Loaded reports whether the tokenizer in a folder is in use.
func (m *Maker) Loaded(path string) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	l := m.models[path]
	return l != nil && l.cache != nil
}
