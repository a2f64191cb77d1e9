package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/big"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
)

// focusColumns are those of the Cost and Usage dataset of FOCUS 1.2
// (https://focus.finops.org/focus-specification/v1-2/) that say something here:
// all mandatory ones, and the conditional ones on consumption, SKUs, resources, sub
// accounts and tags.
var focusColumns = []string{
	"BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass",
	"ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit", "ContractedCost", "ContractedUnitPrice",
	"EffectiveCost", "InvoiceIssuerName", "ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "ProviderName", "PublisherName",
	"ResourceId", "ResourceName", "ResourceType", "ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter", "SkuPriceId",
	"SubAccountId", "SubAccountName", "SubAccountType", "Tags",
}

// meterRow is one meter of a row of the ledger.
type meterRow struct {
	name, text         string
	quantity, unit     string // what was consumed
	priced, pricedUnit string // in the unit that has the price
	cost, price        string
}

// tokensRow is a meter of tokens.
func tokensRow(name, text string, tokens uint64, cost, price string) meterRow {
	return meterRow{name, text, positive(tokens), "Tokens", millions(tokens), "1000000 Tokens", cost, price}
}

// timeRow is a meter of the time of workers.
func timeRow(text string, seconds float64, cost, price string) meterRow {
	micros := uint64(math.Round(max(seconds, 0) * 1e6))
	row := meterRow{"Worker Time", text, "", "Seconds", new(big.Rat).SetFrac64(int64(micros), 3_600_000_000).FloatString(12), "Hours", cost, price}
	if micros > 0 {
		row.quantity = millions(micros)
	}
	return row
}

// positive is a number, empty for none.
func positive(n uint64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(n, 10)
}

// exportFocus writes the rows of a time, a day at a time.
func exportFocus(ctx context.Context, w io.Writer, client accountingv1connect.AccountingServiceClient, filter *accountingv1.Filter, account, currency string) error {
	out := csv.NewWriter(w)
	if err := out.Write(focusColumns); err != nil {
		return err
	}
	from, to := filter.GetFrom().AsTime(), filter.GetTo().AsTime()
	for from.Before(to) {
		next := from.Truncate(24 * time.Hour).Add(24 * time.Hour)
		if next.After(to) {
			next = to
		}
		answer, err := client.QueryUsage(ctx, &accountingv1.QueryUsageRequest{
			Filter: &accountingv1.Filter{From: timestamppb.New(from), To: timestamppb.New(next), Tenants: filter.GetTenants(), Organisations: filter.GetOrganisations(), Models: filter.GetModels()},
			Step:   accountingv1.Step_STEP_HOUR,
			GroupBy: []accountingv1.Group{
				accountingv1.Group_GROUP_TENANT, accountingv1.Group_GROUP_ORGANISATION, accountingv1.Group_GROUP_COST_CENTER, accountingv1.Group_GROUP_MODEL,
				accountingv1.Group_GROUP_BACKEND, accountingv1.Group_GROUP_PRICE_VERSION,
			},
			Workers: len(filter.GetTenants())+len(filter.GetOrganisations())+len(filter.GetModels()) == 0,
		})
		if err != nil {
			return err
		}
		for _, row := range answer.GetRows() {
			if err := focusRows(out, row, account, currency); err != nil {
				return err
			}
		}
		for _, t := range answer.GetWorkers() {
			if err := focusIdle(out, t, account, currency); err != nil {
				return err
			}
		}
		from = next
	}
	out.Flush()
	return out.Error()
}

// focusRows writes a row for each meter that counted something.
func focusRows(out *csv.Writer, row *accountingv1.Row, account, currency string) error {
	s := row.GetSums()
	tags, err := json.Marshal(map[string]string{"cost_center": row.GetCostCenter(), "organisation": row.GetOrganisation(), "model": row.GetModel()})
	if err != nil {
		return err
	}
	tenant := cmp.Or(row.GetTenant(), "-")
	f := focusRow{
		start: row.GetStart().AsTime(), account: account, currency: cmp.Or(s.GetCurrency(), currency), tenant: tenant,
		resource: row.GetBackend() + "/" + row.GetModel(), name: row.GetModel(), kind: "Model", version: row.GetPriceVersion(), tags: string(tags),
	}
	for _, m := range []meterRow{
		tokensRow("Input Tokens", "Prompt tokens that were not cached", s.GetInput()-min(s.GetCachedInput(), s.GetInput()), s.GetInputCost(), s.GetInputPrice()),
		tokensRow("Cached Input Tokens", "Prompt tokens from the prefix cache", s.GetCachedInput(), s.GetCachedInputCost(), s.GetCachedInputPrice()),
		tokensRow("Output Tokens", "Generated tokens", s.GetOutput(), s.GetOutputCost(), s.GetOutputPrice()),
		timeRow("Time of workers", s.GetGpuSeconds(), s.GetGpuCost(), s.GetHourlyPrice()),
	} {
		m.text += " of " + row.GetModel() + " for " + tenant
		if err := f.write(out, m); err != nil {
			return err
		}
	}
	return nil
}

