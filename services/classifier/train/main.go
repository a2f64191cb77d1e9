// Command train learns the embedded weights of internal/classify: names and addresses from our own generator (and texts whose
// licence allows), complexity and injection from the labelled folder. Same seed and files, same weights.
//
//	go run ./services/classifier/train --data DIR --out internal/classify/data
//
// Nobody calls it at run time. It fails on a file that it cannot read.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/classify/corpus"
	"github.com/kinference/kinference/internal/classify/evaluate"
)

var (
	epochs = flag.Int("epochs", 4, "passes of the tagger")
	drop   = flag.Float64("drop", 0.3, "share of names learned without their words")
	margin = flag.Float64("margin", 2, "margin of names and addresses")
)

func main() {
	data := flag.String("data", "../shared/data/classifier", "folder of labelled files")
	out := flag.String("out", "internal/classify/data", "folder of the weights")
	what := flag.String("what", "tagger,heads", "what to train")
	docs := flag.Int("docs", 16000, "generated texts")
	seed := flag.Uint64("seed", 20261130, "seed of everything random")
	flag.Parse()
	if err := run(*data, *out, *what, *docs, *seed); err != nil {
		fmt.Fprintln(os.Stderr, "train:", err)
		os.Exit(1)
	}
}

func run(data, out, what string, n int, seed uint64) error {
	t := &trainer{data: data, out: out, seed: seed, hashes: map[string]string{}}
	if strings.Contains(what, "tagger") {
		if err := t.tagger(n); err != nil {
			return err
		}
	}
	if strings.Contains(what, "heads") {
		return t.heads()
	}
	return nil
}

type trainer struct {
	data, out string
	seed      uint64
	hashes    map[string]string
}

// read reads a labelled file and notes its hash.
func (t *trainer) read(name string) ([]evaluate.Row, error) {
	path := filepath.Join(t.data, name)
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(raw)
	t.hashes[name] = hex.EncodeToString(sum[:8])
	rows, _, err := evaluate.Read(path)
	return rows, err
}

// heldOut puts one in n of what has a name aside, by the name's hash.
func heldOut(name string, n uint32) bool { return evaluate.HeldOut(name, n) }

// tagger trains on generated texts, on the held-in half of Presidio's sentence
// templates (MIT) filled with our identities, on WNUT-17's held-in tweets
// (CC-BY-4.0), and on prompts in which no word of the lexicon of names stands.
func (t *trainer) tagger(n int) error {
	g, err := corpus.New(t.seed)
	if err != nil {
		return err
	}
	var docs []classify.TaggedDoc
	add := func(d corpus.Doc) {
		x := classify.TaggedDoc{Text: d.Text}
		for _, s := range d.Spans {
			switch s.Label {
			case "person":
				x.Persons = append(x.Persons, [2]int{s.Start, s.End})
			case "address":
				x.Addresses = append(x.Addresses, [2]int{s.Start, s.End})
			}
		}
		docs = append(docs, x)
	}
	for range n {
		add(g.Doc())
	}
	rows, err := t.read("pii_dev.jsonl")
	if err != nil {
		return err
	}
	templates := map[string]string{}
	tweets := 0
	for i := range rows {
		r := &rows[i]
		switch r.Source {
		case "presidio_generated_large":
			if !heldOut(r.Template, 3) {
				if _, ok := templates[r.Template]; !ok {
					if s := evaluate.Slots(r); s != "" {
						templates[r.Template] = s
					}
				}
			}
		case "wnut17_train":
			if !heldOut(r.Text, 5) {
				x := classify.TaggedDoc{Text: r.Text}
				for _, s := range evaluate.Gold(r) {
					if s.Kind == "person" {
						x.Persons = append(x.Persons, [2]int{s.Start, s.End})
					}
				}
				docs = append(docs, x)
				if len(x.Persons) > 0 {
					docs = append(docs, x)
				}
				tweets++
			}
		}
	}
	list := make([]string, 0, len(templates))
	for _, s := range templates {
		list = append(list, s)
	}
	slices.Sort(list)
	for range n / 4 {
		add(g.Case(g.Fill(list[rand.New(rand.NewPCG(t.seed, uint64(len(docs)))).IntN(len(list))])))
	}
	prompts, err := t.read("complexity_dev.jsonl")
	if err != nil {
		return err
	}
	names, err := nameWords()
	if err != nil {
		return err
	}
	plain := 0
	for i := range prompts {
		text := prompts[i].Content()
		if heldOut(text, 5) || len(text) > 3000 || mentions(text, names) {
			continue
		}
		docs = append(docs, classify.TaggedDoc{Text: text})
		plain++
	}
	fmt.Printf("tagger: %d texts, %d templates of Presidio, %d tweets, %d prompts\n", len(docs), len(list), tweets, plain)
	file, err := classify.TrainTagger(docs, classify.TaggerSettings{Epochs: *epochs, Seed: t.seed, Drop: *drop, Margin: float32(*margin), MarginNone: 1})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(t.out, "tagger.bin.gz"), file, 0o644)
}

func nameWords() (map[string]bool, error) {
	words, err := classify.Words()
	if err != nil {
		return nil, err
	}
	m := map[string]bool{}
	for _, w := range words {
		if (w.First || w.Last) && !w.Common {
			m[w.Text] = true
		}
	}
	return m, nil
}

