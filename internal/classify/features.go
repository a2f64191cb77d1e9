package classify

import (
	"math"
	"math/bits"
	"slices"
)

// features of a text that add up over its parts.
type features struct {
	bytes                                   int
	words, letters, numbers, signs          int32
	lines, sentences, questions             int32
	math, codeSigns, codeWords, camel       int32
	fences, indented, upper                 int32
	reasoning, constraint, domain, creative int32
	output, ask, contextual, shots, listing int32
	options, blanks                         int32 // lettered answers, gaps to fill
	invisible, tagChars                     int32
	langs                                   [langCount]int32
	scripts                                 [scriptCount]int32
	heads                                   [headCount]float32
	grams                                   int32 // hashed features behind heads
	injection                               float32
	injectionAt, injectionEnd               int
	injectionRule                           string
}

func (f *features) add(o *features) {
	f.bytes += o.bytes
	for _, p := range [][2]*int32{{&f.words, &o.words}, {&f.letters, &o.letters}, {&f.numbers, &o.numbers}, {&f.signs, &o.signs}, {&f.lines, &o.lines}, {&f.sentences, &o.sentences},
		{&f.questions, &o.questions}, {&f.math, &o.math}, {&f.codeSigns, &o.codeSigns}, {&f.codeWords, &o.codeWords}, {&f.camel, &o.camel}, {&f.fences, &o.fences}, {&f.indented, &o.indented},
		{&f.upper, &o.upper}, {&f.reasoning, &o.reasoning}, {&f.constraint, &o.constraint}, {&f.domain, &o.domain}, {&f.creative, &o.creative}, {&f.output, &o.output}, {&f.ask, &o.ask},
		{&f.contextual, &o.contextual}, {&f.shots, &o.shots}, {&f.listing, &o.listing}, {&f.options, &o.options}, {&f.blanks, &o.blanks}, {&f.invisible, &o.invisible}, {&f.tagChars, &o.tagChars}, {&f.grams, &o.grams}} {
		*p[0] += *p[1]
	}
	for i := range f.langs {
		f.langs[i] += o.langs[i]
	}
	for i := range f.scripts {
		f.scripts[i] += o.scripts[i]
	}
	for i := range f.heads {
		f.heads[i] += o.heads[i]
	}
}

// Groups of words behind the sub-scores.
const (
	wordReasoning = 1 << iota
	wordConstraint
	wordDomain
	wordCreative
	wordOutput
	wordAsk
	wordContextual
	wordShots
	wordCode
	wordMath
)

