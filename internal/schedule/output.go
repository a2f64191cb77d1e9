package schedule

// outputKey is whose output lengths are alike.
type outputKey struct{ tenant, model string }

// means are running means of what tenants and models differ in: of each tenant and
// model, of each model for tenants that are new, and of all.
type means struct {
	first float64 // what is expected until something was seen
	all   mean
	keys  map[outputKey]*mean
}

// outputs are means of output lengths in tokens.
type outputs struct{ means }

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

func newMeans(first float64) means {
	return means{first: first, all: mean{value: first}, keys: map[outputKey]*mean{}}
}

func newOutputs() outputs { return outputs{newMeans(firstOutput)} }

func (o *means) add(k outputKey, v float64) {
	o.all.add(v)
	for _, k := range [...]outputKey{k, {"", k.model}} {
		m := o.keys[k]
		if m == nil {
			if len(o.keys) >= maxOutputs {
				continue
			}
			m = &mean{value: o.first}
			o.keys[k] = m
		}
		m.add(v)
		if k.tenant == "" {
			return
		}
	}
}

// of is the mean by what is known best.
func (o *means) of(k outputKey) float64 {
	if m := o.keys[k]; m != nil && m.n > 2 {
		return m.value
	}
	if m := o.keys[outputKey{"", k.model}]; m != nil {
		return m.value
	}
	return o.all.value
}

// expect is the expected number of output tokens.
func (o *outputs) expect(k outputKey, maxTokens int) float64 {
	v := o.of(k)
	if maxTokens > 0 {
		return min(v, float64(maxTokens))
	}
	return v
}
