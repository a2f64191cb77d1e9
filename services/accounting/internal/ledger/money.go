package ledger

import (
	"math/big"
	"strconv"
	"strings"
)

// unit is how many parts a unit of money has.
const unit = 1_000_000_000_000

// Money is an exact amount: Whole units and Pico parts of 10⁻¹². Pico is from 0
// to below one unit, so that half a unit less than nothing is -1 and 5·10¹¹.
type Money struct{ Whole, Pico int64 }

// maxWhole bounds one amount, so that sums fit.
const maxWhole = 1_000_000_000_000

// ParseMoney reads a decimal of at most 12 decimals; false if it is none, or
// is below zero or far too large.
func ParseMoney(s string) (Money, bool) {
	whole, fraction, _ := strings.Cut(s, ".")
	if whole == "" || len(fraction) > 12 {
		return Money{}, false
	}
	w, err := strconv.ParseUint(whole, 10, 63)
	if err != nil || w > maxWhole {
		return Money{}, false
	}
	p, err := strconv.ParseUint(fraction+strings.Repeat("0", 12-len(fraction)), 10, 63)
	if err != nil {
		return Money{}, false
	}
	return Money{int64(w), int64(p)}, true
}

// Plus adds exactly.
func (m Money) Plus(o Money) Money {
	p := m.Pico + o.Pico
	return Money{m.Whole + o.Whole + p/unit, p % unit}
}

func (m Money) times(sign int64) Money {
	if sign >= 0 {
		return m
	}
	if m.Pico == 0 {
		return Money{-m.Whole, 0}
	}
	return Money{-m.Whole - 1, unit - m.Pico}
}

// IsZero reports that it is nothing.
func (m Money) IsZero() bool { return m == Money{} }

// String is the decimal without trailing zeros.
func (m Money) String() string {
	n := new(big.Int).Mul(big.NewInt(m.Whole), big.NewInt(unit))
	n.Add(n, big.NewInt(m.Pico))
	sign := ""
	if n.Sign() < 0 {
		sign = "-"
		n.Neg(n)
	}
	whole, part := new(big.Int).QuoRem(n, big.NewInt(unit), new(big.Int))
	if part.Sign() == 0 {
		return sign + whole.String()
	}
	digits := part.String()
	return sign + whole.String() + "." + strings.TrimRight(strings.Repeat("0", 12-len(digits))+digits, "0")
}
