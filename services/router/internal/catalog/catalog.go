// Package catalog publishes the compiled resources, together with what was
// learned from the workers, as one versioned message.
//
// The router applies resources and asks for a rebuild when the fleet has
// changed; any number of watchers follow. A version is never changed once
// published, so readers share it without a lock. Publisher is safe for
// concurrent use.
package catalog

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/evaluate"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/parity"
)

// Version is one state of the catalog. Do not change it.
type Version struct {
	Number    uint64
	Resources *resources.Catalog
	Plan      *plan.Plan // of Resources
	Message   *routerv1.WatchCatalogResponse

	access *routerv1.Catalog // of Resources
}

// States tells what is known of the workers: *fleet.Table.
type States interface {
	evaluate.States
	BlockSize(set string) int
	MaxModelLen(uids []string, model string) int
}

var _ States = (*fleet.Table)(nil)

// Verdicts tells whether token ids are those of the engines: *parity.Tokens. Nil
// is for nothing known.
type Verdicts interface {
	Profile(now time.Time, id string, uids []string) parity.Verdict
}

var _ Verdicts = (*parity.Tokens)(nil)

// Publisher holds the newest version. Use NewPublisher.
type Publisher struct {
	mu      sync.Mutex
	now     *Version
	changed chan struct{} // closed when now is replaced
}

// NewPublisher returns a publisher without a version. Numbers begin at the
// time of the first one in milliseconds, so that a router which restarted
// publishes larger ones than its predecessor.
func NewPublisher() *Publisher {
	return &Publisher{changed: make(chan struct{})}
}

// Current returns the newest version, nil before the first, and a channel
// that closes when there is a newer one.
func (p *Publisher) Current() (*Version, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now, p.changed
}

// Publish builds a version of the resources and what states and verdicts know
// now. Nothing happens when it equals the newest one. It returns the newest
// version.
func (p *Publisher) Publish(c *resources.Catalog, states States, verdicts Verdicts) *Version {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A tracker that has just started does not know the block sizes and epochs
	// yet, and without a size no prompt can be hashed: what was learned holds
	// until then.
	sizes, epochs := map[string]uint32{}, map[string]string{}
	if p.now != nil {
		for _, profile := range p.now.Message.Catalog.Profiles {
			sizes[profile.Id] = profile.BlockSize
		}
		epochs = p.now.Message.Catalog.Epochs
	}
	var prepared *plan.Plan
	var granted *routerv1.Catalog
	if p.now != nil && p.now.Resources == c {
		prepared, granted = p.now.Plan, p.now.access
	} else {
		prepared, granted = plan.New(c), access(c)
	}
	m := build(c, prepared, states, verdicts, sizes, epochs)
	m.Guarded, m.Backends, m.Tenants, m.LimitPolicies, m.Objectives = granted.Guarded, granted.Backends, granted.Tenants, granted.LimitPolicies, granted.Objectives
	m.CustomTags = granted.CustomTags
	if p.now != nil {
		m.Version = p.now.Number
		if p.now.Resources == c && proto.Equal(m, p.now.Message.Catalog) {
			return p.now
		}
		m.Version++
	} else {
		m.Version = uint64(time.Now().UnixMilli())
	}
	p.now = &Version{Number: m.Version, Resources: c, Plan: prepared, Message: &routerv1.WatchCatalogResponse{Catalog: m}, access: granted}
	close(p.changed)
	p.changed = make(chan struct{})
	return p.now
}

