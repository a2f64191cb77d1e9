package router

import (
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/plan"
	"github.com/kinference/kinference/internal/policy"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/internal/window"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/parity"
)

// maxDiffer bounds the workers that the status of a profile names.
const maxDiffer = 64

// recentRequests is how far back the summary of what workers did goes.
const recentRequests = 5 * time.Minute

// status is the state of the fleet.
func (s *server) status() *adminv1.StatusResponse {
	out := &adminv1.StatusResponse{TrackerConnected: s.tracker != nil && s.tracker.Followed(), Queued: uint32(s.line.Len())}
	s.lineStatus(out)
	if s.gossip != nil {
		for _, p := range s.gossip.Peers() {
			out.Peers = append(out.Peers, &adminv1.PeerStatus{Router: p.Name, Age: durationpb.New(p.Age)})
		}
	}
	v, _ := s.catalog.Current()
	if v == nil {
		return out
	}
	out.CatalogVersion, out.Open = v.Number, !v.Resources.Guarded
	now := s.now()
	sizes := map[string]uint32{}
	for _, p := range v.Message.GetCatalog().GetProfiles() {
		sizes[p.GetId()] = p.GetBlockSize()
	}
	recent, windows := s.decisions.Recent(now.Add(-recentRequests)), windowsOf(v.Plan)
	for _, set := range v.Resources.Sets {
		for i := range set.Workers {
			for _, id := range set.Workers[i].Ranks {
				w := s.workerStatus(now, set, &set.Workers[i], id)
				w.Recent = recent[id]
				for _, over := range windows[set.Name] {
					if mean, ok := s.fleet.Mean(id, over); ok && w.Load != nil {
						w.Means = append(w.Means, loadMean(over, mean))
					}
				}
				out.Workers = append(out.Workers, w)
			}
		}
		for _, p := range set.Profiles {
			out.Profiles = append(out.Profiles, s.profileStatus(now, p, sizes[p.ID]))
		}
	}
	for _, p := range v.Resources.Providers {
		out.Providers = append(out.Providers, &adminv1.ProviderStatus{
			Provider: p.Name, InFlight: uint32(s.providers.InFlight(p)), Concurrency: uint32(p.Spec.Concurrency),
			PredictedTtft: durationpb.New(s.providers.TTFT(now, p)), Recent: recent[plan.ProviderID(p.Name)],
		})
	}
	return out
}

