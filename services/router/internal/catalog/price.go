package catalog

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// prices are what worker sets and providers cost, where the resources say it.
func prices(c *resources.Catalog) []*routerv1.Price {
	var out []*routerv1.Price
	for _, s := range c.Sets {
		hourly, ok := times(string(s.HourlyPrice), max(s.Accelerators, 1))
		if !ok {
			continue
		}
		p := &routerv1.Price{Backend: s.Name, Currency: string(s.Currency), Hourly: hourly}
		for _, profile := range s.Profiles {
			p.Names = append(p.Names, profile.Names...)
		}
		out = append(out, versioned(p))
	}
	for _, provider := range c.Providers {
		for _, m := range provider.Models {
			if m.Price == nil {
				continue
			}
			per := &m.Price.PerMillion
			out = append(out, versioned(&routerv1.Price{
				Backend: provider.Name, Model: m.UpstreamModel, Currency: string(m.Price.Currency), Names: m.Names,
				Input: string(per.Input), CachedInput: string(cmp.Or(per.CachedInput, per.Input)), Output: string(per.Output),
			}))
		}
	}
	return out
}

// versioned names the prices by themselves: whoever keeps the name knows that
// equal names had equal prices, and no counter can be lost.
func versioned(p *routerv1.Price) *routerv1.Price {
	sum := sha256.Sum256([]byte(strings.Join([]string{p.Backend, p.Model, p.Currency, p.Input, p.CachedInput, p.Output, p.Hourly}, "\x00")))
	name := p.Backend
	if p.Model != "" {
		name += "/" + p.Model
	}
	p.Version = name + "@" + hex.EncodeToString(sum[:6])
	return p
}

// times multiplies a decimal by a small number, exactly.
func times(decimal string, n int) (string, bool) {
	if decimal == "" {
		return "", false
	}
	digits := []byte(decimal)
	carry := 0
	for i := len(digits) - 1; i >= 0; i-- {
		if digits[i] == '.' {
			continue
		}
		if digits[i] < '0' || digits[i] > '9' {
			return "", false
		}
		carry += int(digits[i]-'0') * n
		digits[i] = byte('0' + carry%10)
		carry /= 10
	}
	for ; carry > 0; carry /= 10 {
		digits = append([]byte{byte('0' + carry%10)}, digits...)
	}
	return string(digits), true
}
