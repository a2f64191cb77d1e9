package catalog

import (
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// objectives are those of pools and tenants, in the order of the resources.
func objectives(c *resources.Catalog) []*routerv1.Objective {
	var out []*routerv1.Objective
	for _, p := range c.Pools {
		for i := range p.Objectives {
			out = append(out, objective(v1alpha1.KindInferencePool, p.Name, &p.Objectives[i]))
		}
	}
	for _, t := range c.Tenants {
		for i := range t.Spec.Objectives {
			out = append(out, objective(v1alpha1.KindInferenceTenant, t.Name, &t.Spec.Objectives[i]))
		}
	}
	return out
}

func objective(kind, owner string, o *v1alpha1.Objective) *routerv1.Objective {
	m := &routerv1.Objective{Kind: kind, Owner: owner, Name: string(o.Name), Indicator: string(o.Indicator), Target: o.Target}
	if d, err := time.ParseDuration(string(o.Threshold)); err == nil {
		m.Threshold = durationpb.New(d)
	}
	m.Window = durationpb.New(o.Window.Or(30 * 24 * time.Hour))
	if o.Match != nil {
		namespace, _, _ := strings.Cut(owner, "/")
		for _, name := range o.Match.Model {
			m.Models = append(m.Models, string(name))
		}
		for _, name := range o.Match.Tenant {
			m.Tenants = append(m.Tenants, namespace+"/"+string(name))
		}
		for _, q := range o.Match.QoS {
			m.Qos = append(m.Qos, string(q))
		}
	}
	return m
}
