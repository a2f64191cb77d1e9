// Package evaluate measures a classifier on labelled files: precision, recall and F2 of each kind of finding, documents, areas
// under curves, false alarms and CPU time, beside trivial baselines.
//
// kinfctl classifier evaluate and calibrate, and make eval-classifier, call it. It is not for the request path. Files hold one
// JSON object a line, in the schema of Row; lines that cannot be read are counted and skipped.
package evaluate

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/kinference/kinference/internal/classify"
)

// Span is a labelled stretch, in Unicode code points as the files give it.
type Span struct {
	Label      string `json:"label"`
	Start, End int
}

// Row is one labelled text. Spans: personal data. Label with Kind: injection.
// ModelScores or SolveRate: how well models did.
type Row struct {
	Source      string             `json:"source"`
	Task        string             `json:"task"`
	Kind        string             `json:"kind"`
	Text        string             `json:"text"`
	Prompt      string             `json:"prompt"`
	Template    string             `json:"template"`
	Spans       *[]Span            `json:"spans"`
	Label       *int               `json:"label"`
	SolveRate   *float64           `json:"solve_rate"`
	ModelScores map[string]float64 `json:"model_scores"`
}

// Content is the text, whichever field holds it.
func (r *Row) Content() string {
	if r.Text != "" {
		return r.Text
	}
	return r.Prompt
}

// maxLine bounds one line of a file.
const maxLine = 16 << 20

// Read reads a file. bad counts the lines that are not a row with text.
func Read(path string) (rows []Row, bad int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, 0, fmt.Errorf("read labelled file: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	s.Buffer(nil, maxLine)
	for s.Scan() {
		if len(strings.TrimSpace(s.Text())) == 0 {
			continue
		}
		var r Row
		if json.Unmarshal(s.Bytes(), &r) != nil || r.Content() == "" {
			bad++
			continue
		}
		rows = append(rows, r)
	}
	if err := s.Err(); err != nil {
		return nil, bad, fmt.Errorf("read labelled file: %w", err)
	}
	return rows, bad, nil
}

// kindOf maps labels of several corpora to kinds; "" for what is no personal
// data here (places, organisations, dates, titles).
func kindOf(label string) string {
	l := strings.ToUpper(label)
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(l, p) {
				return true
			}
		}
		return false
	}
	switch {
	case has("EMAIL"):
		return "email"
	case has("PHONE", "FAX", "TELEPHONE"):
		return "phone"
	case has("CREDIT", "CARD_NUMBER", "CARD"):
		return "card"
	case has("IBAN"):
		return "iban"
	case has("IP_ADDRESS", "IPV4", "IPV6"):
		return "ip"
	case has("DRIVER", "LICEN"):
		return "licence"
	case has("PASSPORT"):
		return "passport"
	case has("SSN", "NATIONAL", "AFM", "AMKA", "NHS", "NINO", "PESEL", "TAX", "_ID", "CPF", "CNP", "NIR", "DNI", "NIE", "HETU", "AADHAAR", "SIN", "BSN"):
		return "national-id"
	case has("MEDICAL", "MRN", "HEALTH"):
		return "medical"
	case has("CRYPTO", "WALLET", "BITCOIN", "ETHEREUM"):
		return "wallet"
	case has("BIRTH", "DOB"):
		return "birth-date"
	case has("ADDRESS", "STREET"):
		return "address"
	case has("PERSON", "FIRST_NAME", "LAST_NAME", "FULL_NAME"):
		return "person"
	case has("ACCOUNT"):
		return "account"
	case has("SECRET", "PASSWORD", "API_KEY", "TOKEN"):
		return "secret"
	}
	return ""
}

// gold is a labelled stretch in bytes.
type gold struct {
	kind       string
	start, end int
}

// goldOf turns the spans of a row into bytes.
func goldOf(r *Row) []gold {
	var out []gold
	if r.Spans == nil {
		return nil
	}
	text := r.Content()
	index := make([]int, 0, len(text)+1)
	for i := range text {
		index = append(index, i)
	}
	index = append(index, len(text))
	for _, s := range *r.Spans {
		k := kindOf(s.Label)
		if k == "" || s.Start < 0 || s.End >= len(index) || s.Start >= s.End {
			continue
		}
		out = append(out, gold{k, index[s.Start], index[s.End]})
	}
	return out
}

// found is a finding in bytes.
type found struct {
	kind       string
	start, end int
	score      float32
}

func findings(res *classify.Result, least map[string]float32) []found {
	var out []found
	for _, t := range res.Tags {
		if !strings.HasPrefix(t.Name, "pii-") || t.Name == "pii-detected" {
			if t.Name != "secret-detected" {
				continue
			}
		}
		for _, x := range t.Reasons {
			if x.Score >= least[x.Kind] {
				out = append(out, found{x.Kind, x.Offset, x.Offset + x.Length, x.Score})
			}
		}
	}
	return out
}
