package classify

import (
	"bytes"
	_ "embed" // the rules
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"sync"
)

// secretRules is the table of gitleaks 8.30.1 (MIT, see data/LICENSES), less
// what depends on file names: id, keywords, entropy, group, regular expression.
//
//go:embed data/secrets.tsv
var secretRules string

type secretRule struct {
	id      string
	entropy float64
	group   int
	source  string
	once    sync.Once
	re      *regexp.Regexp
}

func (r *secretRule) regexp() *regexp.Regexp {
	// Most rules are never asked for: compiling all of them takes longer than everything else at the start.
	r.once.Do(func() { r.re = regexp.MustCompile(r.source) })
	return r.re
}

type secretSet struct {
	rules    []secretRule
	keywords *automaton
	of       []int // rule of a keyword
}

func loadSecrets() (*secretSet, error) {
	lines := strings.Split(strings.TrimSpace(secretRules), "\n")
	set := &secretSet{rules: make([]secretRule, len(lines))}
	var words []string
	for i, line := range lines {
		f := strings.SplitN(line, "\t", 5)
		if len(f) != 5 {
			return nil, fmt.Errorf("secret rules: line %d has %d fields", i+1, len(f))
		}
		r := &set.rules[i]
		r.id, r.source = f[0], f[4]
		r.entropy, _ = strconv.ParseFloat(f[2], 64) // empty: none
		r.group, _ = strconv.Atoi(f[3])
		for k := range strings.SplitSeq(f[1], ",") {
			words = append(words, k)
			set.of = append(set.of, i)
		}
	}
	set.keywords = newAutomaton(words)
	return set, nil
}

// denseRun is a stretch that may be a secret: long, without spaces, not a word.
type denseRun struct{ start, end int }

var denseClass = func() (t [256]bool) {
	for b := range 128 {
		if c := byteClass[b]; c == 1 || c == 2 {
			t[b] = true
		}
	}
	for _, b := range []byte("_-+/=.~!$%^&*#") {
		t[b] = true
	}
	return t
}()

const (
	secretBefore, secretAfter = 160, 400
	minDense                  = 10
)

// dense lists the stretches of the view that may be secrets.
func (s *scan) dense() {
	s.runs = s.runs[:0]
	text := s.text
	for i := 0; i < len(text); {
		if !denseClass[text[i]] {
			i++
			continue
		}
		j, digits, letters, changes := i, 0, 0, 0
		var last uint8
		for j < len(text) && denseClass[text[j]] {
			c := byteClass[text[j]&0x7f]
			switch c {
			case 2:
				digits++
			case 1:
				letters++
				if text[j] < 'a' {
					c = 5
				}
			}
			if c != last {
				changes++
			}
			last = c
			j++
		}
		if j-i >= minDense && (digits > 0 && letters > 0 || changes > 4 && j-i >= 12 || digits >= 14) {
			if n := len(s.runs); n > 0 && i-s.runs[n-1].end < secretBefore {
				s.runs[n-1].end = j
			} else {
				s.runs = append(s.runs, denseRun{i, j})
			}
		}
		i = j
	}
}

// secrets finds keys, tokens and passwords: rules with keywords, only where
// something dense stands, in windows.
func (s *scan) secrets() {
	s.passwords()
	s.dense()
	set := s.m.secrets
	for _, r := range s.runs {
		for from := r.start; from < r.end; from += 4096 {
			lo := max(0, from-secretBefore)
			hi := min(len(s.text), min(r.end, from+4096)+secretAfter/2)
			done := map[int]int{}
			set.keywords.find(s.text[lo:hi], func(id int32, end int) {
				k := set.of[id]
				at := lo + end
				if at <= done[k] {
					return
				}
				if n := s.secret(&set.rules[k], at); n > 0 {
					done[k] = n
				}
			})
		}
	}
	s.keys()
}

// secret tries a rule around a keyword that ends at. It returns up to where the
// text was read.
func (s *scan) secret(r *secretRule, at int) int {
	after := secretAfter
	if r.id == "jwt" {
		after = 4096
	}
	a, b := max(0, at-96), min(len(s.text), at+after)
	if r.id == "generic-api-key" {
		s.assigned(at)
		return 0
	}
	// Something dense must stand within reach behind the keyword.
	if !denseNear(s.text[max(0, at-48):b]) {
		return 0
	}
	m := r.regexp().FindSubmatchIndex(s.text[a:b])
	if m == nil {
		return at + 16
	}
	g := r.group
	if g == 0 && len(m) > 2 && m[2] >= 0 {
		g = 1
	}
	start, end := a+m[2*g], a+m[2*g+1]
	w := s.text[start:end]
	if r.entropy > 0 && entropy(w) <= r.entropy || placeholder(w) || r.id == "vault-service-token" && bytes.HasPrefix(w, []byte("s.")) && !bytes.ContainsAny(w, "0123456789") {
		return a + m[1]
	}
	s.hit(kindSecret, r.id, 0.9, start, end)
	return a + m[1]
}

