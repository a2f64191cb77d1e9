// Command train writes the simulator's tokenizer.json into the folder that is its argument. It trains byte-level BPE on text
// that it generates itself from a list of common English words, code and JSON, so that nothing in the result is anybody else's.
// Its output depends on nothing but its source; go generate in internal/fleetsim/model runs it.
package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"log"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

//go:embed words.txt
var wordList string

const (
	vocabSize = 4096 // bytes and merges; special tokens come on top
	pattern   = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

var specials = []struct {
	content string
	special bool
}{
	{"<|endoftext|>", true},
	{"<|im_start|>", true},
	{"<|im_end|>", true},
	{"<tool_call>", false},
	{"</tool_call>", false},
	{"<tool_response>", false},
	{"</tool_response>", false},
	{"<think>", false},
	{"</think>", false},
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: train FOLDER")
	}
	merges := train(words())
	data, err := marshal(merges)
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(os.Args[1], "tokenizer.json"), data, 0o644); err != nil {
		log.Fatal(err)
	}
}

// pretoken approximates pattern without look-ahead, which training does not need.
var pretoken = regexp.MustCompile(`'(?:s|t|re|ve|m|ll|d)|[^\r\n\pL\pN]?\pL+|\pN| ?[^\s\pL\pN]+[\r\n]*|\s*[\r\n]+|\s+`)

