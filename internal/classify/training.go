package classify

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
)

// Word is a word of the lexicon, for generators of text.
type Word struct {
	Text                       string
	First, Last, Place, Common bool
}

// Words lists the lexicon's file.
func Words() ([]Word, error) {
	z, err := gzip.NewReader(bytes.NewReader(lexiconFile))
	if err != nil {
		return nil, fmt.Errorf("lexicon: %w", err)
	}
	var out []Word
	s := bufio.NewScanner(z)
	for s.Scan() {
		w, f, _ := bytes.Cut(s.Bytes(), []byte("\t"))
		has := func(b byte) bool { return bytes.IndexByte(f, b) >= 0 }
		out = append(out, Word{string(w), has('f'), has('l'), has('g'), has('w') || has('W')})
	}
	return out, s.Err()
}

// Card reports whether digits are those of a payment card.
func Card(d []byte) bool { return len(d) >= 12 && len(d) <= 19 && luhn(d) && cardNetwork(d) }

// IBAN reports whether s, without spaces, is a valid IBAN.
func IBAN(s []byte) bool { return len(s) > 4 && ibanLengths[string(s[:2])] == len(s) && ibanValid(s) }

// IBANLengths by country.
func IBANLengths() map[string]int { return maps.Clone(ibanLengths) }

// IDKinds names the kinds of identity numbers, and whether a checksum protects them.
func IDKinds() map[string]bool {
	m := map[string]bool{}
	for i := range digitIDs {
		m[digitIDs[i].name] = !digitIDs[i].needsContext
	}
	for i := range letterIDs {
		m[letterIDs[i].name] = !letterIDs[i].needsContext && letterIDs[i].name != "in-pan" && letterIDs[i].name != "mx-rfc" && letterIDs[i].name != "uk-nino" && letterIDs[i].name != "us-mbi"
	}
	return m
}

// IDWords are the words that announce a kind of identity number.
func IDWords(kind string) string { return idContext[kind] }

// GenerateID draws a valid identity number of a kind, without signs between its
// digits; empty if there is no such kind.
func GenerateID(kind string, r *rand.Rand) string {
	for i := range digitIDs {
		id := &digitIDs[i]
		if id.name != kind || kind == "fi-hetu" {
			continue
		}
		for {
			n := id.min + r.IntN(id.max-id.min+1)
			d := make([]byte, n)
			for k := range d {
				d[k] = '0' + byte(r.IntN(10))
			}
			if kind == "ch-ahv" {
				copy(d, "756")
			}
			if !same(d) && id.valid(d) {
				return string(d)
			}
		}
	}
	for i := range letterIDs {
		id := &letterIDs[i]
		if id.name != kind {
			continue
		}
		for {
			s := []byte(id.form)
			for k, f := range s {
				switch {
				case f == '9', f == 'X' && r.IntN(10) > 0:
					s[k] = '0' + byte(r.IntN(10))
				case f == 'A' || f == 'X':
					s[k] = 'A' + byte(r.IntN(26))
				case f == 's':
					s[k] = "+-A"[r.IntN(3)]
				case f >= 'a':
					s[k] = f - 0x20
				}
			}
			if kind == "it-cf" { // the letters of a month are few
				s[8] = "ABCDEHLMPRST"[r.IntN(12)]
			}
			if id.valid(s) {
				return string(s)
			}
		}
	}
	return ""
}

// TaggedDoc is a text with the stretches that are names and addresses, in bytes.
type TaggedDoc struct {
	Text               string
	Persons, Addresses [][2]int
}

// TaggerSettings of a training.
type TaggerSettings struct {
	Epochs int
	Seed   uint64
	// Drop is the share of names that are learned without their words.
	Drop float64
	// Margin by which the right tag must win: of names and addresses, of other tokens.
	Margin, MarginNone float32
}

// prepare tokenises a text as a scan does.
func (s *scan) prepare(text string) {
	v, _ := s.norm.normalise([]byte(text), 0)
	s.view, s.text = v, v.text
	var scripts [scriptCount]int32
	s.toks = tokenise(s.toks[:0], s.text, s.m.lexicon, &scripts)
	s.pairs()
	s.res = &partResult{}
}

