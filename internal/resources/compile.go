package resources

import (
	"cmp"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Defaults of the fields of an InferenceWorkerSet.
const (
	defaultPort       = 8000
	defaultEventsPort = 5557
	defaultReplayPort = 5558
	defaultMetrics    = "/metrics"
	defaultInterval   = 250 * time.Millisecond
)

// Catalog is the compiled form of a folder. It does not change.
type Catalog struct {
	// Sets that some pool serves, by name.
	Sets []*WorkerSet
	// Pools by name.
	Pools []*Pool
	// Models by the name that clients ask for: models, aliases and LoRAs.
	Models map[string]*Model
}

// WorkerSet is an InferenceWorkerSet.
type WorkerSet struct {
	// Name is namespace/name.
	Name     string
	Workers  []Worker
	Profiles []*Profile
	// Ranks of each worker, at least 1.
	Ranks int
	// Class of the accelerator, in lower case; empty when not given.
	Class            string
	TokenizerPath    string
	PassTokenIDs     bool
	KVTopic          string
	RemovalsLastCopy bool
	MetricsPath      string
	MetricsInterval  time.Duration
}

// Worker is one engine process.
type Worker struct {
	// UID is namespace.workerset.endpoint.
	UID  string
	Name string
	// Ranks holds the id of each engine rank: uid/0, uid/1, …
	Ranks []string
	// URL of the HTTP server.
	URL string
	// KVEvents and KVReplay are the ZMQ addresses of rank 0; empty when the
	// engine publishes no events.
	KVEvents, KVReplay string
}

// Profile is one model or LoRA of a worker set.
type Profile struct {
	// ID is namespace/workerset/upstream model.
	ID  string
	Set *WorkerSet
	// UpstreamModel is the name that the engine expects in a request, and
	// Root the base model behind it.
	UpstreamModel, Root string
	// LoRA is the adapter's name; empty for the base model.
	LoRA string
	// MaxModelLen is 0 when the engine is to be asked.
	MaxModelLen int
}

// Pool is an InferencePool, or the implicit one of a namespace without any.
type Pool struct {
	// Name is namespace/name.
	Name     string
	Implicit bool
	Sets     []*WorkerSet
}

// Model is a name that clients may ask for.
type Model struct {
	Name string
	// Root is the model behind an alias or LoRA; equals Name for a model.
	Root string
	// Offers are the profiles that serve it, each with its pools.
	Offers []Offer
}

// Offer is a profile that serves a model in a pool.
type Offer struct {
	Pool    *Pool
	Profile *Profile
}

// compile resolves references. Problems go to the objects' report; the result
// is of use only when none of them is an error.
func compile(objects []*object) *Catalog {
	sets := map[string]*object{}
	poolsOf := map[string][]*object{}
	var namespaces []string
	for _, o := range objects {
		if !slices.Contains(namespaces, o.namespace) {
			namespaces = append(namespaces, o.namespace)
		}
		if o.set != nil {
			sets[o.id()] = o
		} else {
			poolsOf[o.namespace] = append(poolsOf[o.namespace], o)
		}
	}
	slices.Sort(namespaces)
	c := &Catalog{Models: map[string]*Model{}}
	compiled := map[string]*WorkerSet{}
	use := func(o *object) *WorkerSet {
		if compiled[o.id()] == nil {
			compiled[o.id()] = o.compileSet()
			c.Sets = append(c.Sets, compiled[o.id()])
		}
		return compiled[o.id()]
	}
	for _, ns := range namespaces {
		if len(poolsOf[ns]) == 0 {
			p := &Pool{Name: ns + "/default", Implicit: true}
			for _, o := range objects {
				if o.set != nil && o.namespace == ns {
					p.Sets = append(p.Sets, use(o))
				}
			}
			c.Pools = append(c.Pools, p)
		}
		for _, o := range poolsOf[ns] {
			c.Pools = append(c.Pools, o.compilePool(sets, use))
		}
	}
	for id, o := range sets {
		if compiled[id] == nil {
			o.warnf("", "no InferencePool of the namespace names this set: it is not served")
		}
	}
	byName := func(a, b *WorkerSet) int { return cmp.Compare(a.Name, b.Name) }
	slices.SortFunc(c.Sets, byName)
	slices.SortFunc(c.Pools, func(a, b *Pool) int { return cmp.Compare(a.Name, b.Name) })
	for _, p := range c.Pools {
		slices.SortFunc(p.Sets, byName)
		for _, s := range p.Sets {
			for _, profile := range s.Profiles {
				c.offer(p, profile, sets[s.Name].set.Spec.Models)
			}
		}
	}
	return c
}

// offer enters a profile under all of its names.
func (c *Catalog) offer(p *Pool, profile *Profile, models []v1alpha1.WorkerModel) {
	add := func(name, root string) {
		m := c.Models[name]
		if m == nil {
			m = &Model{Name: name, Root: root}
			c.Models[name] = m
		}
		m.Offers = append(m.Offers, Offer{p, profile})
	}
	for _, m := range models {
		root := string(m.Name)
		if root == profile.UpstreamModel && profile.LoRA == "" {
			add(root, root)
			for _, a := range m.Aliases {
				add(string(a), root)
			}
		}
		for _, l := range m.LoRAs {
			if string(l.Name) == profile.LoRA && root == profile.Root {
				add(string(l.Name), root)
				for _, a := range l.Aliases {
					add(string(a), root)
				}
			}
		}
	}
}

func (o *object) compilePool(sets map[string]*object, use func(*object) *WorkerSet) *Pool {
	p := &Pool{Name: o.id()}
	for i, d := range o.pool.Spec.Destinations {
		field := "spec.destinations[" + strconv.Itoa(i) + "]"
		switch {
		case d.Kind == v1alpha1.KindInferenceWorkerSet:
			if set := sets[o.namespace+"/"+string(d.Name)]; set != nil {
				p.Sets = append(p.Sets, use(set))
			} else {
				o.errorf(field+".name", "there is no InferenceWorkerSet %q in namespace %q", abbreviate(string(d.Name)), o.namespace)
			}
		case groupOf(d) == gaieGroup:
			o.warnf(field, "needs the Kubernetes source: the destination has no workers")
		default:
			o.warnf(field, "kind %s is not supported yet: the destination gets no requests", d.Kind)
		}
	}
	return p
}

func (o *object) compileSet() *WorkerSet {
	spec := &o.set.Spec
	s := &WorkerSet{
		Name: o.id(), Ranks: 1, MetricsPath: defaultMetrics, MetricsInterval: defaultInterval,
	}
	if spec.DataParallel != nil {
		s.Ranks = max(1, int(spec.DataParallel.Ranks))
	}
	if a := spec.Accelerator; a != nil {
		s.Class = strings.ToLower(a.Class)
	}
	if t := spec.Tokenizer; t != nil {
		s.TokenizerPath, s.PassTokenIDs = t.Path, t.PassTokenIDs
	}
	if m := spec.Metrics; m != nil {
		s.MetricsPath = cmp.Or(m.Path, s.MetricsPath)
		s.MetricsInterval = m.Interval.Or(s.MetricsInterval)
	}
	if e := spec.KVEvents; e != nil {
		s.KVTopic, s.RemovalsLastCopy = e.Topic, e.Removals == v1alpha1.RemovalsLastCopy
	}
	for _, e := range spec.Endpoints {
		w := o.compileEndpoint(e)
		for rank := range s.Ranks {
			w.Ranks = append(w.Ranks, w.UID+"/"+strconv.Itoa(rank))
		}
		s.Workers = append(s.Workers, w)
	}
	for _, m := range spec.Models {
		profile := func(upstream, lora string) {
			s.Profiles = append(s.Profiles, &Profile{
				ID: s.Name + "/" + upstream, Set: s, UpstreamModel: upstream, Root: string(m.Name), LoRA: lora,
				MaxModelLen: int(m.MaxModelLen),
			})
		}
		profile(string(m.Name), "")
		for _, l := range m.LoRAs {
			profile(string(l.Name), string(l.Name))
		}
	}
	return s
}

func (o *object) compileEndpoint(e v1alpha1.WorkerEndpoint) Worker {
	w := Worker{UID: o.namespace + "." + o.name + "." + string(e.Name), Name: string(e.Name), KVEvents: string(e.KVEvents), KVReplay: string(e.KVReplay)}
	w.URL, _ = baseURL(e.Address, o.set.Spec.Port) // validated
	// Only a port that is written says that every endpoint publishes there.
	if k := o.set.Spec.KVEvents; k != nil && k.Port != 0 && w.KVEvents == "" {
		if u, err := url.Parse(w.URL); err == nil {
			w.KVEvents = "tcp://" + net.JoinHostPort(u.Hostname(), strconv.Itoa(int(k.Port)))
			w.KVReplay = "tcp://" + net.JoinHostPort(u.Hostname(), strconv.Itoa(int(cmp.Or(k.ReplayPort, defaultReplayPort))))
		}
	}
	return w
}
