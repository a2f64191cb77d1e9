package bus

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// FuzzGossip checks that any message is refused or within the bounds that readers
// rely on.
func FuzzGossip(f *testing.F) {
	seed, err := proto.Marshal(&routerv1.Gossip{Version: GossipVersion, From: "a", Learned: []*routerv1.GossipLearned{{Worker: "w/0", Slowness: 1, Reuse: 1}},
		Events: []*routerv1.GossipEvent{{Kind: routerv1.GossipKind_GOSSIP_KIND_ROUTED, Worker: "w/0", Request: "r", Tokens: 9, Cached: 3, BlockHashes: []uint64{1}, Stride: 1, Work: durationpb.New(time.Second)}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte("nonsense"))
	f.Fuzz(func(t *testing.T, data []byte) {
		g, err := decodeGossip(data)
		if err != nil {
			return
		}
		for _, e := range g.Events {
			if age := e.GetAge().AsDuration(); age < 0 || age > time.Hour || len(e.BlockHashes) > maxGossipHashes && e.Kind == routerv1.GossipKind_GOSSIP_KIND_ROUTED || e.Cached > e.Tokens && e.Worker != "" && e.Kind == routerv1.GossipKind_GOSSIP_KIND_ROUTED {
				t.Errorf("taken: %v", e)
			}
		}
		again, err := proto.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeGossip(again); err != nil && len(again) <= maxGossip {
			t.Errorf("taken once, refused then: %v", err)
		}
	})
}