// TrainTagger learns names and addresses, and returns the file of weights.
func TrainTagger(docs []TaggedDoc, set TaggerSettings) ([]byte, error) {
	m, err := load()
	if err != nil {
		return nil, err
	}
	type weights [tagCount]float32
	size := 1 << taggerBits
	w, acc, last := make([]weights, size), make([]weights, size), make([]int32, size)
	now := int32(1)
	bump := func(x uint32, tag uint8, by float32) {
		for k := range tagCount {
			acc[x][k] += w[x][k] * float32(now-last[x])
		}
		last[x] = now
		w[x][tag] += by
	}
	r := rand.New(rand.NewPCG(set.Seed, 7))
	s := &scan{m: m}
	order := r.Perm(len(docs))
	var f [taggerFeatures]uint32
	for range set.Epochs {
		r.Shuffle(len(order), func(a, b int) { order[a], order[b] = order[b], order[a] })
		for _, di := range order {
			d := &docs[di]
			s.prepare(d.Text)
			mode := s.letterCase()
			prev, prev2 := uint32(0), uint32(0)
			for i := range s.toks {
				a, b := s.view.span(int(s.toks[i].start), int(s.toks[i].end))
				gold := uint8(tagNone)
				in := func(list [][2]int) bool {
					return slices.ContainsFunc(list, func(p [2]int) bool { return a < p[1] && p[0] < b })
				}
				if in(d.Persons) {
					gold = tagPerson
				} else if in(d.Addresses) {
					gold = tagAddress
				}
				best := uint8(tagNone)
				if mayName(&s.toks[i], prev) {
					drop := gold == tagPerson && r.Float64() < set.Drop
					k := s.tagFeatures(i, mode, prev, prev2, drop, &f)
					var sum weights
					for _, x := range f[:k] {
						for c := range sum {
							sum[c] += w[x][c]
						}
					}
					margin := set.Margin
					if gold == tagNone {
						margin = set.MarginNone
					}
					rival := (gold + 1) % tagCount
					for c := uint8(0); c < tagCount; c++ {
						if sum[c] > sum[best] {
							best = c
						}
						if c != gold && sum[c] > sum[rival] {
							rival = c
						}
					}
					if sum[gold] < sum[rival]+margin {
						for _, x := range f[:k] {
							bump(x, gold, 1)
							bump(x, rival, -1)
						}
					}
				}
				now++
				// Half of the time the tags before are the right ones: early mistakes must not teach.
				prev2 = prev
				if r.IntN(2) == 0 {
					prev = uint32(gold)
				} else {
					prev = uint32(best)
				}
			}
		}
	}
	most := make([]float64, 0, size)
	for x := range w {
		for k := range tagCount {
			acc[x][k] += w[x][k] * float32(now-last[x])
			acc[x][k] /= float32(now)
			if acc[x][k] != 0 {
				most = append(most, math.Abs(float64(acc[x][k])))
			}
		}
	}
	slices.Sort(most)
	top := float32(most[len(most)-1-len(most)/1000])
	scale := top / 127
	raw := binary.BigEndian.AppendUint32(nil, math.Float32bits(scale))
	for x := range acc {
		for k := range 4 {
			v := int8(0)
			if k < tagCount {
				v = quantise(acc[x][k], scale)
			}
			raw = append(raw, byte(v))
		}
	}
	return zip(raw)
}

func quantise(x, scale float32) int8 {
	return int8(max(-127, min(127, math.Round(float64(x/scale)))))
}