// focusIdle writes what nobody used of workers that have a price.
func focusIdle(out *csv.Writer, t *accountingv1.WorkerTime, account, currency string) error {
	if t.GetPriceVersion() == "" {
		return nil
	}
	f := focusRow{
		start: t.GetStart().AsTime(), account: account, currency: cmp.Or(t.GetCurrency(), currency),
		resource: t.GetWorkerSet(), name: t.GetWorkerSet(), kind: "Worker Set", version: t.GetPriceVersion(),
	}
	for _, x := range []struct {
		state string
		m     meterRow
	}{
		{"idle", timeRow("Idle time of workers of "+t.GetWorkerSet(), t.GetIdleSeconds(), t.GetIdleCost(), t.GetHourlyPrice())},
		{"unexplained", timeRow("Busy time of workers of "+t.GetWorkerSet()+" that no request explains", t.GetOtherSeconds(), t.GetOtherCost(), t.GetHourlyPrice())},
	} {
		f.tags = `{"unallocated":"` + x.state + `"}`
		if err := f.write(out, x.m); err != nil {
			return err
		}
	}
	return nil
}

// focusRow is what the rows of several meters have in common.
type focusRow struct {
	start                     time.Time
	account, currency, tenant string // without a tenant it is nobody's
	resource, name, kind      string
	version, tags             string
}

// write writes the row of a meter, if that counted something.
func (f *focusRow) write(out *csv.Writer, m meterRow) error {
	if m.quantity == "" {
		return nil
	}
	month := time.Date(f.start.Year(), f.start.Month(), 1, 0, 0, 0, 0, time.UTC)
	cost := cmp.Or(m.cost, "0")
	meter := "/" + strings.ToLower(strings.ReplaceAll(m.name, " ", "-"))
	priceID, sub := "", ""
	if f.version != "" && m.price != "" {
		priceID = f.version + meter
	}
	if f.tenant != "" {
		sub = "Tenant"
	}
	values := map[string]string{
		"BilledCost": cost, "EffectiveCost": cost, "ListCost": cost, "ContractedCost": cost,
		"BillingAccountId": f.account, "BillingAccountName": f.account, "BillingCurrency": f.currency,
		"BillingPeriodStart": focusTime(month), "BillingPeriodEnd": focusTime(month.AddDate(0, 1, 0)),
		"ChargePeriodStart": focusTime(f.start), "ChargePeriodEnd": focusTime(f.start.Add(time.Hour)),
		"ChargeCategory": "Usage", "ChargeFrequency": "Usage-Based", "ChargeDescription": m.text,
		"ConsumedQuantity": m.quantity, "ConsumedUnit": m.unit, "PricingQuantity": m.priced, "PricingUnit": m.pricedUnit,
		"PricingCategory": "Standard", "ListUnitPrice": m.price, "ContractedUnitPrice": m.price,
		"InvoiceIssuerName": f.account, "ProviderName": f.account, "PublisherName": f.account,
		"ResourceId": f.resource, "ResourceName": f.name, "ResourceType": f.kind,
		"ServiceCategory": "AI and Machine Learning", "ServiceSubcategory": "Generative AI", "ServiceName": "LLM inference",
		"SkuId": f.resource + meter, "SkuMeter": m.name, "SkuPriceId": priceID,
		"SubAccountId": f.tenant, "SubAccountName": f.tenant, "SubAccountType": sub, "Tags": f.tags,
	}
	line := make([]string, len(focusColumns))
	for i, c := range focusColumns {
		line[i] = values[c]
	}
	if err := out.Write(line); err != nil {
		return fmt.Errorf("write CSV: %w", err)
	}
	return nil
}

func focusTime(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05Z") }

// millions divides by a million, exactly.
func millions(n uint64) string {
	whole, part := n/1_000_000, n%1_000_000
	if part == 0 {
		return strconv.FormatUint(whole, 10)
	}
	return strconv.FormatUint(whole, 10) + "." + strings.TrimRight(fmt.Sprintf("%06d", part), "0")
}