// mentions reports whether a capitalised word of names stands in text.
func mentions(text string, names map[string]bool) bool {
	for w := range strings.FieldsFuncSeq(text, func(r rune) bool { return r != '\'' && (r < 'A' || r > 'Z' && r < 'a' || r > 'z' && r < 0x80) }) {
		if w[0] >= 'A' && w[0] <= 'Z' && names[strings.ToLower(strings.TrimSuffix(w, "'s"))] {
			return true
		}
	}
	return false
}

// heads trains complexity and injection, and calibrates on what is held out.
func (t *trainer) heads() error {
	complexity, err := t.read("complexity_dev.jsonl")
	if err != nil {
		return err
	}
	injection, err := t.read("injection_dev.jsonl")
	if err != nil {
		return err
	}
	var sets, held [3][]classify.Example
	put := func(k int, out bool, e classify.Example) {
		if out {
			held[k] = append(held[k], e)
		} else {
			sets[k] = append(sets[k], e)
		}
	}
	for i := range complexity {
		r := &complexity[i]
		out := evaluate.HeldOutComplexity(r)
		text := r.Content()
		if hard, ok := evaluate.Hard(r); ok {
			y := float32(0)
			if hard {
				y = 1
			}
			w := float32(1)
			if r.Source == "routellm_mmlu_dev" {
				w = 0.3 // one weak model says less than nine
			}
			put(0, out, classify.Example{Text: text, Label: y, Weight: w})
		} else {
			put(2, out, classify.Example{Text: text, Label: 0, Weight: 4})
		}
		put(1, out, classify.Example{Text: text, Label: 0})
	}
	for i := range injection {
		r := &injection[i]
		w := float32(1)
		if r.Source == "bipia_text_train" {
			w = 3
		}
		if r.Source == "cyberseceval_pi_dev" {
			w = 2
		}
		put(1, evaluate.HeldOutInjection(r), classify.Example{Text: r.Content(), Label: 1, Weight: w})
	}
	g, err := corpus.New(t.seed + 1)
	if err != nil {
		return err
	}
	for i := range 4000 {
		put(2, i%5 == 0, classify.Example{Text: g.Easy(), Label: 0})
		put(2, i%5 == 0, classify.Example{Text: g.Demanding(), Label: 1})
	}
	for i := range 5000 {
		put(1, i%5 == 0, classify.Example{Text: g.Benign(), Label: 0})
		if i < 3000 {
			put(1, i%5 == 0, classify.Example{Text: g.Attack(), Label: 1})
		}
		if i < 2500 {
			put(1, i%5 == 0, classify.Example{Text: g.Doc().Text, Label: 0})
		}
	}
	set := classify.HeadSettings{Epochs: [3]int{10, 8, 6}, Seed: t.seed, Rate: [3]float32{0.03, 0.2, 0.1}, Decay: [3]float32{1e-2, 1e-5, 1e-5}, Demand: 0.25, DenseRate: 0.02, Trained: t.hashes,
		Calibration: classify.Calibration{Raw: []float32{-8, 8}, Probability: []float32{0, 1}, Low: 0.3, High: 0.6, Band: 0.02}}
	write := func() error {
		w, p, err := classify.TrainHeads(sets, set)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(t.out, "heads.bin.gz"), w, 0o644); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(t.out, "heads.json"), append(p, '\n'), 0o644); err != nil {
			return err
		}
		return classify.Use(nil, w, p)
	}
	if err := write(); err != nil {
		return err
	}
	// The threshold lets at most one in a hundred held-out benign texts pass for an attack; the calibration is isotonic, on held-out prompts.
	var benign []float64
	for _, e := range held[1] {
		if e.Label == 0 {
			_, v, err := classify.RawScores(e.Text)
			if err != nil {
				return err
			}
			benign = append(benign, float64(v))
		}
	}
	slices.Sort(benign)
	set.InjectionThreshold = float32(benign[len(benign)-1-len(benign)/150])
	var scored []evaluate.Outcome
	for _, e := range held[0] {
		c, _, err := classify.RawScores(e.Text)
		if err != nil {
			return err
		}
		scored = append(scored, evaluate.Outcome{Raw: float64(c), Failed: e.Label > 0.5})
	}
	for i, e := range held[2] {
		if i%4 != 0 || e.Weight > 0 {
			continue
		}
		c, _, err := classify.RawScores(e.Text)
		if err != nil {
			return err
		}
		scored = append(scored, evaluate.Outcome{Raw: float64(c), Failed: e.Label > 0.5})
	}
	set.Calibration = evaluate.Calibrate(scored)
	raw, err := os.ReadFile(filepath.Join(t.out, "heads.json"))
	if err != nil {
		return err
	}
	// Only what was decided changes: the weights stay as they were trained.
	var params map[string]any
	if err := json.Unmarshal(raw, &params); err != nil {
		return err
	}
	params["InjectionThreshold"], params["Calibration"] = set.InjectionThreshold, set.Calibration
	if raw, err = json.MarshalIndent(params, "", " "); err != nil {
		return err
	}
	fmt.Printf("heads: %d/%d/%d examples, threshold %.2f, %d knots\n", len(sets[0]), len(sets[1]), len(sets[2]), set.InjectionThreshold, len(set.Calibration.Raw))
	return os.WriteFile(filepath.Join(t.out, "heads.json"), append(raw, '\n'), 0o644)
}