func denseNear(text []byte) bool {
	n, digit, letter := 0, false, false
	for _, b := range text {
		if !denseClass[b] {
			n, digit, letter = 0, false, false
			continue
		}
		n++
		c := byteClass[b]
		digit = digit || c == 2
		letter = letter || c == 1
		if n >= minDense && (digit && letter || n >= 14) {
			return true
		}
	}
	return false
}

// entropy is Shannon's, in bits a byte.
func entropy(w []byte) float64 {
	var n [256]int
	for _, b := range w {
		n[b]++
	}
	var e float64
	for _, c := range n {
		if c > 0 {
			p := float64(c) / float64(len(w))
			e -= p * math.Log2(p)
		}
	}
	return e
}

// placeholder reports whether a value only stands for a secret.
func placeholder(w []byte) bool {
	if bytes.HasSuffix(w, []byte("EXAMPLE")) || bytes.Contains(w, []byte("xxxx")) || bytes.Contains(w, []byte("XXXX")) || bytes.Contains(w, []byte("****")) || bytes.Contains(w, []byte("....")) {
		return true
	}
	return bytes.Contains(bytes.ToLower(w), []byte("abcdefghijklmnopqrstuvwxyz")) || len(w) > 0 && (w[0] == '$' || w[0] == '<')
}

// assigned finds name = value behind a keyword such as api or token, as
// gitleaks' rule generic-api-key does.
func (s *scan) assigned(at int) {
	text := s.text
	i := at
	from := at
	for from > 0 && at-from < 50 && (isAlnum(text[from-1]) || text[from-1] == '_' || text[from-1] == '.' || text[from-1] == '-') {
		from--
	}
	for n := 0; i < len(text) && n < 50 && (isAlnum(text[i]) || text[i] == '_' || text[i] == '.' || text[i] == '-' || text[i] == ' ' && n < 20); n++ {
		i++
	}
	if harmless(text[from:i]) {
		return
	}
	skip := func(set string, most int) (n int) {
		for n < most && i < len(text) && strings.IndexByte(set, text[i]) >= 0 {
			i++
			n++
		}
		return n
	}
	skip(" \t'\"`]", 4)
	if skip("=:>?|,", 3) == 0 {
		return
	}
	skip(" \t'\"`=(", 6)
	a := i
	for i < len(text) && i-a < 150 && (isAlnum(text[i]) || strings.IndexByte("_-.=+/", text[i]) >= 0) {
		i++
	}
	w := text[a:i]
	if len(w) < 10 || placeholder(w) || entropy(w) < 3.5 || i < len(text) && text[i] == '(' {
		return
	}
	digits, upper, lower := 0, 0, 0
	for _, b := range w {
		switch {
		case b >= '0' && b <= '9':
			digits++
		case b >= 'A' && b <= 'Z':
			upper++
		case b >= 'a' && b <= 'z':
			lower++
		}
	}
	// Names of things have words in them; a secret does not read.
	if digits == 0 || digits < 2 && len(w) < 20 || upper+lower == 0 || readsLike(w) {
		return
	}
	s.hit(kindSecret, "generic-api-key", 0.7, a, i)
}

// harmlessNames are of values that only sound secret.
var harmlessNames = [][]byte{[]byte("accessor"), []byte("accessib"), []byte("access_id"), []byte("accessid"), []byte("apiid"), []byte("api_id"), []byte("api_version"), []byte("apiversion"), []byte("api_name"), []byte("rapid"), []byte("capital"), []byte("author"), []byte("authsource"),
	[]byte("credentialsid"), []byte("credentialid"), []byte("credentials_id"), []byte("credentials.url"), []byte("publickey"), []byte("public_key"), []byte("pubkey"), []byte("publictoken"), []byte("public_token"), []byte("primarykey"), []byte("foreignkey"), []byte("keyhash"), []byte("keyfile"), []byte("keyid"), []byte("key_id"),
	[]byte("key_length"), []byte("keypair"), []byte("keyframe"), []byte("keypress"), []byte("key_down"), []byte("key_up"), []byte("keyboard"), []byte("keyword"), []byte("keying"), []byte("keymesh"), []byte("keyvault"), []byte("key_vault"), []byte("schemakey"), []byte("secretsid"), []byte("secret_length"), []byte("secret_name"), []byte("secretname"),
	[]byte("monkey"), []byte("turkey"), []byte("keystone"), []byte("csrf"), []byte("bus-message"), []byte("jsonweb"), []byte("tokenring"), []byte("token_count"), []byte("tokenizer"), []byte("x509"), []byte("keycode"), []byte("key_name"), []byte("keyname"), []byte("messageapi"), []byte("mantleapi"), []byte("_api_"), []byte("message-api")}

