package catalog

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// access is the part of the message that says who may what. It depends on
// nothing but the resources.
func access(c *resources.Catalog) *routerv1.Catalog {
	out := &routerv1.Catalog{Guarded: c.Guarded}
	for _, b := range c.Backends {
		out.Backends = append(out.Backends, backend(b))
	}
	for _, t := range c.Tenants {
		out.Tenants = append(out.Tenants, tenant(t))
	}
	out.Objectives = objectives(c)
	for _, p := range c.LimitPolicies {
		m := &routerv1.LimitPolicy{Name: p.Name, Pools: p.Pools, DryRun: p.Spec.DryRun}
		for i := range p.Spec.Limits {
			m.Limits = append(m.Limits, limit(&p.Spec.Limits[i].Limit))
		}
		spec := *p.Spec
		spec.Rules = nil
		text, err := json.Marshal(spec)
		if err != nil { // cannot be: it was read from JSON or YAML
			continue
		}
		m.SpecJson = string(text)
		out.LimitPolicies = append(out.LimitPolicies, m)
	}
	out.CustomTags = customTags(c)
	return out
}

func backend(b *resources.Backend) *routerv1.Backend {
	m := &routerv1.Backend{
		Name: b.Name, PathPrefix: b.Spec.PathPrefix, DefaultQos: string(b.Spec.DefaultQoS), MaxBody: b.Body, MaxHeader: b.Headers,
		IdleTimeout: durationpb.New(b.Idle), TotalTimeout: durationpb.New(b.Total),
	}
	for _, h := range b.Spec.Hostnames {
		m.Hostnames = append(m.Hostnames, string(h))
	}
	if b.Pool != nil {
		m.Pool = b.Pool.Name
	}
	a := b.Spec.Authentication
	if a == nil {
		return m
	}
	m.ApiKeys = a.APIKeys != nil
	for _, j := range a.JWT {
		m.Jwt = append(m.Jwt, &routerv1.JwtIssuer{Issuer: string(j.Issuer), Audiences: j.Audiences, JwksUri: string(j.JWKSURI), TenantClaim: j.TenantClaim})
	}
	if a.ServiceAccounts != nil {
		m.ServiceAccountAudience = a.ServiceAccounts.Audience
	}
	if b.Anonymous != nil {
		m.AnonymousTenant = b.Anonymous.Name
	}
	return m
}

func tenant(t *resources.Tenant) *routerv1.Tenant {
	m := &routerv1.Tenant{
		Name: t.Name, Orphan: t.Orphan, Qos: string(t.QoS), Weight: uint32(max(t.Spec.Weight, 1)), CostCenter: t.CostCenter,
		DefaultMaxTokens: uint32(t.DefaultTokens), MaximumMaxTokens: uint32(t.MaximumTokens), CacheScope: string(v1alpha1.CacheScopeTenant),
	}
	if t.Parent != nil {
		m.Parent = t.Parent.Name
	}
	if t.Spec.Cache != nil && t.Spec.Cache.Scope != "" {
		m.CacheScope = string(t.Spec.Cache.Scope)
	}
	for i := range t.Keys {
		k := &t.Keys[i]
		key := &routerv1.Key{Id: k.ID, Sha256: k.SHA256[:], User: k.User, Revoked: !k.Revoked.IsZero()}
		if !k.Expires.IsZero() {
			key.ExpiresUnix = max(1, k.Expires.Unix()) // 0 would be never
		}
		m.Keys = append(m.Keys, key)
	}
	for _, id := range t.Spec.Identities {
		switch {
		case id.Claim != nil:
			m.Claims = append(m.Claims, &routerv1.ClaimIdentity{Issuer: string(id.Claim.Issuer), Name: id.Claim.Name, Value: id.Claim.Value})
		case id.ServiceAccount != nil:
			m.ServiceAccounts = append(m.ServiceAccounts, string(id.ServiceAccount.Namespace)+"/"+string(id.ServiceAccount.Name))
		}
	}
	for i := range t.Spec.Limits {
		m.Limits = append(m.Limits, limit(&t.Spec.Limits[i]))
	}
	return m
}

