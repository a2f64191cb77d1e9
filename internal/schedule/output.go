package schedule

// outputKey is whose output lengths are alike.
type outputKey struct{ tenant, model string }

// outputs are running means of output lengths: of each tenant and model, of
// each model for tenants that are new, and of all.
type outputs struct {
	all  mean
	keys map[outputKey]*mean
}

// mean is an exponential moving mean that begins as a plain one.
type mean struct {
	value float64
	n     int
}

func (m *mean) add(v float64) {
	m.n++
	m.value += max(0.05, 1/float64(m.n+1)) * (v - m.value)
}

const (
	// firstOutput is the length in tokens that is expected until outputs were
	// seen (docs/decisions/0004).
	firstOutput = 256
	// maxOutputs bounds the means: the tenants beyond share those of the models.
	maxOutputs = 8192
)

func newOutputs() outputs {
	return outputs{all: mean{value: firstOutput}, keys: map[outputKey]*mean{}}
}

func (o *outputs) add(k outputKey, tokens int) {
	v := float64(tokens)
	o.all.add(v)
	for _, k := range [...]outputKey{k, {"", k.model}} {
		m := o.keys[k]
		if m == nil {
			if len(o.keys) >= maxOutputs {
				continue
			}
			m = &mean{value: firstOutput}
			o.keys[k] = m
		}
		m.add(v)
		if k.tenant == "" {
			return
		}
	}
}

// expect is the expected number of output tokens, by what is known best.
func (o *outputs) expect(k outputKey, maxTokens int) float64 {
	v := o.all.value
	if m := o.keys[k]; m != nil && m.n > 2 {
		v = m.value
	} else if m := o.keys[outputKey{"", k.model}]; m != nil {
		v = m.value
	}
	if maxTokens > 0 {
		return min(v, float64(maxTokens))
	}
	return v
}
