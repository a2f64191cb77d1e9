package bus_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/natsd"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func routed() *routerv1.GossipEvent {
	return &routerv1.GossipEvent{Kind: routerv1.GossipKind_GOSSIP_KIND_ROUTED, Worker: "w/0", Request: "r", Age: durationpb.New(time.Millisecond),
		BlockHashes: []uint64{1, 2}, Stride: 1, BlockSize: 16, Tokens: 40, Cached: 32, Work: durationpb.New(time.Second), Ttft: durationpb.New(time.Second)}
}

func TestGossip(t *testing.T) {
	srv, err := natsd.Start(natsd.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	c, err := bus.Connect(t.Context(), srv.URL(), "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	sub, err := c.SubscribeGossip()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sub.Close)
	next := func() (*routerv1.Gossip, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		return sub.Next(ctx)
	}
	if err := c.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	sent := &routerv1.Gossip{From: "a", SentUnixNanos: 5, Events: []*routerv1.GossipEvent{routed()}, Learned: []*routerv1.GossipLearned{{Worker: "w/0", Slowness: 1.5, Samples: 3, Reuse: .9}}}
	if err := c.PublishGossip(sent); err != nil {
		t.Fatal(err)
	}
	if got, err := next(); err != nil || !cmp.Equal(got, sent, protocmp.Transform()) {
		t.Errorf("got %v, %v", got, err)
	}
	for name, m := range map[string]*routerv1.Gossip{
		"nobody":       {},
		"odd name":     {From: "a b"},
		"no request":   {From: "a", Events: []*routerv1.GossipEvent{{Kind: routerv1.GossipKind_GOSSIP_KIND_DONE}}},
		"no worker":    {From: "a", Events: []*routerv1.GossipEvent{{Kind: routerv1.GossipKind_GOSSIP_KIND_ROUTED, Request: "r"}}},
		"unknown kind": {From: "a", Events: []*routerv1.GossipEvent{{Kind: 9, Request: "r"}}},
		"future":       {From: "a", Events: []*routerv1.GossipEvent{{Kind: 3, Request: "r", Age: durationpb.New(-time.Second)}}},
		"odd request":  {From: "a", Events: []*routerv1.GossipEvent{{Kind: 1, Request: "r", Worker: "w", Tokens: 1, Cached: 2}}},
		"odd learning": {From: "a", Learned: []*routerv1.GossipLearned{{Worker: "w", Slowness: -1}}},
	} {
		if err := c.PublishGossip(m); err != nil {
			t.Fatal(err)
		}
		if got, err := next(); err == nil {
			t.Errorf("%s: took %v", name, got)
		}
	}
	for _, data := range [][]byte{{0xff, 1, 2}, []byte("hello")} {
		if err := c.NATS().Publish(bus.GossipSubject, data); err != nil {
			t.Fatal(err)
		}
		if got, err := next(); err == nil {
			t.Errorf("took %q as %v", data, got)
		}
	}
	other, err := proto.Marshal(&routerv1.Gossip{Version: bus.GossipVersion + 1, From: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.NATS().Publish(bus.GossipSubject, other); err != nil {
		t.Fatal(err)
	}
	if _, err := next(); !errors.Is(err, bus.ErrGossipVersion) {
		t.Errorf("another version: %v", err)
	}
	if err := c.PublishGossip(&routerv1.Gossip{From: "a", Events: []*routerv1.GossipEvent{{BlockHashes: make([]uint64, 1<<18)}}}); err == nil {
		t.Error("a message of 2 MB was sent")
	}
	srv.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for c.Connected() {
		<-tick.C
	}
	if err := c.PublishGossip(sent); err == nil {
		t.Error("sent without a server: it would come late")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := sub.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("next after the end: %v", err)
	}
	if sub.Lost() != 0 {
		t.Errorf("lost %d", sub.Lost())
	}
}