// groupWords, in English and, where short lists serve, other languages.
var groupWords = map[uint16]string{
	wordReasoning:  "why|prove|proof|derive|explain|analyze|analyse|evaluate|compare|contrast|justify|deduce|infer|reason|reasoning|therefore|hence|because|implies|argue|critique|assess|optimize|optimise|design|architect|debug|diagnose|strategy|tradeoff|tradeoffs|consider|step|steps|determine|calculate|compute|solve|if|then|given|suppose|assume|show|warum|beweise|erklare|analysiere|pourquoi|expliquez|analysez|demuestra|explica|analiza|perche|spiega",
	wordConstraint: "must|should|exactly|least|most|only|without|avoid|ensure|never|always|include|exclude|limit|maximum|minimum|between|format|following|requirements|constraints|constraint|required|not|each|every|unless|except|at|within|muss|genau|mindestens|hochstens|ohne|doit|sans|exactement|debe|sin|deve|senza",
	wordDomain:     "theorem|integral|derivative|matrix|eigenvalue|polynomial|equation|probability|hypothesis|regression|variance|quantum|entropy|thermodynamic|molecule|enzyme|protein|genome|mitochondria|pathology|diagnosis|treatment|syndrome|clinical|pharmacology|statute|jurisdiction|tort|contract|liability|plaintiff|defendant|gdp|inflation|monetary|fiscal|equilibrium|elasticity|algorithm|complexity|concurrency|kernel|compiler|cryptography|encryption|neural|gradient|transformer|kubernetes|distributed|database|asymptotic|lemma|manifold|topology|epistemology|ontology|metaphysics|hermeneutics|stoichiometry|oxidation|voltage|circuit|impedance|velocity|acceleration|momentum|isotope|catalyst|antibody|antigen|neuron|accounting|depreciation|amortization|derivatives|portfolio|econometrics|heteroscedasticity|jurisprudence|pathogen|virus|vaccine",
	wordCreative:   "write|story|poem|essay|song|novel|creative|imagine|invent|haiku|lyrics|dialogue|script|slogan|brainstorm|schreibe|gedicht|ecris|poeme|escribe|poema|scrivi",
	wordOutput:     "detailed|comprehensive|thorough|report|essay|article|complete|full|implement|implementation|build|create|develop|program|application|project|documentation|plan|table|list|words|pages|paragraphs|chapter|in-depth|tutorial|guide",
	wordAsk:        "what|who|when|where|which|how|is|are|does|do|can|was|define|translate|capital|name|hi|hello|thanks|thank|summarize|rewrite|correct|fix|spell|synonym|wer|wann|wo|qui|quand|quien|cuando",
	wordContextual: "above|below|attached|following|document|article|passage|text|table|data|context|paragraph|according|based|provided|code|snippet|previous|earlier|transcript",
	wordShots:      "example|examples|input|output|sample|demonstration|instance|e.g|q|a",
	wordCode:       "def|class|return|import|function|const|let|var|public|private|static|void|int|string|bool|struct|func|package|include|printf|println|print|lambda|async|await|null|nil|none|true|false|elif|endif|select|insert|join|foreach|while|enum|interface|extends|implements|namespace|template|typedef|self|this|throw|catch|try|except|yield|fn|impl|mut|pub|console|echo|sudo|npm|pip|git|docker|html|div|href|src",
	wordMath:       "sum|product|integral|sqrt|sin|cos|tan|log|ln|equation|solve|prove|theorem|fraction|percent|percentage|probability|ratio|average|mean|median|angle|triangle|circle|radius|area|volume|perimeter|polynomial|derivative|function|prime|divisible|integer|matrix|vector|set|many|much|total|times|half|twice|double|per|remaining|left|cost|each",
}

// wordGroups by hash.
var wordGroups = func() map[uint32]uint16 {
	m := map[uint32]uint16{}
	for g, list := range groupWords {
		for w := range splitWords(list) {
			m[w] |= g
		}
	}
	return m
}()

func splitWords(list string) map[uint32]bool {
	m := map[uint32]bool{}
	start := 0
	for i := 0; i <= len(list); i++ {
		if i == len(list) || list[i] == '|' {
			m[hashWord(list[start:i])] = true
			start = i + 1
		}
	}
	return m
}

// gram hashes a feature of the heads.
func gram(id, v uint32) uint32 {
	h := (id*0x9e3779b1 ^ v) * 0x85ebca6b
	h ^= h >> 13
	h *= 0xc2b2ae35
	return h >> (32 - headBits)
}

const gramsPerToken = 4

// grams are the hashed features of token i: the word, its first letters, and
// two pairs. Numbers count by their length.
func (s *scan) grams(i int, out *[gramsPerToken]uint32) {
	w := s.gramHash(i)
	out[0] = gram(1, w)
	out[1] = gram(2, s.gramHash(i-1)*31+w)
	out[2] = gram(3, s.gramHash(i-2)*31+w)
	t := &s.toks[i]
	stem := uint32(0)
	if t.kind == tokWord && t.len() > 4 {
		x := s.text[t.start:t.end]
		stem = uint32(lowerByte(x[0]))<<24 | uint32(lowerByte(x[1]))<<16 | uint32(lowerByte(x[2]))<<8 | uint32(lowerByte(x[3]))
		stem ^= uint32(lowerByte(x[4])) << 4
	} else {
		stem = s.gramHash(i-1) ^ 0x55
	}
	out[3] = gram(4, stem)
}

func (s *scan) gramHash(i int) uint32 {
	if i < 0 {
		return 3
	}
	if t := &s.toks[i]; t.kind == tokNumber {
		return 100 + uint32(min(t.len(), 6))
	}
	return s.toks[i].hash
}

