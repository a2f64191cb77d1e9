package router

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/types/known/durationpb"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/schedule"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/router/internal/affinity"
	"github.com/kinference/kinference/services/router/internal/catalog"
	"github.com/kinference/kinference/services/router/internal/decisions"
	"github.com/kinference/kinference/services/router/internal/fleet"
	"github.com/kinference/kinference/services/router/internal/parity"
)

// stub answers Match from memory.
type stub struct {
	match *kvtrackerv1.MatchResponse
}

func (s *stub) Match(context.Context, *kvtrackerv1.MatchRequest) (*kvtrackerv1.MatchResponse, error) {
	return s.match, nil
}

func (*stub) Inspect(context.Context, *kvtrackerv1.InspectRequest) (*kvtrackerv1.InspectResponse, error) {
	return nil, connect.NewError(connect.CodeUnimplemented, nil)
}

func (*stub) Followed() bool { return true }

// BenchmarkRoute is a whole decision but for the network: evaluate, match,
// schedule, record, report.
//
//	go test -run - -bench Route -count 10 ./services/router
func BenchmarkRoute(b *testing.B) {
	for _, size := range []struct {
		policy                     string
		workers, blocks, blockSize int
	}{
		{schedule.K2, 3, 26, 784}, {schedule.K2, 8, 500, 16}, {schedule.K2, 64, 500, 16}, {schedule.K2, 64, 1250, 16},
		{schedule.PredictedTTFT, 3, 26, 784}, {schedule.PredictedTTFT, 64, 1250, 16},
	} {
		b.Run(fmt.Sprintf("policy=%s/workers=%d/blocks=%d", size.policy, size.workers, size.blocks), func(b *testing.B) {
			dir := b.TempDir()
			var yaml strings.Builder
			yaml.WriteString("apiVersion: kinference.buoyant.io/v1alpha1\nkind: InferenceWorkerSet\nmetadata: { name: sim, namespace: demo }\nspec:\n  models: [ { name: m } ]\n  endpoints:\n")
			listing := &kvtrackerv1.WatchWorkersResponse{Synced: true}
			result := &kvtrackerv1.MatchResult{}
			for i := range size.workers {
				fmt.Fprintf(&yaml, "    - { name: w%d, address: w%d }\n", i, i)
				id := fmt.Sprintf("demo.sim.w%d/0", i)
				listing.Workers = append(listing.Workers, &kvtrackerv1.WorkerState{Worker: id, WorkerSet: "demo/sim", Ready: true,
					BlockSize: uint32(size.blockSize), TotalBlocks: 100_000, Load: &kvtrackerv1.Load{Running: 4}, SampleAge: durationpb.New(0)})
				result.Matches = append(result.Matches, &kvtrackerv1.WorkerMatch{Worker: id, GpuTokens: uint32(i * size.blockSize)})
			}
			if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(yaml.String()), 0o600); err != nil {
				b.Fatal(err)
			}
			c, ps := resources.Load(dir)
			if c == nil {
				b.Fatal(ps)
			}
			scheduler, err := schedule.New(schedule.Settings{Policy: size.policy})
			if err != nil {
				b.Fatal(err)
			}
			s := &server{Config: (&Config{}).withDefaults(), log: slog.New(slog.DiscardHandler), scheduler: scheduler, affinity: &affinity.Table{},
				decisions: decisions.New(2048), catalog: catalog.NewPublisher(), tracker: &stub{&kvtrackerv1.MatchResponse{Results: []*kvtrackerv1.MatchResult{result}}}}
			s.fleet, s.tokens = fleet.New(nil), &parity.Tokens{}
			s.line = s.follow(b.Context())
			s.cached = parity.NewCached(parity.Settings{Why: s.whyBlind, Changed: s.cachedChanged, Compared: s.cachedCompared})
			s.fleet.Update(time.Now().Add(time.Hour), listing) // fresh for the whole run
			if s.metrics, err = newMetrics(noop.NewMeterProvider().Meter(""), s); err != nil {
				b.Fatal(err)
			}
			s.catalog.Publish(c, s.fleet, s.tokens)
			hashes := make([]uint64, size.blocks)
			for i := range hashes {
				hashes[i] = uint64(i) * 0x9e3779b97f4a7c15
			}
			b.ReportAllocs()
			for b.Loop() {
				_, err := s.Route(b.Context(), &routerv1.RouteRequest{RequestId: "r", Model: "m", Prompts: []*routerv1.Prompt{
					{Profile: "demo/sim/m", Tokens: uint32(size.blocks*size.blockSize + 5), BlockSize: uint32(size.blockSize), BlockHashes: hashes},
				}})
				if err != nil {
					b.Fatal(err)
				}
				_, _ = s.Report(b.Context(), &routerv1.ReportRequest{Reports: []*routerv1.Report{
					{RequestId: "r", Event: &routerv1.Report_Done{Done: &routerv1.Done{Outcome: routerv1.Outcome_OUTCOME_OK}}},
				}})
			}
		})
	}
}
