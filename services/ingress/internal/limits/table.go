package limits

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/policy"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// Table holds the limits of one version of the catalog.
type Table struct {
	tenants  map[string][]*Limit
	policies []policyLimits
	headers  bool
	tags     []string
}

type policyLimits struct {
	pools    []string
	compiled *policy.Policy
	spec     string // it was compiled from
	limits   []*Limit
}

// New compiles the limits of tenants and policies. Policies that did not change
// are taken over from the former table, if there is one. Limits that cannot be
// understood, of a newer router say, deny: a limit that nobody keeps is none.
// The error names them; the Table can be used.
func New(tenants []*routerv1.Tenant, policies []*routerv1.LimitPolicy, former *Table) (*Table, error) {
	t := &Table{tenants: make(map[string][]*Limit, len(tenants))}
	var faults []error
	compile := func(owner string, isPolicy, dryRun bool, list []*routerv1.Limit) (out []*Limit) {
		for _, in := range list {
			l, err := Compile(owner, isPolicy, in)
			if err != nil {
				faults = append(faults, err)
				l = &Limit{Name: in.GetName(), Owner: owner, Policy: isPolicy, Count: Requests, Scale: 1, Shadow: in.GetShadow(), perTenant: true,
					Calendar: &routerv1.Calendar{Period: routerv1.CalendarPeriod_CALENDAR_PERIOD_DAY}}
			}
			l.Shadow = l.Shadow || dryRun
			l.settle()
			out = append(out, l)
		}
		return out
	}
	for _, m := range tenants {
		if list := compile(m.GetName(), false, false, m.GetLimits()); len(list) > 0 {
			t.tenants[m.GetName()] = list
		}
	}
	for _, m := range policies {
		p := policyLimits{pools: m.GetPools(), spec: m.GetSpecJson(), limits: compile(m.GetName(), true, m.GetDryRun(), m.GetLimits())}
		var err error
		if p.compiled, err = compilePolicy(m, former); err == nil && p.compiled.Limits() != len(p.limits) {
			p.compiled, err = nil, errors.New("limits and their matches differ in number")
		}
		if err != nil { // then they hold for all
			faults = append(faults, fmt.Errorf("limits of policy %s: %w", m.GetName(), err))
		} else {
			t.headers = t.headers || p.compiled.LimitsReadHeaders()
			t.tags = append(t.tags, p.compiled.LimitsReadTags()...)
		}
		t.policies = append(t.policies, p)
	}
	return t, errors.Join(faults...)
}

func compilePolicy(m *routerv1.LimitPolicy, former *Table) (*policy.Policy, error) {
	namespace, name, _ := strings.Cut(m.GetName(), "/")
	if former != nil {
		for i := range former.policies {
			if p := &former.policies[i]; p.spec == m.GetSpecJson() && p.compiled != nil && p.compiled.ID() == m.GetName() {
				return p.compiled, nil
			}
		}
	}
	in := &v1alpha1.InferencePolicy{}
	in.Namespace, in.Name = namespace, name
	if err := json.Unmarshal([]byte(m.GetSpecJson()), &in.Spec); err != nil {
		return nil, err
	}
	in.Spec.Rules = nil
	compiled, faults := policy.Compile(in)
	if compiled == nil {
		return nil, fmt.Errorf("%s: %s", faults[0].Field, faults[0].Message)
	}
	return compiled, nil
}

// Empty reports whether nothing is limited.
func (t *Table) Empty() bool { return t == nil || len(t.tenants) == 0 && len(t.policies) == 0 }

// ReadsHeaders reports whether a limit of a policy looks at headers.
func (t *Table) ReadsHeaders() bool { return t != nil && t.headers }

// ReadTags are the tags that limits of policies look at: names, or beginnings of
// names with a star.
func (t *Table) ReadTags() []string {
	if t == nil {
		return nil
	}
	return t.tags
}

// Request is what decides which limits a request must fit.
type Request struct {
	// Tenants of the caller as namespace/name, nearest first.
	Tenants []string
	// User and Key of the caller; those who have none count together.
	User, Key string
	// Model that is asked for; aliases and adapters count as what is behind them.
	Model string
	// Pool that the request goes to as namespace/name; empty: not known, so that
	// policies of all pools hold.
	Pool string
	// Policy returns what matches of policies may ask. It is called at most once,
	// and not at all without policies.
	Policy func() *policy.Request
}

// Charge is one count that the request must fit.
type Charge struct {
	Limit  *Limit
	Bucket *limiterv1.Bucket // do not modify
	// Own says that the caller may know of the limit and its level: it is none
	// that other tenants use too.
	Own bool
}

// Organisation whose buckets the charge's is one of, if not that of the caller:
// all organisations share the limit.
func (c *Charge) Organisation() string {
	if l := c.Limit; l.Policy && !l.perTenant && !l.perUser && !l.perKey {
		return "policy:" + l.Owner
	}
	return ""
}

// Charges appends what a request must fit: limits of its tenant, of those
// above, and of policies.
func (t *Table) Charges(dst []Charge, r *Request) []Charge {
	if t == nil {
		return dst
	}
	for i, tenant := range r.Tenants {
		for _, l := range t.tenants[tenant] {
			dst = append(dst, l.charge("", i == 0, r))
		}
	}
	var asked *policy.Request
	for i := range t.policies {
		p := &t.policies[i]
		if r.Pool != "" && !slices.Contains(p.pools, r.Pool) {
			continue
		}
		for j, l := range p.limits {
			if p.compiled != nil {
				if asked == nil {
					asked = r.Policy()
				}
				if !p.compiled.Limited(j, asked) {
					continue
				}
			}
			tenant := ""
			if l.perTenant && len(r.Tenants) > 0 {
				tenant = r.Tenants[0]
			}
			dst = append(dst, l.charge(tenant, tenant != "", r))
		}
	}
	return dst
}

// charge is that of a request. tenant is given where the limit's owner is none.
func (l *Limit) charge(tenant string, own bool, r *Request) Charge {
	c := Charge{Limit: l, Bucket: l.single, Own: own || l.perUser && r.User != "" || l.perKey && r.Key != ""}
	if c.Bucket != nil {
		return c
	}
	b := make([]byte, 0, 128)
	b = append(b, l.prefix...)
	if tenant != "" {
		b = append(append(b, "/tenant="...), tenant...)
	}
	if l.perUser {
		b = appendName(append(b, "/user="...), r.User)
	}
	if l.perKey {
		b = appendName(append(b, "/key="...), r.Key)
	}
	if l.perModel {
		b = append(append(b, "/model="...), r.Model...)
	}
	c.Bucket = l.bucket(string(b))
	return c
}

// appendName appends a name that callers may have chosen. One that is long or
// has odd characters is replaced by a digest, which no plain name looks like.
func appendName(dst []byte, s string) []byte {
	plain := len(s) <= 64
	for i := 0; plain && i < len(s); i++ {
		c := s[i]
		plain = 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("._@+-:#", c) >= 0
	}
	if plain {
		return append(dst, s...)
	}
	sum := sha256.Sum256([]byte(s))
	return append(append(dst, '~'), hex.EncodeToString(sum[:16])...)
}