// features counts what complexity, language and code need, and sums up the
// heads. Hidden views only count for injection.
func (s *scan) features(scripts *[scriptCount]int32, root bool) {
	f := &features{}
	var g [gramsPerToken]uint32
	inj := s.margins[:0]
	for i := range s.toks {
		t := &s.toks[i]
		if t.gap >= gapLine {
			f.lines++
			if t.len() == 1 && t.shape != shapeLower && t.kind == tokWord && i+1 < len(s.toks) && (s.toks[i+1].sign == '.' || s.toks[i+1].sign == ')') {
				f.options++
			}
			if t.start > 1 && i > 0 && s.text[t.start-1] == ' ' || t.start > 0 && s.text[t.start-1] == '\t' {
				f.indented++
			}
			if t.kind == tokNumber && i+1 < len(s.toks) && (s.toks[i+1].sign == '.' || s.toks[i+1].sign == ')') || t.sign == '-' || t.sign == '*' {
				f.listing++
			}
		}
		switch t.kind {
		case tokSign:
			f.signs++
			switch t.sign {
			case '_':
				f.codeSigns++
				if t.gap != gapNone {
					f.blanks++
				}
			case '?':
				f.questions++
				f.sentences++
			case '.', '!':
				f.sentences++
			case '{', '}', ';', '[', ']', '<', '>', '|', '&':
				f.codeSigns++
			case '(', ')':
				if t.gap == gapNone {
					f.codeSigns++
				}
			case '=', '+', '*', '^', '/', '\\', '%':
				f.math++
			case '`':
				if i+2 < len(s.toks) && s.toks[i+1].sign == '`' && s.toks[i+2].sign == '`' {
					f.fences++
				}
			}
		case tokNumber:
			f.numbers++
		default:
			f.words++
			f.letters += int32(t.len())
			if t.shape == shapeMixed {
				f.camel++
			}
			if t.shape == shapeUpper && t.len() > 3 {
				f.upper++
			}
			for l := s.m.lexicon.langs[t.lang]; l != 0; l &= l - 1 {
				f.langs[bits.TrailingZeros32(l)]++
			}
			if w := t.group; w != 0 {
				f.reasoning += int32(w >> 0 & 1)
				f.constraint += int32(w >> 1 & 1)
				f.domain += int32(w >> 2 & 1)
				f.creative += int32(w >> 3 & 1)
				f.output += int32(w >> 4 & 1)
				f.ask += int32(w >> 5 & 1)
				f.contextual += int32(w >> 6 & 1)
				f.shots += int32(w >> 7 & 1)
				f.codeWords += int32(w >> 8 & 1)
				f.math += int32(w >> 9 & 1)
			}
		}
		s.grams(i, &g)
		var sum [headCount]int32
		for _, x := range g {
			w := &s.m.heads.w[x]
			sum[0] += int32(w[0])
			sum[1] += int32(w[1])
			sum[2] += int32(w[2])
		}
		f.heads[headDifficulty] += float32(sum[0])
		f.heads[headDemand] += float32(sum[2])
		inj = append(inj, float32(sum[1]))
		f.grams++
	}
	s.margins = inj
	s.injection(f)
	if !root {
		o := features{injection: f.injection, injectionAt: f.injectionAt, injectionEnd: f.injectionEnd, injectionRule: f.injectionRule}
		s.noteInjection(&o)
		return
	}
	f.scripts = *scripts
	s.noteInjection(f)
	f.injection, f.injectionRule = 0, ""
	s.res.feat.add(f)
}

// noteInjection keeps the strongest sign of an injection in the part.
func (s *scan) noteInjection(f *features) {
	if f.injection > s.res.feat.injection {
		s.res.feat.injection, s.res.feat.injectionRule = f.injection, f.injectionRule
		s.res.feat.injectionAt, s.res.feat.injectionEnd = s.view.span(f.injectionAt, f.injectionEnd)
	}
}

// denseCount is the number of dense features of difficulty and demand; dense lists them.
const denseCount = 28