var (
	scopes = map[v1alpha1.LimitScope]routerv1.LimitScope{
		v1alpha1.PerTenant: routerv1.LimitScope_LIMIT_SCOPE_TENANT, v1alpha1.PerUser: routerv1.LimitScope_LIMIT_SCOPE_USER,
		v1alpha1.PerKey: routerv1.LimitScope_LIMIT_SCOPE_KEY, v1alpha1.PerModel: routerv1.LimitScope_LIMIT_SCOPE_MODEL,
	}
	periods = map[v1alpha1.CalendarPeriod]routerv1.CalendarPeriod{
		v1alpha1.PeriodHour: routerv1.CalendarPeriod_CALENDAR_PERIOD_HOUR, v1alpha1.PeriodDay: routerv1.CalendarPeriod_CALENDAR_PERIOD_DAY,
		v1alpha1.PeriodWeek: routerv1.CalendarPeriod_CALENDAR_PERIOD_WEEK, v1alpha1.PeriodMonth: routerv1.CalendarPeriod_CALENDAR_PERIOD_MONTH,
	}
	unavailable = map[v1alpha1.OnUnavailable]routerv1.OnUnavailable{
		v1alpha1.UnavailableAllow: routerv1.OnUnavailable_ON_UNAVAILABLE_ALLOW, v1alpha1.UnavailableDeny: routerv1.OnUnavailable_ON_UNAVAILABLE_DENY,
	}
)

func limit(l *v1alpha1.Limit) *routerv1.Limit {
	m := &routerv1.Limit{Name: string(l.Name), Shadow: l.Shadow, OnUnavailable: routerv1.OnUnavailable_ON_UNAVAILABLE_LOCAL}
	if to, ok := unavailable[l.OnUnavailable]; ok {
		m.OnUnavailable = to
	}
	for _, s := range l.Per {
		m.Per = append(m.Per, scopes[s])
	}
	if len(m.Per) == 0 {
		m.Per = []routerv1.LimitScope{routerv1.LimitScope_LIMIT_SCOPE_TENANT}
	}
	switch {
	case l.Tokens != nil:
		m.Quantity = &routerv1.Limit_Tokens{Tokens: tokens(l.Tokens)}
	case l.Requests != nil:
		m.Quantity = &routerv1.Limit_Requests{Requests: *l.Requests}
	case l.Concurrency != nil:
		m.Quantity = &routerv1.Limit_Concurrency{Concurrency: int64(*l.Concurrency)}
	case l.Cost != nil:
		m.Quantity = &routerv1.Limit_Cost{Cost: &routerv1.CostLimit{AmountMicros: micros(l.Cost.Amount), Currency: string(l.Cost.Currency)}}
	case l.GPUSeconds != nil:
		m.Quantity = &routerv1.Limit_GpuSeconds{GpuSeconds: *l.GPUSeconds}
	}
	if window := l.Window.Or(0); window > 0 {
		m.Window, m.Burst = durationpb.New(window), durationpb.New(l.Burst.Or(window))
	}
	if l.Calendar != nil {
		m.Calendar = &routerv1.Calendar{Period: periods[l.Calendar.Period], TimeZone: l.Calendar.TimeZone}
		if m.Calendar.TimeZone == "" {
			m.Calendar.TimeZone = time.UTC.String()
		}
	}
	return m
}

func tokens(l *v1alpha1.TokenLimit) *routerv1.TokenLimit {
	switch {
	case l.Input != nil:
		return &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_INPUT, Amount: *l.Input}
	case l.CachedInput != nil:
		return &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_CACHED_INPUT, Amount: *l.CachedInput}
	case l.Output != nil:
		return &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_OUTPUT, Amount: *l.Output}
	}
	m := &routerv1.TokenLimit{Sort: routerv1.TokenSort_TOKEN_SORT_TOTAL, InputMilli: 1000, CachedInputMilli: 1000, OutputMilli: 1000}
	if l.Total != nil { // always: one of the four is given
		m.Amount = *l.Total
	}
	if w := l.Weights; w != nil {
		m.InputMilli, m.CachedInputMilli, m.OutputMilli = milli(w.Input), milli(w.CachedInput), milli(w.Output)
	}
	return m
}

func milli(weight *float64) int64 {
	if weight == nil {
		return 1000
	}
	return int64(math.Round(*weight * 1000))
}

// micros reads a decimal of at most 12 digits before the point.
func micros(d v1alpha1.Decimal) int64 {
	whole, fraction, _ := strings.Cut(string(d), ".")
	fraction = (fraction + "000000")[:6]
	n, err := strconv.ParseInt(whole+fraction, 10, 64)
	if err != nil { // cannot be: the schema says so
		return 0
	}
	return n
}