func zip(raw []byte) ([]byte, error) {
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(raw); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Example is a text with a label in 0..1 of one head.
type Example struct {
	Text   string
	Label  float32
	Weight float32
}

// HeadSettings of a training.
type HeadSettings struct {
	// Epochs, Rate and Decay of each head: difficulty, injection, demand.
	Epochs [3]int
	Seed   uint64
	Rate   [3]float32
	Decay  [3]float32
	// DenseRate is that of dense features.
	DenseRate float32
	// Demand is the weight of demand beside difficulty in complexity.
	Demand float32
	// InjectionThreshold, Calibration: what is decided on held-out data.
	InjectionThreshold float32
	Calibration        Calibration
	Trained            map[string]string
}

// TrainHeads learns the heads, and returns the files of weights and parameters.
// Difficulty and demand see a whole text, injection its most suspicious window.
func TrainHeads(sets [3][]Example, set HeadSettings) (weightsFile, paramsFile []byte, err error) {
	m, err := load()
	if err != nil {
		return nil, nil, err
	}
	p := headParams{Demand: set.Demand, InjectionThreshold: set.InjectionThreshold, Calibration: set.Calibration, Trained: set.Trained}
	out := make([][4]int8, 1<<headBits)
	s := &scan{m: m}
	r := rand.New(rand.NewPCG(set.Seed, 11))
	for k := range headCount {
		w := make([]float32, 1<<headBits)
		dense := make([]float32, denseCount)
		bias := float32(0)
		// Texts are tokenised once; tokens of hashed features are kept.
		type sample struct {
			grams [][gramsPerToken]uint32
			dense [denseCount]float32
			y, w  float32
		}
		var data []sample
		for _, e := range sets[k] {
			s.prepare(e.Text)
			s.features(&[scriptCount]int32{}, true)
			x := sample{y: e.Label, w: e.Weight}
			if x.w == 0 {
				x.w = 1
			}
			s.res.feat.bytes = len(e.Text)
			s.res.feat.dense(&x.dense)
			for i := range s.toks {
				var g [gramsPerToken]uint32
				s.grams(i, &g)
				x.grams = append(x.grams, g)
			}
			if len(x.grams) > 0 {
				data = append(data, x)
			}
		}
		sumOf := func(g [][gramsPerToken]uint32) float32 {
			var sum float32
			for _, t := range g {
				for _, x := range t {
					sum += w[x]
				}
			}
			return sum
		}
		order := r.Perm(len(data))
		rate := set.Rate[k]
		// Adagrad: rare words learn faster.
		grad := make([]float32, 1<<headBits)
		for range set.Epochs[k] {
			r.Shuffle(len(order), func(a, b int) { order[a], order[b] = order[b], order[a] })
			for _, i := range order {
				x := &data[i]
				g := x.grams
				if k == headInjection {
					best, at, end := float32(math.Inf(-1)), 0, len(g)
					for from := 0; from < len(g); from += injectionStride {
						to := min(from+injectionWindow, len(g))
						if v := sumOf(g[from:to]) / sqrt(float32(to-from)); v > best {
							best, at, end = v, from, to
						}
						if to == len(g) {
							break
						}
					}
					g = g[at:end]
				}
				n := sqrt(float32(len(g)))
				z := bias + sumOf(g)/n
				if k != headInjection {
					for j := range dense {
						z += dense[j] * x.dense[j]
					}
				}
				e := (x.y - sigmoid(z)) * x.w
				step := e / n
				for _, t := range g {
					for _, h := range t {
						d := step - set.Decay[k]*w[h]
						if k == headDifficulty { // few texts, many rare words: those must not be learned by heart
							w[h] += rate * d
							continue
						}
						grad[h] += d * d
						w[h] += rate * d / (0.1 + sqrt(grad[h]))
					}
				}
				bias += rate * 0.05 * e
				if k != headInjection {
					for j := range dense {
						dense[j] += set.DenseRate * e * x.dense[j]
					}
				}
			}
			rate *= 0.9
		}
		top := float32(0)
		all := make([]float64, 0, len(w))
		for _, v := range w {
			if v != 0 {
				all = append(all, math.Abs(float64(v)))
			}
		}
		slices.Sort(all)
		if len(all) > 0 {
			top = float32(all[len(all)-1-len(all)/2000])
		}
		p.Scale[k], p.Bias[k] = max(top, 1e-6)/127, bias
		for i, v := range w {
			out[i][k] = quantise(v, p.Scale[k])
		}
		if k != headInjection {
			p.Dense[k] = dense
		}
	}
	raw := make([]byte, 0, 4<<headBits)
	for i := range out {
		for k := range 4 {
			raw = append(raw, byte(out[i][k]))
		}
	}
	if weightsFile, err = zip(raw); err != nil {
		return nil, nil, err
	}
	paramsFile, err = json.MarshalIndent(&p, "", " ")
	return weightsFile, paramsFile, err
}

// Use replaces the embedded weights, in this process and before the first New:
// the trainer measures what it has made. Nil leaves a file as it is.
func Use(tagger, headWeights, headParams []byte) error {
	if tagger != nil {
		taggerFile = tagger
	}
	if headWeights != nil {
		headsFile, headsJSON = headWeights, headParams
	}
	m, err := load()
	if err != nil {
		return err
	}
	if m.tagger, err = loadTagger(); err != nil {
		return err
	}
	m.heads, err = loadHeads()
	return err
}

// RawScores are the heads' scores of a text before calibration: of complexity
// and of injection.
func RawScores(text string) (complexity, injection float32, err error) {
	m, err := load()
	if err != nil {
		return 0, 0, err
	}
	s := &scan{m: m}
	res := s.part(text, RoleUser, nil)
	p := min(max(res.feat.injection, 1e-6), 1-1e-6)
	return m.rawComplexity(&res.feat), float32(math.Log(float64(p/(1-p)))) + m.heads.InjectionThreshold, nil
}