// windowsOf lists the windows of means that policies look at, by worker set.
func windowsOf(p *plan.Plan) map[string][]time.Duration {
	out := map[string][]time.Duration{}
	for _, m := range p.Models {
		for i := range m.Targets {
			if m.Targets[i].Profile == nil {
				continue
			}
			list := out[m.Targets[i].Name()]
			for _, w := range m.Windows {
				if !slices.Contains(list, w) {
					list = append(list, w)
				}
			}
			out[m.Targets[i].Name()] = list
		}
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out
}

func loadMean(over time.Duration, l window.Load) *adminv1.LoadMean {
	return &adminv1.LoadMean{Window: durationpb.New(over), Load: &adminv1.Load{Running: l.Running, Waiting: l.Waiting, KvUsage: l.KVUsage}}
}

func (s *server) workerStatus(now time.Time, set *resources.WorkerSet, w *resources.Worker, id string) *adminv1.WorkerStatus {
	st := s.fleet.Lookup(now, w.UID, id)
	out := &adminv1.WorkerStatus{
		Worker: id, WorkerSet: set.Name, Url: w.URL, Ready: st.Ready, Reason: st.Why, BlockSize: uint32(st.BlockSize), Epoch: st.Epoch,
	}
	out.InFlight = uint32(s.scheduler.InFlight(id))
	for _, p := range set.Profiles {
		out.MaxModelLen = max(out.MaxModelLen, uint32(p.MaxModelLen), uint32(st.MaxModelLen(p.UpstreamModel)))
	}
	if !st.Sampled.IsZero() {
		out.SampleAge = durationpb.New(max(0, now.Sub(st.Sampled)))
		out.Load = &adminv1.Load{Running: st.Running, Waiting: st.Waiting, KvUsage: st.KVUsage}
		out.Means = append(out.Means, loadMean(policy.DefaultWindow, st.Mean30s))
	}
	if x := st.Index; x != nil {
		out.Index = &adminv1.WorkerIndex{Live: x.GetLive(), Complete: x.GetComplete(), Blocks: x.GetBlocks(), Lag: x.GetLag(), Skipped: x.GetSkipped()}
	}
	if set.TokenizerPath != "" {
		tokens := s.tokens.Worker(now, w.UID)
		out.Tokens, out.TokensCause, out.TokensCheckedUnixNanos = tokens.State, tokens.Cause, nanos(tokens.Checked)
	}
	return out
}

func (s *server) profileStatus(now time.Time, p *resources.Profile, blockSize uint32) *adminv1.ProfileStatus {
	set := p.Set
	out := &adminv1.ProfileStatus{
		Profile: p.ID, WorkerSet: set.Name, PassTokenIds: set.PassTokenIDs, BlockSize: blockSize, Source: adminv1.TokenSource_TOKEN_SOURCE_ASKED,
	}
	if set.TokenizerPath != "" {
		var uids []string
		for i := range set.Workers {
			uid := set.Workers[i].UID
			uids = append(uids, uid)
			switch s.tokens.Worker(now, uid).State {
			case routerv1.ParityState_PARITY_STATE_AGREES:
				out.WorkersAgree++
			case routerv1.ParityState_PARITY_STATE_DIFFERS:
				out.WorkersDiffer++
			}
		}
		tokens := s.tokens.Profile(now, p.ID, uids)
		out.Tokens, out.TokensCause, out.Source = tokens.State, tokens.Cause, adminv1.TokenSource_TOKEN_SOURCE_LOCAL
		if tokens.State == routerv1.ParityState_PARITY_STATE_DIFFERS {
			out.Source = adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED
		}
	}
	cached := s.cached.Profile(p.ID)
	out.Cached, out.CachedCause = cached.State, cached.Cause
	if wrong := s.blindTo(now, p); len(wrong) > 0 {
		out.Cached, out.CachedCause = routerv1.ParityState_PARITY_STATE_DIFFERS, slices.Min(slices.Collect(maps.Values(wrong)))
		out.CachedDiffers = slices.Sorted(maps.Keys(wrong))
		out.CachedDiffers = out.CachedDiffers[:min(len(out.CachedDiffers), maxDiffer)]
	}
	n := cached.Counts
	out.CachedCounts = &adminv1.CachedCounts{
		Agree: n[parity.Agree], TooFew: n[parity.TooFew], TooMany: n[parity.TooMany], Uninformative: n[parity.Uninformative], NotReported: n[parity.NotReported],
	}
	return out
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

// blindTo lists the workers of a profile whose cached tokens the index cannot
// know, or was found to be wrong about, with the cause.
func (s *server) blindTo(now time.Time, p *resources.Profile) map[string]routerv1.ParityCause {
	out := s.unknowable(now, p.Set)
	for worker, cause := range s.cached.Distrusted(p.ID) {
		if out[worker] == 0 {
			out[worker] = cause
		}
	}
	return out
}

// unknowable lists the workers of a set whose cached tokens the index cannot know.
func (s *server) unknowable(now time.Time, set *resources.WorkerSet) map[string]routerv1.ParityCause {
	out := map[string]routerv1.ParityCause{}
	if s.tracker == nil {
		return out
	}
	size := s.fleet.BlockSize(set.Name)
	for i := range set.Workers {
		w := &set.Workers[i]
		for _, id := range w.Ranks {
			st := s.fleet.Lookup(now, w.UID, id)
			if cause := unindexed(w, &st, size); cause != 0 {
				out[id] = cause
			}
		}
	}
	return out
}

// noteBlind logs, once, that the index cannot know some workers of a set.
func (s *server) noteBlind(c *resources.Catalog) {
	type fault struct {
		set   string
		cause routerv1.ParityCause
	}
	now, found := s.now(), map[fault][]string{}
	for _, set := range c.Sets {
		for worker, cause := range s.unknowable(now, set) {
			found[fault{set.Name, cause}] = append(found[fault{set.Name, cause}], worker)
		}
	}
	said := map[string]int{}
	for f, workers := range found {
		key := f.set + " " + word(f.cause)
		said[key] = len(workers)
		if s.blind[key] != len(workers) {
			s.log.Warn("the index cannot know the cache of some workers: going by own memory", "worker_set", f.set, "cause", word(f.cause),
				"workers", len(workers), "worker", slices.Min(workers))
		}
	}
	s.blind = said
}

// cachedChanged is told that the index is found wrong, or right again.
func (s *server) cachedChanged(profile, worker string, cause routerv1.ParityCause) {
	if cause == 0 {
		s.log.Info("the index agrees with what engines report again", "profile", profile)
		return
	}
	s.log.Warn("the index does not agree with what engines report: going by own memory", "profile", profile, "worker", worker, "cause", word(cause))
}

func (s *server) cachedCompared(profile string, r parity.Result) { s.metrics.comparedWith(profile, r) }

// word is a cause as metrics and logs name it.
func word(c routerv1.ParityCause) string {
	if c == 0 {
		return "none"
	}
	return strings.ToLower(strings.TrimPrefix(c.String(), "PARITY_CAUSE_"))
}

// maxQueuedShown bounds the list of those that wait.
const maxQueuedShown = 64

// lineStatus tells who waits.
func (s *server) lineStatus(out *adminv1.StatusResponse) {
	now, classes := s.now(), map[schedule.QoS]*adminv1.QueueClass{}
	for i, w := range s.line.List() {
		waited := max(0, now.Sub(w.Since))
		c := classes[w.QoS]
		if c == nil {
			c = &adminv1.QueueClass{Qos: string(w.QoS), Oldest: durationpb.New(0)}
			classes[w.QoS] = c
			out.Queue = append(out.Queue, c)
		}
		c.Waiting++
		c.Oldest = durationpb.New(max(c.Oldest.AsDuration(), waited))
		if i < maxQueuedShown {
			out.Waiting = append(out.Waiting, &adminv1.QueuedRequest{
				RequestId: w.ID, Model: w.Model, Tenant: w.Tenant, Qos: string(w.QoS), Waited: durationpb.New(waited),
				Worker: w.Worker, PredictedWait: durationpb.New(w.Wait), Why: string(w.Why),
			})
		}
	}
}