// build makes the message; sizes are the block sizes of profiles and epochs those
// of workers as known before.
func build(c *resources.Catalog, prepared *plan.Plan, states States, verdicts Verdicts, sizes map[string]uint32, epochs map[string]string) *routerv1.Catalog {
	out := &routerv1.Catalog{Epochs: map[string]string{}, Prices: prices(c)}
	now := time.Now()
	lengths := map[*resources.Profile]int{}
	ready := map[*resources.WorkerSet]bool{}
	for _, s := range c.Sets {
		out.WorkerSets = append(out.WorkerSets, &routerv1.WorkerSet{Name: s.Name, Accelerator: s.Class, MaxBatchedTokens: uint32(max(s.MaxBatchedTokens, 0))})
		var uids []string
		for i := range s.Workers {
			w := &s.Workers[i]
			uids = append(uids, w.UID)
			out.Workers = append(out.Workers, &routerv1.Worker{
				Uid: w.UID, WorkerSet: s.Name, Name: w.Name, Url: w.URL, Ranks: uint32(s.Ranks),
				KvEvents: w.KVEvents, KvReplay: w.KVReplay, KvTopic: s.KVTopic, RemovalsLastCopy: s.RemovalsLastCopy,
				MetricsPath: s.MetricsPath, MetricsInterval: durationpb.New(s.MetricsInterval),
			})
			for rank, id := range w.Ranks {
				state := states.Lookup(now, w.UID, id)
				ready[s] = ready[s] || state.Ready || state.Suspect
				// All ranks have one HTTP server, which is what makes token ids.
				if epoch := cmp.Or(state.Epoch, epochs[w.UID]); rank == 0 && epoch != "" {
					out.Epochs[w.UID] = epoch
				}
			}
		}
		for _, p := range s.Profiles {
			n := p.MaxModelLen
			if n == 0 {
				n = states.MaxModelLen(uids, p.UpstreamModel)
			}
			lengths[p] = n
			var tokens parity.Verdict
			if verdicts != nil && s.TokenizerPath != "" {
				tokens = verdicts.Profile(now, p.ID, uids)
			}
			out.Profiles = append(out.Profiles, &routerv1.Profile{
				Id: p.ID, WorkerSet: s.Name, UpstreamModel: p.UpstreamModel, Lora: p.LoRA,
				TokenizerPath: s.TokenizerPath, PassTokenIds: s.PassTokenIDs,
				BlockSize: cmp.Or(uint32(states.BlockSize(s.Name)), sizes[p.ID]), MaxModelLen: uint32(n),
				Parity: tokens.State, ParityCause: tokens.Cause,
			})
		}
	}
	offered := func(models map[string]*plan.Model) []*routerv1.Model { return offers(models, lengths, ready) }
	out.Models = offered(prepared.Models)
	for _, name := range slices.Sorted(maps.Keys(prepared.Pools)) {
		out.Pools = append(out.Pools, &routerv1.Pool{Name: name, Models: offered(prepared.Pools[name])})
	}
	return out
}

// offers are models by name, with the lengths of their profiles and the worker
// sets that are ready.
func offers(models map[string]*plan.Model, lengths map[*resources.Profile]int, ready map[*resources.WorkerSet]bool) []*routerv1.Model {
	var out []*routerv1.Model
	for _, m := range models {
		pm := &routerv1.Model{Name: m.Name, Root: m.Root, ReadsTags: m.Policies.ReadsTags(m.Name), ReadsHeaders: m.Policies.ReadsHeaders(m.Name), ReadTags: m.Tags}
		pm.TagsNamespace, _, _ = strings.Cut(m.Pool.Name, "/")
		for _, o := range m.Offers {
			if o.Pool != m.Pool {
				continue
			}
			pm.Profiles = append(pm.Profiles, o.Profile.ID)
			pm.MaxModelLen = max(pm.MaxModelLen, uint32(lengths[o.Profile]))
			pm.Ready = pm.Ready || ready[o.Profile.Set]
		}
		profiles, external := m.Considered()
		for _, p := range profiles {
			if !slices.Contains(pm.Profiles, p.ID) {
				pm.Considered = append(pm.Considered, p.ID)
			}
		}
		pm.External = external
		pm.Ready = pm.Ready || slices.ContainsFunc(m.External, func(o resources.ExternalOffer) bool { return o.Pool == m.Pool })
		out = append(out, pm)
	}
	slices.SortFunc(out, func(a, b *routerv1.Model) int { return strings.Compare(a.Name, b.Name) })
	return out
}
