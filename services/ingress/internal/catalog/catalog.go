// Package catalog keeps ingress' copy of the router's catalog.
//
// Watch follows the stream and hands out an immutable View per version, so a
// request sees one state from beginning to end. When the router goes away the
// last View stays in use and Watch connects again. Views may be read by any
// number of goroutines.
package catalog

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// View is one version of the catalog.
type View struct {
	Version  uint64
	Models   []*Model   // by name
	Profiles []*Profile // in the catalog's order
	byName   map[string]*Model

	// Guarded says that there is a GatewayBackend, be it a broken one: only
	// requests that match one of Backends are served. Else the gateway is open.
	Guarded  bool
	Backends []*Backend
	// LimitPolicies are those with limits, in the order in which they apply. Do
	// not modify them.
	LimitPolicies []*routerv1.LimitPolicy
	// Objectives of pools and tenants. Do not modify them.
	Objectives []*routerv1.Objective
	tenants    map[string]*Tenant
	prices     prices
}

// Model is a name that clients may ask for.
type Model struct {
	Name        string
	Root        string // the model behind an alias or adapter
	Adapter     bool   // Name stands for a LoRA adapter of Root
	MaxModelLen int    // tokens, 0 while unknown
	Ready       bool   // somebody can serve it now: a worker that is ready, or a provider
	Profiles    []*Profile
	// Considered are Profiles and those of other models that a policy could send
	// its requests to.
	Considered []*Profile
	External   bool // providers may serve it
	// ReadsTags and ReadsHeaders say that a policy looks at those.
	ReadsTags, ReadsHeaders bool
	// ReadTags are those tags: names, or beginnings of names with a star.
	ReadTags []string
	// TagsNamespace is where the policies are, whose custom tags hold.
	TagsNamespace string
}

// Profile is one way of turning a request into blocks; see the proto.
type Profile struct {
	ID            string
	Set           string // worker set
	UpstreamModel string
	LoRA          string
	TokenizerPath string
	PassTokenIDs  bool
	BlockSize     int      // tokens, 0 while unknown
	MaxModelLen   int      // tokens, 0 while unknown
	Workers       []Worker // of its set; do not modify
	// Parity is what all ingresses found about the ids of its tokenizer.
	Parity routerv1.ParityState
}

// Worker is an engine process: all its ranks.
type Worker struct {
	UID   string
	URL   string // base URL
	Epoch string // names the process that runs there now; empty while unknown
}

// Model returns the model with this name, nil if there is none.
func (v *View) Model(name string) *Model { return v.byName[name] }

// New makes a View of a catalog. Profiles that a model names and the catalog
// lacks are left out.
func New(c *routerv1.Catalog) *View {
	v := &View{Version: c.GetVersion(), byName: make(map[string]*Model, len(c.GetModels())), prices: newPrices(c.GetPrices())}
	workers := map[string][]Worker{}
	for _, w := range c.GetWorkers() {
		workers[w.GetWorkerSet()] = append(workers[w.GetWorkerSet()], Worker{UID: w.GetUid(), URL: strings.TrimRight(w.GetUrl(), "/"), Epoch: c.GetEpochs()[w.GetUid()]})
	}
	profiles := make(map[string]*Profile, len(c.GetProfiles()))
	for _, p := range c.GetProfiles() {
		profile := &Profile{
			ID: p.GetId(), Set: p.GetWorkerSet(), UpstreamModel: p.GetUpstreamModel(), LoRA: p.GetLora(), TokenizerPath: p.GetTokenizerPath(),
			PassTokenIDs: p.GetPassTokenIds(), BlockSize: int(p.GetBlockSize()), MaxModelLen: int(p.GetMaxModelLen()), Workers: workers[p.GetWorkerSet()],
			Parity: p.GetParity(),
		}
		profiles[profile.ID] = profile
		v.Profiles = append(v.Profiles, profile)
	}
	v.Models = models(c.GetModels(), profiles)
	for _, m := range v.Models {
		v.byName[m.Name] = m
	}
	v.access(c, profiles)
	return v
}

// models are those of a message by name.
func models(list []*routerv1.Model, profiles map[string]*Profile) []*Model {
	out := make([]*Model, 0, len(list))
	for _, m := range list {
		model := &Model{Name: m.GetName(), Root: m.GetRoot(), MaxModelLen: int(m.GetMaxModelLen()), External: m.GetExternal(), Ready: m.GetReady() || m.GetExternal(), ReadsTags: m.GetReadsTags(), ReadsHeaders: m.GetReadsHeaders(),
			ReadTags: m.GetReadTags(), TagsNamespace: m.GetTagsNamespace()}
		for _, id := range m.GetProfiles() {
			if p := profiles[id]; p != nil {
				model.Profiles = append(model.Profiles, p)
				model.Adapter = model.Adapter || p.LoRA != ""
			}
		}
		model.Considered = slices.Clip(model.Profiles)
		for _, id := range m.GetConsidered() {
			if p := profiles[id]; p != nil {
				model.Considered = append(model.Considered, p)
			}
		}
		out = append(out, model)
	}
	slices.SortFunc(out, func(a, b *Model) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Client is the part of the router's client that Watch needs.
type Client interface {
	WatchCatalog(context.Context, *routerv1.WatchCatalogRequest) (*connect.ServerStreamForClient[routerv1.WatchCatalogResponse], error)
}

// Watch calls update with each catalog that arrives until ctx is done. It
// connects again after a failure, with a delay that grows to a few seconds.
func Watch(ctx context.Context, log *slog.Logger, client Client, update func(*View)) {
	const least, most = 50 * time.Millisecond, 3 * time.Second
	for delay := least; ctx.Err() == nil; {
		began := time.Now()
		err := follow(ctx, client, update)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > most {
			delay = least
		}
		log.Warn("catalog stream ended", "err", err, "retry_in", delay.String())
		select {
		case <-ctx.Done():
		case <-time.After(delay/2 + rand.N(delay)):
		}
		delay = min(2*delay, most)
	}
}

func follow(ctx context.Context, client Client, update func(*View)) error {
	stream, err := client.WatchCatalog(ctx, &routerv1.WatchCatalogRequest{})
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		update(New(stream.Msg().GetCatalog()))
	}
	return stream.Err()
}