// words returns how often each pre-token occurs in the training text.
func words() map[string]int {
	counts := make(map[string]int)
	add := func(text string, n int) {
		for _, w := range pretoken.FindAllString(text, -1) {
			counts[w] += n
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	list := strings.Fields(wordList)
	for i, w := range list {
		n := 40 + 60000/(i+20) // Zipf's law, with a floor that gets every word its token
		add(" "+w, n)
		add(strings.ToUpper(w[:1])+w[1:], n/8)
		add(w, n/8)
	}
	pick := func() string { return list[int(float64(len(list))*rng.Float64()*rng.Float64())] }
	for range 3000 {
		a, b, c := pick(), pick(), pick()
		add(fmt.Sprintf("The %s, %s: %s. \"%s\" (%s) - %s; %s's %s? %s!\n\n", a, b, c, a, b, c, a, b, c), 1)
		add(fmt.Sprintf("# %s\n\n1. %s\n2. **%s**\n- `%s`\n", a, b, c, a), 1)
		add(fmt.Sprintf("func %s(%s string) error {\n\tif err != nil {\n\t\treturn err\n\t}\n\treturn nil\n}\n\n", a, b), 1)
		add(fmt.Sprintf("def %s(self, %s):\n    for %s in range(10):\n        print(%s)\n    return None\n", a, b, c, c), 1)
		add(fmt.Sprintf("{\"type\": \"function\", \"function\": {\"name\": \"%s\", \"description\": \"%s\", \"parameters\": {\"type\": \"object\", "+
			"\"properties\": {\"%s\": {\"type\": \"string\"}}, \"required\": [\"%s\"]}}}\n", a, b, c, c), 1)
		add("{\""+a+"\":\""+b+"\",\""+c+"\":[1,2.5,true,null]}", 1)
	}
	for _, ending := range []string{"ing", "ed", "er", "ers", "ly", "tion", "tions", "ment", "ness", "able", "est", "ity", "al", "ous"} {
		add(ending, 200)
	}
	return counts
}

// word is a pre-token as its current symbols.
type word struct {
	symbols []string
	count   int
}

type pair struct{ left, right string }

// train returns the merges in order: at each step the most frequent pair, of equals the first by text.
func train(counts map[string]int) []pair {
	var ws []word
	for _, text := range slices.Sorted(maps.Keys(counts)) {
		w := word{count: counts[text]}
		for i := range len(text) {
			w.symbols = append(w.symbols, text[i:i+1])
		}
		ws = append(ws, w)
	}
	pairs := make(map[pair]int)
	tally := func(w word, sign int) {
		for i := range len(w.symbols) - 1 {
			pairs[pair{w.symbols[i], w.symbols[i+1]}] += sign * w.count
		}
	}
	for _, w := range ws {
		tally(w, 1)
	}
	var merges []pair
	seen := make(map[string]bool)
	for len(seen) < vocabSize-256 {
		var best pair
		most := 0
		for p, n := range pairs {
			if n > most || n == most && n > 0 && cmp.Or(cmp.Compare(p.left, best.left), cmp.Compare(p.right, best.right)) < 0 {
				best, most = p, n
			}
		}
		if most == 0 {
			break
		}
		delete(pairs, best)
		merges = append(merges, best)
		seen[best.left+best.right] = true
		for i := range ws {
			if w := &ws[i]; contains(w.symbols, best) {
				tally(*w, -1)
				w.symbols = merge(w.symbols, best)
				tally(*w, 1)
			}
		}
		delete(pairs, best)
	}
	return merges
}

func contains(symbols []string, p pair) bool {
	for i := range len(symbols) - 1 {
		if symbols[i] == p.left && symbols[i+1] == p.right {
			return true
		}
	}
	return false
}

func merge(symbols []string, p pair) []string {
	out := symbols[:0]
	for i := 0; i < len(symbols); i++ {
		if i+1 < len(symbols) && symbols[i] == p.left && symbols[i+1] == p.right {
			out = append(out, p.left+p.right)
			i++
			continue
		}
		out = append(out, symbols[i])
	}
	return out
}

// byteLevel writes bytes as the printable characters that tokenizer.json uses for them.
func byteLevel(s string) string {
	var out strings.Builder
	for i := range len(s) {
		out.WriteRune(runeOf[s[i]])
	}
	return out.String()
}

var runeOf = func() (m [256]rune) {
	next := rune(0x100)
	for b := range m {
		m[b] = rune(b)
		if r := rune(b); !('!' <= r && r <= '~' || 0xA1 <= r && r <= 0xAC || 0xAE <= r && r <= 0xFF) {
			m[b] = next
			next++
		}
	}
	return m
}()

// marshal writes tokenizer.json with one line per token and merge, so that a change can be reviewed.
func marshal(merges []pair) ([]byte, error) {
	var tokens []string
	for b := range 256 {
		tokens = append(tokens, string([]byte{byte(b)}))
	}
	seen := make(map[string]bool)
	for _, m := range merges {
		if t := m.left + m.right; !seen[t] {
			seen[t] = true
			tokens = append(tokens, t)
		}
	}
	var b bytes.Buffer
	text := func(v any) string {
		var buf bytes.Buffer
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			panic(err) // strings and maps of them always encode
		}
		return strings.TrimSpace(buf.String())
	}
	b.WriteString("{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\n\"added_tokens\":[")
	for i, s := range specials {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n{\"id\":%d,\"content\":%s,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false,\"special\":%t}",
			len(tokens)+i, text(s.content), s.special)
	}
	byteLevelType := "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":false,\"use_regex\":false}"
	fmt.Fprintf(&b, "],\n\"normalizer\":{\"type\":\"NFC\"},\n\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["+
		"{\"type\":\"Split\",\"pattern\":{\"Regex\":%s},\"behavior\":\"Isolated\",\"invert\":false},%s]},\n", text(pattern), byteLevelType)
	fmt.Fprintf(&b, "\"post_processor\":%s,\n\"decoder\":%s,\n", byteLevelType, byteLevelType)
	b.WriteString("\"model\":{\"type\":\"BPE\",\"dropout\":null,\"unk_token\":null,\"continuing_subword_prefix\":\"\",\"end_of_word_suffix\":\"\"," +
		"\"fuse_unk\":false,\"byte_fallback\":false,\"ignore_merges\":false,\n\"vocab\":{")
	for i, t := range tokens {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n%s:%d", text(byteLevel(t)), i)
	}
	b.WriteString("},\n\"merges\":[")
	for i, m := range merges {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n%s", text(byteLevel(m.left)+" "+byteLevel(m.right)))
	}
	b.WriteString("]}}\n")
	if !json.Valid(b.Bytes()) {
		return nil, fmt.Errorf("wrote invalid JSON")
	}
	return b.Bytes(), nil
}
