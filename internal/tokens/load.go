package tokens

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// tokenizerFile is tokenizer.json.
type tokenizerFile struct {
	AddedTokens   []addedToken    `json:"added_tokens"`
	Normalizer    *component      `json:"normalizer"`
	PreTokenizer  *component      `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       *component      `json:"decoder"`
	Model         struct {
		Type                    string     `json:"type"`
		Dropout                 *float64   `json:"dropout"`
		UnkToken                *string    `json:"unk_token"`
		ContinuingSubwordPrefix *string    `json:"continuing_subword_prefix"`
		EndOfWordSuffix         *string    `json:"end_of_word_suffix"`
		ByteFallback            bool       `json:"byte_fallback"`
		IgnoreMerges            bool       `json:"ignore_merges"`
		Vocab                   vocabulary `json:"vocab"`
		Merges                  mergeList  `json:"merges"`
	} `json:"model"`
}

// component is a normalizer, pre-tokenizer or decoder; the fields that its type has are set.
type component struct {
	Type           string      `json:"type"`
	Normalizers    []component `json:"normalizers"`
	PreTokenizers  []component `json:"pretokenizers"`
	Pattern        pattern     `json:"pattern"`
	Behavior       string      `json:"behavior"`
	Invert         bool        `json:"invert"`
	AddPrefixSpace bool        `json:"add_prefix_space"`
	UseRegex       bool        `json:"use_regex"`
}

type pattern struct {
	Regex  *string `json:"Regex"`
	String *string `json:"String"`
}

// Load reads the tokenizer in folder dir: tokenizer.json, and tokenizer_config.json where it is there for the BOS and EOS
// rules that tokenizer.json leaves to it. The error names the file and whatever part of it is not supported.
func Load(dir string) (*Tokenizer, error) {
	path := filepath.Join(dir, "tokenizer.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read tokenizer: %w", err)
	}
	var file tokenizerFile
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	t, err := build(&file)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", path, err)
	}
	if t.prefix == nil && t.suffix == nil {
		path := filepath.Join(dir, "tokenizer_config.json")
		if err := t.configSpecial(path); err != nil {
			return nil, fmt.Errorf("load %s: %w", path, err)
		}
	}
	return t, nil
}

func build(file *tokenizerFile) (*Tokenizer, error) {
	initClasses()
	t := new(Tokenizer)
	var err error
	if t.nfc, err = normalizer(file.Normalizer); err != nil {
		return nil, err
	}
	if t.scan, err = preTokenizer(file.PreTokenizer); err != nil {
		return nil, err
	}
	if d := file.Decoder; d != nil && d.Type != "ByteLevel" {
		return nil, fmt.Errorf("decoder %q is not supported", d.Type)
	}
	if err := t.model(file); err != nil {
		return nil, err
	}
	if err := t.added(file.AddedTokens); err != nil {
		return nil, err
	}
	if err := t.postProcessor(file.PostProcessor); err != nil {
		return nil, err
	}
	return t, nil
}

// normalizer reports whether text is normalised to NFC.
func normalizer(c *component) (bool, error) {
	switch {
	case c == nil:
		return false, nil
	case c.Type == "NFC":
		return true, nil
	case c.Type == "Sequence":
		all := false
		for i := range c.Normalizers {
			one, err := normalizer(&c.Normalizers[i])
			if err != nil {
				return false, err
			}
			all = all || one
		}
		return all, nil
	}
	return false, fmt.Errorf("normalizer %q is not supported", c.Type)
}

func preTokenizer(c *component) (scanner, error) {
	if c == nil {
		return nil, fmt.Errorf("no pre_tokenizer: not supported")
	}
	parts := []component{*c}
	if c.Type == "Sequence" {
		parts = c.PreTokenizers
	}
	var patterns []string
	for i, p := range parts {
		switch {
		case p.Type == "Split" && p.Pattern.Regex != nil && p.Behavior == "Isolated" && !p.Invert:
			patterns = append(patterns, *p.Pattern.Regex)
		case p.Type == "ByteLevel" && i == len(parts)-1 && !p.UseRegex && !p.AddPrefixSpace:
			scan, ok := findScanner(patterns)
			if !ok {
				return nil, fmt.Errorf("pre_tokenizer split pattern %q is not supported", patterns)
			}
			return scan, nil
		default:
			return nil, fmt.Errorf("pre_tokenizer %d of type %q (behavior %q, invert %t, use_regex %t, add_prefix_space %t) is not supported",
				i, p.Type, p.Behavior, p.Invert, p.UseRegex, p.AddPrefixSpace)
		}
	}
	return nil, fmt.Errorf("pre_tokenizer has no ByteLevel at its end: not supported")
}

func (t *Tokenizer) model(file *tokenizerFile) error {
	m := &file.Model
	set := func(s *string) bool { return s != nil && *s != "" }
	switch {
	case m.Type != "BPE":
		return fmt.Errorf("model type %q is not supported", m.Type)
	case m.ByteFallback:
		return fmt.Errorf("model byte_fallback is not supported")
	case m.Dropout != nil && *m.Dropout != 0:
		return fmt.Errorf("model dropout is not supported")
	case set(m.ContinuingSubwordPrefix) || set(m.EndOfWordSuffix):
		return fmt.Errorf("model continuing_subword_prefix and end_of_word_suffix are not supported")
	}
	size := uint32(0)
	for _, v := range m.Vocab.tokens {
		size = max(size, v.id+1)
	}
	for _, a := range file.AddedTokens {
		size = max(size, a.ID+1)
	}
	// Ids are dense but for a few reserved ones; a larger hole is a broken file, and sizes the tables.
	if count := len(m.Vocab.tokens) + len(file.AddedTokens); uint64(size) > 2*uint64(count)+1024 {
		return fmt.Errorf("highest id %d with only %d tokens", size-1, count)
	}
	t.text = make([]string, size)
	t.special = make([]bool, size)

	b := &t.bpe
	b.ignoreMerges = m.IgnoreMerges
	b.vocab = make(map[string]uint32, len(m.Vocab.tokens))
	names := string(m.Vocab.names) // tokens are pieces of this one string
	start := uint32(0)
	for _, v := range m.Vocab.tokens {
		t.text[v.id] = names[start:v.end]
		if !v.plain { // merges never make plain text
			b.vocab[t.text[v.id]] = v.id
		}
		start = v.end
	}
	for i := range b.bytes {
		id, ok := b.vocab[string([]byte{byte(i)})]
		if !ok {
			return fmt.Errorf("vocabulary has no token for byte %#02x", i)
		}
		b.bytes[i] = id
	}
	b.pairs = newPairTable(len(m.Merges.pairs))
	start = 0
	for rank, pair := range m.Merges.pairs {
		left, right := m.Merges.names[start:pair.middle], m.Merges.names[pair.middle:pair.end]
		leftID, ok1 := b.vocab[string(left)]
		rightID, ok2 := b.vocab[string(right)]
		id, ok3 := b.vocab[string(m.Merges.names[start:pair.end])]
		if !ok1 || !ok2 || !ok3 {
			return fmt.Errorf("merge %d (%q and %q) uses a token that is not in the vocabulary", rank, left, right)
		}
		b.pairs.set(leftID, rightID, uint32(rank), id)
		start = pair.end
	}
	if !b.ignoreMerges {
		b.vocab = nil // 10 MB that only this function needs
	}
	b.words = newWordCache()
	return nil
}

func (t *Tokenizer) added(tokens []addedToken) error {
	var raw, normalized []addedToken
	for _, a := range tokens {
		switch {
		case a.Content == "":
			continue
		case a.SingleWord:
			return fmt.Errorf("added token %q: single_word is not supported", a.Content)
		case a.Normalized && t.nfc && nfc(a.Content) != a.Content:
			return fmt.Errorf("added token %q: normalized content that NFC changes is not supported", a.Content)
		}
		t.text[a.ID] = a.Content
		if raw, ok := fromByteLevel(a.Content); ok { // the reference decoder maps added tokens too
			t.text[a.ID] = raw
		}
		t.special[a.ID] = a.Special
		if a.Normalized {
			normalized = append(normalized, a)
		} else {
			raw = append(raw, a)
		}
	}
	t.raw, t.normalized = newAddedSet(raw), newAddedSet(normalized)
	t.cuts = independentCuts(tokens)
	return nil
}

// postProcessor finds the special tokens that addSpecial puts around a text.
func (t *Tokenizer) postProcessor(data json.RawMessage) error {
	if len(data) == 0 || bytes.Equal(data, []byte("null")) {
		return nil
	}
	var p struct {
		Type       string            `json:"type"`
		Processors []json.RawMessage `json:"processors"`
		Single     []struct {
			SpecialToken *struct{ ID string }
			Sequence     *struct{ ID string }
		} `json:"single"`
		SpecialTokens map[string]struct {
			IDs []uint32 `json:"ids"`
		} `json:"special_tokens"`
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return fmt.Errorf("post_processor: %w", err)
	}
	switch p.Type {
	case "ByteLevel": // trims offsets only
		return nil
	case "Sequence":
		for _, sub := range p.Processors {
			if err := t.postProcessor(sub); err != nil {
				return err
			}
		}
		return nil
	case "TemplateProcessing":
		into := &t.prefix
		for _, piece := range p.Single {
			switch {
			case piece.Sequence != nil:
				into = &t.suffix
			case piece.SpecialToken != nil:
				s, ok := p.SpecialTokens[piece.SpecialToken.ID]
				if !ok {
					return fmt.Errorf("post_processor names special token %q but does not define it", piece.SpecialToken.ID)
				}
				*into = append(*into, s.IDs...)
			}
		}
		return nil
	}
	return fmt.Errorf("post_processor %q is not supported", p.Type)
}

// configSpecial applies add_bos_token and add_eos_token of tokenizer_config.json, from which transformers builds a
// post-processor where tokenizer.json has none (DeepSeek).
func (t *Tokenizer) configSpecial(path string) error {
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var c struct {
		AddBOS bool      `json:"add_bos_token"`
		AddEOS bool      `json:"add_eos_token"`
		BOS    tokenName `json:"bos_token"`
		EOS    tokenName `json:"eos_token"`
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return err
	}
	for _, s := range []struct {
		add  bool
		name tokenName
		into *[]uint32
	}{{c.AddBOS, c.BOS, &t.prefix}, {c.AddEOS, c.EOS, &t.suffix}} {
		if !s.add || s.name == "" {
			continue
		}
		id, ok := t.addedID(string(s.name))
		if !ok {
			return fmt.Errorf("special token %q is not an added token", s.name)
		}
		*s.into = append(*s.into, id)
	}
	return nil
}

func (t *Tokenizer) addedID(content string) (uint32, bool) {
	for _, set := range []*addedSet{t.raw, t.normalized} {
		if set == nil {
			continue
		}
		for _, a := range set.tokens {
			if a.Content == content {
				return a.ID, true
			}
		}
	}
	return 0, false
}

// tokenName is a token in tokenizer_config.json: a string, an object with content, or null.
type tokenName string

// UnmarshalJSON reads any of the forms.
func (n *tokenName) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '{' {
		var o struct {
			Content string `json:"content"`
		}
		if err := json.Unmarshal(data, &o); err != nil {
			return err
		}
		*n = tokenName(o.Content)
		return nil
	}
	return json.Unmarshal(data, (*string)(n))
}
