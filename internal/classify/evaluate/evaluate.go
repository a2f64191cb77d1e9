package evaluate

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"strings"

	"github.com/kinference/kinference/internal/classify"
)

// Settings of a run.
type Settings struct {
	// Misses writes up to so many missed and false findings of each kind to
	// MissesTo. They show text of the files: for labelled data only.
	Misses   int
	MissesTo io.Writer
	// Keep chooses rows; nil: all.
	Keep func(*Row) bool
}

// kindCount is what is known of one kind in one source.
type kindCount struct {
	gold, same, any int // spans, found as this kind, found as any kind
	found, right    int // findings, those that overlap a span of this kind
	baseline        int
}

type docCount struct{ positive, caught, caughtStrict, negative, alarms, alarmsStrict, baseCaught, baseAlarms int }

// sourceReport gathers one source of PII rows.
type sourceReport struct {
	kinds map[string]*kindCount
	docs  docCount
}

// Report is the outcome of Run.
type Report struct {
	Rows, Bad  int
	pii        map[string]*sourceReport
	complexity map[string][]example
	length     map[string][]example
	low        map[string][2]int // prompts called low, and those of them that are hard
	hard       map[string][2]int
	injection  map[string][]float64
	alarm      map[string]int
	benign     []float64
	benignPII  map[string]*docCount
	Bytes      int
	CPU        float64 // microseconds a KB
}