// dense are the dense features of a text, each about in 0..1.
func (f *features) dense(out *[denseCount]float32) {
	words := float32(max(f.words, 1))
	log := func(n float32) float32 { return float32(math.Log1p(float64(n))) }
	rate := func(n int32) float32 { return min(float32(n)/words*5, 2) }
	other := int32(0)
	for i := 1; i < scriptCount; i++ {
		other += f.scripts[i]
	}
	under := func(n int32) float32 {
		if f.words < n {
			return 1
		}
		return 0
	}
	*out = [denseCount]float32{log(float32(f.bytes)) / 10, log(words) / 8, rate(f.numbers), rate(f.math), rate(f.codeSigns+f.codeWords) / 2, log(float32(f.questions)), log(float32(f.sentences)) / 3,
		log(float32(f.reasoning)) / 2, log(float32(f.constraint)) / 2, log(float32(f.domain)), log(float32(f.creative)), log(float32(f.output)), rate(f.ask), log(float32(f.contextual)), log(float32(f.shots)), log(float32(f.listing)) / 2,
		float32(f.letters) / words / 8, rate(f.upper), float32(other) / float32(max(f.letters, 1)),
		under(10), under(20), under(40), under(80), under(160), under(320), min(float32(f.options)/4, 1), min(float32(f.blanks), 1), min(float32(f.indented)/5, 1)}
}

// head is the raw score of a head.
func (m *models) head(k int, f *features) float32 {
	sum := m.heads.Bias[k]
	if f.grams > 0 {
		sum += f.heads[k] * m.heads.Scale[k] / sqrt(float32(f.grams))
	}
	if w := m.heads.Dense[k]; w != nil {
		var d [denseCount]float32
		f.dense(&d)
		for i := range d {
			sum += w[i] * d[i]
		}
	}
	return sum
}

func sqrt(x float32) float32    { return float32(math.Sqrt(float64(x))) }
func sigmoid(x float32) float32 { return float32(1 / (1 + math.Exp(-float64(x)))) }

// language names what most of a text is written in; empty: cannot tell.
func (f *features) language() (name string, score float32) {
	total := int32(0)
	best, n := -1, int32(0)
	for i, c := range f.scripts {
		total += c
		if c > n {
			best, n = i, c
		}
	}
	if total < 2 || best < 0 {
		return "", 0
	}
	share := float32(n) / float32(total)
	switch best {
	case scriptHan, scriptKana:
		if f.scripts[scriptKana]*10 > total {
			return "ja", share
		}
		return "zh", share
	case scriptOther:
		return "", 0
	case scriptLatin, scriptCyrillic:
		return f.byWords(best == scriptCyrillic)
	}
	return map[int]string{scriptGreek: "el", scriptArmenian: "hy", scriptHebrew: "he", scriptArabic: "ar", scriptDevanagari: "hi", scriptGeorgian: "ka", scriptHangul: "ko", scriptThai: "th"}[best], share
}

func (f *features) byWords(cyrillic bool) (string, float32) {
	first, second := -1, -1
	for i := range langCount {
		if langCyrillic(i) != cyrillic {
			continue
		}
		if first < 0 || f.langs[i] > f.langs[first] {
			first, second = i, first
		} else if second < 0 || f.langs[i] > f.langs[second] {
			second = i
		}
	}
	n := f.langs[first]
	if n == 0 || second >= 0 && f.langs[second] == n {
		return "", 0
	}
	s := float32(n) / float32(n+f.langs[max(second, 0)])
	if f.words > 8 && n*14 < f.words {
		return "", 0
	}
	return langNames[first], s
}

// code is how much a text looks like code, in 0..1.
func (f *features) code() float32 {
	if f.fences >= 2 {
		return 1
	}
	words := float32(max(f.words, 1))
	x := 9*min(float32(f.codeSigns)/words, 0.8) + 7*min(float32(f.codeWords)/words, 0.5) + 2*float32(f.indented)/float32(max(f.lines, 1)) + 3*min(float32(f.camel)/words, 0.4) - 3
	if f.words < 3 {
		x -= 2
	}
	return sigmoid(x)
}

func sortedSet(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}
