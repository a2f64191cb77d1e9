package catalog

import (
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// prices are what backends cost.
type prices struct {
	byBackend map[priceKey]*meter.Price
	byName    map[string][]*meter.Price
}

// priceKey is a provider with its upstream model, or a worker set without one.
type priceKey struct{ backend, model string }

// Price is what a worker set, or the upstream model of a provider, costs; nil
// if the resources do not say.
func (v *View) Price(backend, upstream string) *meter.Price {
	if p := v.prices.byBackend[priceKey{backend, upstream}]; p != nil {
		return p
	}
	return v.prices.byBackend[priceKey{backend, ""}]
}

// Prices are those of all that may be asked for under a name. Do not modify
// them.
func (v *View) Prices(name string) []*meter.Price { return v.prices.byName[name] }

func newPrices(list []*routerv1.Price) prices {
	out := prices{map[priceKey]*meter.Price{}, map[string][]*meter.Price{}}
	for _, m := range list {
		p := &meter.Price{Currency: m.GetCurrency(), Version: m.GetVersion()}
		good := true
		read := func(to *meter.Amount, text string) {
			if text == "" {
				return
			}
			n, ok := meter.ParseAmount(text)
			*to, good = n, good && ok
		}
		read(&p.Input, m.GetInput())
		read(&p.Cached, m.GetCachedInput())
		read(&p.Output, m.GetOutput())
		read(&p.Hourly, m.GetHourly())
		if !good { // beyond what anybody asks: better no price than a wrong one
			continue
		}
		if p.Tokens = m.GetInput() != "" || m.GetOutput() != ""; p.Tokens && m.GetCachedInput() == "" {
			p.Cached = p.Input
		}
		out.byBackend[priceKey{m.GetBackend(), m.GetModel()}] = p
		for _, name := range m.GetNames() {
			out.byName[name] = append(out.byName[name], p)
		}
	}
	return out
}
