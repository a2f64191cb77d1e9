// Package tokenspeed measures how fast tokenizers encode text on one core.
//
// The benchmark command calls it. The texts are made here from a seed, since
// no corpus may be assumed on the machine: English of common words in
// proportions like a natural text's (Zipf), with inflections, names, numbers
// and punctuation; the source code of this benchmark; Chinese of common
// characters. They hold rare words on purpose: a text that repeats itself
// would measure a tokenizer's cache of words and nothing else.
package tokenspeed

import (
	"embed"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/tokens"
)

// Speed is one measurement.
type Speed struct {
	Tokenizer, Text string
	// MBs is in million bytes per second.
	MBs float64
	// BytesPerToken tells how well the vocabulary suits the text.
	BytesPerToken float64
}

// Embedded names the tokenizer of the simulated model.
const Embedded = "simulated"

// RealDir is where scripts/fetch-tokenizers.sh keeps real tokenizers.
func RealDir() string {
	cache := os.Getenv("KINFERENCE_CACHE")
	if cache == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		cache = filepath.Join(home, ".cache", "kinference")
	}
	return filepath.Join(cache, "tokenizers")
}

// Measure encodes each text for about duration with the embedded tokenizer and
// with every real one under dir, on the calling goroutine. missing says which
// could not be loaded and why; without any real one it says so.
func Measure(dir string, duration time.Duration) (speeds []Speed, missing []string, err error) {
	embedded, err := model.Dir()
	if err != nil {
		return nil, nil, err
	}
	folders := map[string]string{Embedded: embedded}
	names := []string{Embedded}
	found, _ := filepath.Glob(filepath.Join(dir, "*", "tokenizer.json"))
	for _, path := range found {
		folder := filepath.Dir(path)
		// Folders are named <tokenizer>-<version of the package it came in>.
		name, _, _ := strings.Cut(filepath.Base(folder), "-")
		folders[name] = folder
		names = append(names, name)
	}
	if len(found) == 0 {
		missing = append(missing, "real tokenizers: none is cached; scripts/fetch-tokenizers.sh fetches them")
	}
	for _, name := range names {
		t, err := tokens.Load(folders[name])
		if err != nil {
			missing = append(missing, fmt.Sprintf("tokenizer %s: %v", name, err))
			continue
		}
		for _, text := range Texts() {
			speeds = append(speeds, measure(t, name, text, duration))
		}
	}
	return speeds, missing, nil
}

func measure(t *tokens.Tokenizer, name string, text Text, duration time.Duration) Speed {
	ids := t.Encode(nil, text.Text, false) // also warms up
	var best time.Duration
	for start := time.Now(); best == 0 || time.Since(start) < duration; {
		begin := time.Now()
		ids = t.Encode(ids[:0], text.Text, false)
		// The fastest pass is the one that other processes disturbed least.
		if d := time.Since(begin); best == 0 || d < best {
			best = d
		}
	}
	return Speed{name, text.Name, float64(len(text.Text)) / 1e6 / best.Seconds(), float64(len(text.Text)) / float64(len(ids))}
}

// Text is one text to encode.
type Text struct{ Name, Text string }

// textBytes is the size of each text: larger than the caches of a core, so
// that memory takes part as it does with real traffic.
const textBytes = 1 << 20

//go:embed tokenspeed.go
var source embed.FS

// Texts returns the texts, the same ones in every call.
func Texts() []Text {
	return []Text{{"english", english()}, {"code", code()}, {"chinese", chinese()}}
}

// zipf returns indices below n with a frequency of 1/(rank+2).
func zipf(r *rand.Rand, n int) int {
	return min(int(math.Exp(r.Float64()*math.Log(float64(n)/2+1))*2)-2, n-1)
}

func newRand(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(1, stream)) }

func english() string {
	r := newRand(1)
	words := model.Words()
	var b strings.Builder
	capital := true
	for b.Len() < textBytes {
		word := words[zipf(r, len(words))]
		switch r.IntN(40) {
		case 0, 1, 2:
			word += []string{"s", "ed", "ing", "ly", "er", "ness"}[r.IntN(6)]
		case 3:
			word = name(r)
		case 4:
			word = fmt.Sprint(r.IntN(3000))
		case 5:
			word += "'s"
		}
		if capital {
			word = strings.ToUpper(word[:1]) + word[1:]
			capital = false
		}
		b.WriteString(word)
		switch n := r.IntN(60); {
		case n < 4:
			b.WriteString(". ")
			capital = true
		case n < 8:
			b.WriteString(", ")
		case n == 8:
			b.WriteString(".\n\n")
			capital = true
		default:
			b.WriteByte(' ')
		}
	}
	return b.String()
}

// name makes a word that no vocabulary holds.
func name(r *rand.Rand) string {
	var b strings.Builder
	for range 2 + r.IntN(3) {
		b.WriteByte("bcdfghklmnprstvwz"[r.IntN(17)])
		b.WriteByte("aeiouy"[r.IntN(6)])
	}
	s := b.String()
	return strings.ToUpper(s[:1]) + s[1:]
}

// code repeats this file with other identifiers and numbers.
func code() string {
	data, err := source.ReadFile("tokenspeed.go")
	if err != nil {
		panic(err) // it is embedded
	}
	r := newRand(2)
	lines := slices.Collect(strings.Lines(string(data)))
	var b strings.Builder
	for b.Len() < textBytes {
		line := lines[r.IntN(len(lines))]
		if r.IntN(3) == 0 {
			line = strings.ReplaceAll(line, "r.", strings.ToLower(name(r))+".")
		}
		if r.IntN(10) == 0 {
			line = fmt.Sprintf("\t\t%s := %#x + %d // %s\n", strings.ToLower(name(r)), r.Uint32(), r.IntN(1000), name(r))
		}
		b.WriteString(line)
	}
	return b.String()
}

// The most common characters of written Chinese, most common first.
const characters = "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里" +
	"用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实" +
	"日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政" +
	"美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员" +
	"解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件" +
	"计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象" +
	"完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运"

func chinese() string {
	r := newRand(3)
	chars := []rune(characters)
	var b strings.Builder
	for b.Len() < textBytes {
		b.WriteRune(chars[zipf(r, len(chars))])
		switch n := r.IntN(100); {
		case n < 7:
			b.WriteString("，")
		case n < 11:
			b.WriteString("。")
		case n == 11:
			b.WriteString("\n")
		case n == 12:
			fmt.Fprint(&b, r.IntN(3000))
		}
	}
	return b.String()
}
