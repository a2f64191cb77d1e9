// Package spelling finds what somebody may have meant by a name that nothing has.
//
// Checks of resources and policies call it for their hints. It is pure.
package spelling

import (
	"math"
	"slices"
	"strings"
)

// Nearest is the known name that looks most like another one: at most two letters
// differ, and fewer in short names; a missing or needless plural counts as
// nothing. Case does not matter. Empty: none is like it.
func Nearest(name string, known []string) string {
	best, least := "", min(2, len(name)/3)+1
	for _, k := range slices.Sorted(slices.Values(known)) {
		d := distance(strings.ToLower(name), strings.ToLower(k))
		if strings.EqualFold(name+"s", k) || strings.EqualFold(name, k+"s") {
			d = 0
		}
		if d < least {
			best, least = k, d
		}
	}
	return best
}

// distance is the number of letters to add, remove or replace.
func distance(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return math.MaxInt
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
