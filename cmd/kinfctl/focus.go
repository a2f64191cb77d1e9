package main

import (
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
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
	name, text  string
	tokens      uint64
	cost, price string
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
		})
		if err != nil {
			return err
		}
		for _, row := range answer.GetRows() {
			if err := focusRows(out, row, account, currency); err != nil {
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
	if s.GetCurrency() != "" {
		currency = s.GetCurrency()
	}
	start := row.GetStart().AsTime()
	month := time.Date(start.Year(), start.Month(), 1, 0, 0, 0, 0, time.UTC)
	tags, err := json.Marshal(map[string]string{"cost_center": row.GetCostCenter(), "organisation": row.GetOrganisation(), "model": row.GetModel()})
	if err != nil {
		return err
	}
	tenant := cmp.Or(row.GetTenant(), "-")
	resource := row.GetBackend() + "/" + row.GetModel()
	for _, m := range []meterRow{
		{"Input Tokens", "Prompt tokens that were not cached", s.GetInput() - min(s.GetCachedInput(), s.GetInput()), s.GetInputCost(), s.GetInputPrice()},
		{"Cached Input Tokens", "Prompt tokens from the prefix cache", s.GetCachedInput(), s.GetCachedInputCost(), s.GetCachedInputPrice()},
		{"Output Tokens", "Generated tokens", s.GetOutput(), s.GetOutputCost(), s.GetOutputPrice()},
	} {
		if m.tokens == 0 {
			continue
		}
		cost := cmp.Or(m.cost, "0")
		sku := resource + "/" + strings.ToLower(strings.ReplaceAll(m.name, " ", "-"))
		priceID := ""
		if row.GetPriceVersion() != "" && m.price != "" {
			priceID = row.GetPriceVersion() + "/" + strings.ToLower(strings.ReplaceAll(m.name, " ", "-"))
		}
		values := map[string]string{
			"BilledCost": cost, "EffectiveCost": cost, "ListCost": cost, "ContractedCost": cost,
			"BillingAccountId": account, "BillingAccountName": account, "BillingCurrency": currency,
			"BillingPeriodStart": focusTime(month), "BillingPeriodEnd": focusTime(month.AddDate(0, 1, 0)),
			"ChargePeriodStart": focusTime(start), "ChargePeriodEnd": focusTime(start.Add(time.Hour)),
			"ChargeCategory": "Usage", "ChargeFrequency": "Usage-Based", "ChargeDescription": m.text + " of " + row.GetModel() + " for " + tenant,
			"ConsumedQuantity": strconv.FormatUint(m.tokens, 10), "ConsumedUnit": "Tokens", "PricingQuantity": millions(m.tokens), "PricingUnit": "1000000 Tokens",
			"PricingCategory": "Standard", "ListUnitPrice": m.price, "ContractedUnitPrice": m.price,
			"InvoiceIssuerName": account, "ProviderName": account, "PublisherName": account,
			"ResourceId": resource, "ResourceName": row.GetModel(), "ResourceType": "Model",
			"ServiceCategory": "AI and Machine Learning", "ServiceSubcategory": "Generative AI", "ServiceName": "LLM inference",
			"SkuId": sku, "SkuMeter": m.name, "SkuPriceId": priceID,
			"SubAccountId": tenant, "SubAccountName": tenant, "SubAccountType": "Tenant", "Tags": string(tags),
		}
		line := make([]string, len(focusColumns))
		for i, c := range focusColumns {
			line[i] = values[c]
		}
		if err := out.Write(line); err != nil {
			return fmt.Errorf("write CSV: %w", err)
		}
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
