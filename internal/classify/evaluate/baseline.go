package evaluate

import "regexp"

// trivial is what a few regular expressions find: the baseline.
var trivial = map[string]*regexp.Regexp{
	"email":       regexp.MustCompile(`[\w.+-]+@[\w-]+\.[\w.-]+`),
	"card":        regexp.MustCompile(`\b(?:\d[ -]?){13,19}\b`),
	"iban":        regexp.MustCompile(`\b[A-Z]{2}\d{2}[A-Z0-9]{11,30}\b`),
	"national-id": regexp.MustCompile(`\b\d{3}-\d{2}-\d{4}\b`),
	"ip":          regexp.MustCompile(`\b\d{1,3}(?:\.\d{1,3}){3}\b`),
	"phone":       regexp.MustCompile(`\+?\(?\d[\d\s().x-]{6,}\d`),
	"person":      regexp.MustCompile(`\b(?:Mr|Mrs|Ms|Dr)\.? [A-Z][a-z]+|\b[A-Z][a-z]+ [A-Z][a-z]+\b`),
	"address":     regexp.MustCompile(`\b\d+ (?:[A-Z][a-z]+ ){1,3}(?:Street|St|Avenue|Ave|Road|Rd|Lane|Drive)\b`),
}

func baseline(text string) map[string][][]int {
	out := map[string][][]int{}
	for k, re := range trivial {
		if m := re.FindAllStringIndex(text, -1); m != nil {
			out[k] = m
		}
	}
	return out
}