func harmless(name []byte) bool {
	l := bytes.ToLower(name)
	for _, h := range harmlessNames {
		if bytes.Contains(l, h) {
			return true
		}
	}
	return false
}

// readsLike reports whether a value is made of words, as identifiers and paths are.
func readsLike(w []byte) bool {
	vowels, letters, run, longest := 0, 0, 0, 0
	for _, b := range w {
		l := lowerByte(b)
		if l < 'a' || l > 'z' {
			run = 0
			continue
		}
		letters++
		run++
		longest = max(longest, run)
		if l == 'a' || l == 'e' || l == 'i' || l == 'o' || l == 'u' {
			vowels++
		}
	}
	return longest >= 5 && vowels*10 > letters*3 && letters*10 > len(w)*7
}

// passwords finds what a word such as "password" announces.
func (s *scan) passwords() {
	for i := range s.toks {
		if s.toks[i].ctx != ctxSecret || i > 1 && s.toks[i-2].hash == hashCSRF {
			continue
		}
		j := i + 1
		signs, is := false, false
		for j < len(s.toks) && j < i+6 && s.toks[j].gap < gapLine {
			t := &s.toks[j]
			if t.kind == tokSign && (t.sign == ':' || t.sign == '=' || t.sign == '"' || t.sign == '\'' || t.sign == '>' || t.sign == '`') {
				signs = signs || t.sign == ':' || t.sign == '='
				j++
				continue
			}
			if t.hash == hashIs || t.hash == hashIst || t.hash == hashWas {
				is = true
				j++
				continue
			}
			break
		}
		if j >= len(s.toks) || j == i+1 || !signs && !is || s.toks[j].gap >= gapLine {
			continue
		}
		a := int(s.toks[j].start)
		b := a
		for b < len(s.text) && s.text[b] > ' ' && strings.IndexByte("\"'`,;<>)}]", s.text[b]) < 0 && b-a < 80 {
			b++
		}
		for b > a && (s.text[b-1] == '.' || s.text[b-1] == ':') {
			b--
		}
		w := s.text[a:b]
		if len(w) < 5 || placeholder(w) || bytes.IndexByte(w, '(') >= 0 || bytes.HasPrefix(w, []byte("http")) {
			continue
		}
		digits, upper, lower, other := 0, 0, 0, 0
		for _, c := range w {
			switch {
			case c >= '0' && c <= '9':
				digits++
			case c >= 'A' && c <= 'Z':
				upper++
			case c >= 'a' && c <= 'z':
				lower++
			case c != '_' && c != '.' && c != '-':
				other++
			}
		}
		if digits > 0 && upper+lower > 0 && !bytes.ContainsAny(w, "[]") || other > 0 && upper+lower > 2 && digits > 0 {
			s.hit(kindSecret, "password", 0.6, a, b)
		} else if digits >= 4 && upper+lower == 0 && other == 0 && is {
			s.hit(kindSecret, "pin", 0.5, a, b)
		}
	}
}

var hashCSRF = hashWord("csrf")

var hashIs, hashIst, hashWas = hashWord("is"), hashWord("ist"), hashWord("was")

var pemBegin = []byte("-----BEGIN")

// keys finds private keys and passwords within URLs.
func (s *scan) keys() {
	for at := 0; ; {
		i := bytes.Index(s.text[at:], pemBegin)
		if i < 0 {
			break
		}
		i += at
		at = i + len(pemBegin)
		line := s.text[i:min(len(s.text), i+96)]
		if p := bytes.Index(line, []byte("PRIVATE KEY")); p > 0 && len(s.text)-i > 100 {
			end := min(len(s.text), i+4096)
			if e := bytes.Index(s.text[at:end], []byte("-----END")); e > 0 {
				end = at + e
			}
			s.hit(kindSecret, "private-key", 0.95, i, end)
		}
	}
	for at := 0; ; {
		i := bytes.Index(s.text[at:], []byte("://"))
		if i < 0 {
			break
		}
		i += at + 3
		at = i
		colon := 0
		for j := i; j < len(s.text) && j-i < 128; j++ {
			b := s.text[j]
			if b == ':' && colon == 0 {
				colon = j
			}
			if b == '@' && colon > i && j-colon > 3 {
				if w := s.text[colon+1 : j]; !placeholder(w) && !bytes.EqualFold(w, []byte("password")) && !bytes.EqualFold(w, []byte("pass")) && !bytes.ContainsAny(w, "{}[]$") {
					s.hit(kindSecret, "url-password", 0.75, colon+1, j)
				}
				break
			}
			if b <= ' ' || b == '/' || b == '"' || b == '?' {
				break
			}
		}
	}
}
