package resources

import (
	"fmt"
	"maps"
	"slices"

	"github.com/kinference/kinference/api/v1alpha1"
)

// compileSelected makes a worker set of what a pool selects; nil after a fault.
func (c *compiler) compileSelected(o *object, pool *v1alpha1.InferencePoolSpec) *WorkerSet {
	if c.known[place{v1alpha1.KindInferenceWorkerSet, o.GetNamespace()}][o.GetName()] != nil {
		o.errorf("metadata.name", "an InferenceWorkerSet has this name too: the workers of both would be mixed up")
		return nil
	}
	if pool.Models == nil && c.Served == nil && c.Pods != nil {
		o.warnf("spec.models", "are not given, and engines are not asked: no model is served")
	}
	spec := &v1alpha1.InferenceWorkerSetSpec{Selector: pool.Selector, Models: pool.Models}
	return c.compileWorkers(o.id(), nil, spec, pool.Port)
}

// compileExtension makes a worker set of what a pool of the inference extension
// selects, once; nil when there is none. It serves what the engines say.
func (c *compiler) compileExtension(o *object, field string, d v1alpha1.Destination) *WorkerSet {
	if c.Extension == nil {
		o.warnf(field, "needs the Kubernetes source: here, pools of the inference extension are not known")
		return nil
	}
	name := string(d.Name)
	pool := c.Extension(o.GetNamespace(), name)
	if pool == nil {
		o.because(Missing, severity(!c.Strict), field+".name",
			fmt.Sprintf("there is no %s %q of the group %s in namespace %q", d.Kind, abbreviate(name), d.Group, o.GetNamespace()))
		return nil
	}
	id := o.GetNamespace() + "/" + name
	if c.selects(o.GetNamespace(), name) {
		o.errorf(field+".name", "a worker set or selector of an InferencePool has the name %q too: the workers of both would be mixed up", abbreviate(name))
		return nil
	}
	if c.extensions[id] == nil {
		labels := map[string]v1alpha1.LabelValue{}
		for k, v := range pool.Selector {
			labels[k] = v1alpha1.LabelValue(v)
		}
		spec := &v1alpha1.InferenceWorkerSetSpec{Selector: &v1alpha1.LabelSelector{MatchLabels: labels}}
		c.extensions[id] = c.compileWorkers(id, nil, spec, pool.Ports...)
		c.catalog.Sets = append(c.catalog.Sets, c.extensions[id])
	}
	return c.extensions[id]
}

// selects tells whether a resource of ours makes a worker set with this name.
func (c *compiler) selects(namespace, name string) bool {
	if c.known[place{v1alpha1.KindInferenceWorkerSet, namespace}][name] != nil {
		return true
	}
	o := c.known[place{v1alpha1.KindInferencePool, namespace}][name]
	return o != nil && o.Object.(*v1alpha1.InferencePool).Spec.Selector != nil
}

// servedBy lists the models that all of the workers serve which have answered.
func (c *compiler) servedBy(workers []Worker) []v1alpha1.WorkerModel {
	answers, count := 0, map[string]int{}
	for i := range workers {
		names := c.Served(workers[i].UID)
		if names == nil {
			continue
		}
		answers++
		for _, name := range slices.Compact(slices.Sorted(slices.Values(names))) {
			count[name]++
		}
	}
	var out []v1alpha1.WorkerModel
	for _, name := range slices.Sorted(maps.Keys(count)) {
		if count[name] == answers {
			out = append(out, v1alpha1.WorkerModel{Name: v1alpha1.ModelName(name)})
		}
	}
	return out
}