// Run measures c on rows.
func Run(ctx context.Context, c *classify.Classifier, rows []Row, set Settings) (*Report, error) {
	r := &Report{pii: map[string]*sourceReport{}, complexity: map[string][]example{}, length: map[string][]example{}, injection: map[string][]float64{}, low: map[string][2]int{}, hard: map[string][2]int{},
		benignPII: map[string]*docCount{}, alarm: map[string]int{}}
	misses := map[string]int{}
	spent := 0.0
	for i := range rows {
		row := &rows[i]
		if set.Keep != nil && !set.Keep(row) {
			continue
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		r.Rows++
		text := row.Content()
		before := cpu()
		res := c.Classify(ctx, classify.Input{Parts: []classify.Part{{Role: classify.RoleUser, Text: text}}})
		spent += cpu() - before
		r.Bytes += len(text)
		switch {
		case row.Spans != nil:
			r.row(c, row, &res, set, misses)
		case row.Label != nil:
			t := res.Tag("injection")
			if *row.Label == 1 {
				name := row.Source
				r.injection[name] = append(r.injection[name], float64(t.Score))
				if t.State == classify.True {
					r.alarm[name]++
				}
			} else {
				r.benign = append(r.benign, float64(t.Score))
			}
		default:
			r.other(row, &res)
			if set.MissesTo != nil {
				for _, x := range append(res.Tag("pii-detected").Reasons, res.Tag("injection").Reasons...) {
					if misses["benign "+x.Kind]++; misses["benign "+x.Kind] <= set.Misses {
						fmt.Fprintf(set.MissesTo, "benign %s %.2f %q in %q\n", x.Kind, x.Score, text[x.Offset:x.Offset+x.Length], text[max(0, x.Offset-60):min(len(text), x.Offset+x.Length+40)])
					}
				}
			}
		}
	}
	if r.Bytes > 0 {
		r.CPU = spent / float64(r.Bytes) * 1024
	}
	return r, nil
}

// other takes a prompt without spans: complexity, and a benign one for the rest.
func (r *Report) other(row *Row, res *classify.Result) {
	inj := res.Tag("injection")
	r.benign = append(r.benign, float64(inj.Score))
	if inj.State == classify.True {
		r.alarm["benign: "+row.Source]++
	}
	d := r.benignPII[row.Source]
	if d == nil {
		d = &docCount{}
		r.benignPII[row.Source] = d
	}
	d.negative++
	if res.Tag("pii-detected").State == classify.True {
		d.alarms++
	}
	hard, ok := hardness(row)
	if !ok {
		return
	}
	s := row.Source
	r.complexity[s] = append(r.complexity[s], example{float64(res.Complexity["score"]), hard})
	r.length[s] = append(r.length[s], example{float64(len(row.Content())), hard})
	n := r.hard[s]
	n[0]++
	if hard {
		n[1]++
	}
	r.hard[s] = n
	if res.Tag("complexity-low").State == classify.True {
		n := r.low[s]
		n[0]++
		if hard {
			n[1]++
		}
		r.low[s] = n
	}
}

// hardness is whether a small model fails: fewer than half of many models are
// right, or the weaker one of two is wrong.
func hardness(row *Row) (hard, ok bool) {
	if row.SolveRate != nil {
		return *row.SolveRate < 0.5, true
	}
	if len(row.ModelScores) == 0 {
		return false, false
	}
	for name, v := range row.ModelScores {
		l := strings.ToLower(name)
		if strings.Contains(l, "mixtral") || strings.Contains(l, "weak") {
			return v < 0.5, true
		}
	}
	sum := 0.0
	for _, v := range row.ModelScores {
		sum += v
	}
	return sum/float64(len(row.ModelScores)) < 0.5, true
}

// Hard is hardness, for the trainer.
func Hard(row *Row) (hard, ok bool) { return hardness(row) }

func (r *Report) row(c *classify.Classifier, row *Row, res *classify.Result, set Settings, misses map[string]int) {
	s := r.pii[row.Source]
	if s == nil {
		s = &sourceReport{kinds: map[string]*kindCount{}}
		r.pii[row.Source] = s
	}
	text := row.Content()
	gs := goldOf(row)
	fs := findings(res, nil)
	kind := func(k string) *kindCount {
		if s.kinds[k] == nil {
			s.kinds[k] = &kindCount{}
		}
		return s.kinds[k]
	}
	tell := func(what, k string, a, b int) {
		if set.MissesTo == nil || misses[what+k] >= set.Misses {
			return
		}
		misses[what+k]++
		fmt.Fprintf(set.MissesTo, "%s %s %q in %q\n", what, k, text[a:min(b, len(text))], text[max(0, a-70):min(len(text), b+50)])
	}
	base := baseline(text)
	for _, g := range gs {
		k := kind(g.kind)
		k.gold++
		same, any := false, false
		for _, f := range fs {
			if f.start < g.end && g.start < f.end {
				any = true
				same = same || f.kind == g.kind
			}
		}
		if same {
			k.same++
		} else {
			tell("missed", g.kind, g.start, g.end)
		}
		if any {
			k.any++
		}
		if overlaps(base[g.kind], g.start, g.end) {
			k.baseline++
		}
	}
	for _, f := range fs {
		k := kind(f.kind)
		k.found++
		right := false
		for _, g := range gs {
			right = right || f.start < g.end && g.start < f.end && g.kind == f.kind
		}
		if right {
			k.right++
		} else {
			tell("false", f.kind, f.start, f.end)
		}
	}
	strict := c.Classify(context.Background(), classify.Input{Profile: classify.ProfileStrict, Parts: []classify.Part{{Role: classify.RoleUser, Text: text}}})
	found, foundStrict := res.Tag("pii-detected").State == classify.True, strict.Tag("pii-detected").State == classify.True
	d := &s.docs
	if len(gs) > 0 {
		d.positive++
		d.caught += count(found)
		d.caughtStrict += count(foundStrict)
		d.baseCaught += count(len(base) > 0)
		if !foundStrict {
			tell("missed-document", "", 0, min(len(text), 60))
		}
	} else {
		d.negative++
		d.alarms += count(found)
		d.alarmsStrict += count(foundStrict)
		d.baseAlarms += count(len(base) > 0)
		if foundStrict {
			for _, x := range strict.Tag("pii-detected").Reasons {
				tell("alarm", x.Kind, x.Offset, x.Offset+x.Length)
			}
		}
	}
}

func overlaps(list [][]int, a, b int) bool {
	return slices.ContainsFunc(list, func(m []int) bool { return m[0] < b && a < m[1] })
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func share(r Rate) string {
	if r.Of == 0 {
		return "–"
	}
	return fmt.Sprintf("%.3f (%.3f–%.3f)", r.Value(), r.Low, r.High)
}

// Write writes the report as tables of Markdown.
func (r *Report) Write(w io.Writer) {
	fmt.Fprintf(w, "%d rows, %d unreadable, %d bytes; %.1f µs of CPU a KB\n", r.Rows, r.Bad, r.Bytes, r.CPU)
	if len(r.pii) > 0 {
		fmt.Fprint(w, "\n| source | kind | spans | recall (95 %) | any kind | precision (95 %) | F2 | regex recall |\n|---|---|---|---|---|---|---|---|\n")
		for _, s := range keys(r.pii) {
			p := r.pii[s]
			for _, k := range keys(p.kinds) {
				c := p.kinds[k]
				re, pr := rate(c.same, c.gold), rate(c.right, c.found)
				f2 := "–"
				if c.gold > 0 && c.found > 0 && c.same > 0 {
					a, b := pr.Value(), re.Value()
					f2 = fmt.Sprintf("%.3f", 5*a*b/(4*a+b))
				}
				fmt.Fprintf(w, "| %s | %s | %d | %s | %s | %s | %s | %s |\n", s, k, c.gold, share(re), short(rate(c.any, c.gold)), share(pr), f2, short(rate(c.baseline, c.gold)))
			}
		}
		fmt.Fprint(w, "\n| source | documents with PII | recall, default | recall, strict | regex | without | false alarms, default | strict | regex |\n|---|---|---|---|---|---|---|---|---|\n")
		for _, s := range keys(r.pii) {
			d := r.pii[s].docs
			fmt.Fprintf(w, "| %s | %d | %s | %s | %s | %d | %s | %s | %s |\n", s, d.positive, share(rate(d.caught, d.positive)), share(rate(d.caughtStrict, d.positive)), short(rate(d.baseCaught, d.positive)),
				d.negative, share(rate(d.alarms, d.negative)), share(rate(d.alarmsStrict, d.negative)), short(rate(d.baseAlarms, d.negative)))
		}
	}
	if len(r.complexity) > 0 {
		fmt.Fprint(w, "\n| source | prompts | hard | AUC (95 %) | by length alone | called low | hard among low |\n|---|---|---|---|---|---|---|\n")
		for _, s := range keys(r.complexity) {
			e := r.complexity[s]
			lo, hi := bootstrap(e, auc)
			n, l := r.hard[s], r.low[s]
			fmt.Fprintf(w, "| %s | %d | %s | %.3f (%.3f–%.3f) | %.3f | %s | %s |\n", s, len(e), short(rate(n[1], n[0])), auc(e), lo, hi, auc(r.length[s]), short(rate(l[0], n[0])), short(rate(l[1], l[0])))
		}
	}
	if len(r.benignPII) > 0 {
		fmt.Fprint(w, "\n| prompts taken as without PII and injection | number | pii-detected | injection |\n|---|---|---|---|\n")
		for _, s := range keys(r.benignPII) {
			d := r.benignPII[s]
			fmt.Fprintf(w, "| %s | %d | %s | %s |\n", s, d.negative, share(rate(d.alarms, d.negative)), share(rate(r.alarm["benign: "+s], d.negative)))
		}
	}
	if len(r.injection) > 0 {
		slices.Sort(r.benign)
		t := math.Inf(1)
		if n := len(r.benign); n > 0 {
			t = r.benign[n-1-n/100]
		}
		fmt.Fprintf(w, "\n| source | attacks | tagged (95 %%) | at 1 %% false alarms on %d benign | AUC |\n|---|---|---|---|---|\n", len(r.benign))
		for _, s := range keys(r.injection) {
			hit := 0
			var e []example
			for _, v := range r.injection[s] {
				hit += count(v > t)
				e = append(e, example{v, true})
			}
			for _, v := range r.benign {
				e = append(e, example{v, false})
			}
			n := len(r.injection[s])
			fmt.Fprintf(w, "| %s | %d | %s | %s | %.3f |\n", s, n, share(rate(r.alarm[s], n)), share(rate(hit, n)), auc(e))
		}
	}
}

func short(r Rate) string {
	if r.Of == 0 {
		return "–"
	}
	return fmt.Sprintf("%.3f", r.Value())
}

func keys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}
