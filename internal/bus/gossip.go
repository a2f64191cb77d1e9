package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// GossipSubject is where routers tell each other what they do.
const GossipSubject = "router.gossip"

// GossipVersion is the form of messages that this package writes and reads.
const GossipVersion = 1

// Bounds of a message of gossip. maxGossip is below a server's usual limit of 1 MB.
const (
	maxGossip        = 900 << 10
	maxGossipEvents  = 1 << 14
	maxGossipLearned = 1 << 12
	maxGossipHashes  = 1 << 8
	maxRequestID     = 256
)

// ErrGossipVersion says that a message is of another version than this one: its
// sender is older or newer, and what it says is skipped.
var ErrGossipVersion = errors.New("gossip of another version")

// PublishGossip sends what a router did to those that listen now, this one
// included; it is not stored and may be lost. A message that is too large is an
// error: split it.
func (c *Conn) PublishGossip(g *routerv1.Gossip) error {
	g.Version = GossipVersion
	data, err := proto.Marshal(g)
	if err != nil {
		return fmt.Errorf("encode gossip: %w", err)
	}
	if len(data) > maxGossip {
		return fmt.Errorf("gossip of %d bytes, limit %d", len(data), maxGossip)
	}
	if !c.nc.IsConnected() {
		return nats.ErrDisconnected // what waited for a server would come too late
	}
	if err := c.nc.Publish(GossipSubject, data); err != nil {
		return fmt.Errorf("publish gossip: %w", err)
	}
	return nil
}

// Gossips is a subscription of gossip. Use SubscribeGossip.
type Gossips struct {
	sub  *nats.Subscription
	msgs chan *nats.Msg
}

// SubscribeGossip hears what routers say from now on. The caller reads with Next
// and ends it with Close. A slow reader loses messages, not memory.
func (c *Conn) SubscribeGossip() (*Gossips, error) {
	g := &Gossips{msgs: make(chan *nats.Msg, 1024)}
	var err error
	if g.sub, err = c.nc.ChanSubscribe(GossipSubject, g.msgs); err != nil {
		return nil, fmt.Errorf("subscribe to gossip: %w", err)
	}
	return g, nil
}

// Close ends the subscription.
func (g *Gossips) Close() { _ = g.sub.Unsubscribe() }

// Lost is how many messages the reader was too slow for.
func (g *Gossips) Lost() int {
	n, err := g.sub.Dropped()
	if err != nil {
		return 0
	}
	return n
}

// Next waits for a message; its error is that of the message, or ctx's.
func (g *Gossips) Next(ctx context.Context) (*routerv1.Gossip, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case m := <-g.msgs:
		return decodeGossip(m.Data)
	}
}

// decodeGossip refuses what this package would not have written.
func decodeGossip(data []byte) (*routerv1.Gossip, error) {
	if len(data) > maxGossip {
		return nil, fmt.Errorf("gossip of %d bytes, limit %d", len(data), maxGossip)
	}
	g := new(routerv1.Gossip)
	if err := proto.Unmarshal(data, g); err != nil {
		return nil, fmt.Errorf("decode gossip: %w", err)
	}
	switch {
	case g.Version != GossipVersion:
		return nil, ErrGossipVersion
	case !token(g.From, maxEpoch):
		return nil, errors.New("gossip from a name that is empty, too long or has odd characters")
	case len(g.Events) > maxGossipEvents || len(g.Learned) > maxGossipLearned:
		return nil, fmt.Errorf("gossip of %d events and %d workers", len(g.Events), len(g.Learned))
	}
	for _, e := range g.Events {
		if err := checkGossip(e); err != nil {
			return nil, err
		}
	}
	for _, l := range g.Learned {
		if !gossipName(l.Worker) || !(l.Slowness > 0 && l.Slowness < 1e3) || !(l.Reuse >= 0 && l.Reuse < 1e3) {
			return nil, fmt.Errorf("gossip of odd knowledge about %.64q", l.Worker)
		}
	}
	return g, nil
}

func checkGossip(e *routerv1.GossipEvent) error {
	within := func(d time.Duration) bool { return d >= 0 && d <= time.Hour }
	switch {
	case e.Kind < routerv1.GossipKind_GOSSIP_KIND_ROUTED || e.Kind > routerv1.GossipKind_GOSSIP_KIND_WAITS:
		return fmt.Errorf("gossip of unknown kind %d", e.Kind)
	case e.Request == "" || len(e.Request) > maxRequestID, !within(e.GetAge().AsDuration()):
		return errors.New("gossip of a request without name, or of another time")
	case e.Kind != routerv1.GossipKind_GOSSIP_KIND_ROUTED && e.Kind != routerv1.GossipKind_GOSSIP_KIND_WAITS:
		return nil
	case !gossipName(e.Worker) || len(e.Class) > maxName || len(e.Group) > 2*maxName,
		len(e.BlockHashes) > maxGossipHashes || len(e.BlockHashes) > 0 && (e.Stride == 0 || e.Stride > 1<<20) || e.BlockSize > 1<<20,
		e.Tokens > 1<<30 || e.Cached > e.Tokens || e.MaxTokens > 1<<30,
		!within(e.GetWork().AsDuration()) || !within(e.GetTtft().AsDuration()):
		return fmt.Errorf("gossip of an odd request at %.64q", e.Worker)
	}
	return nil
}

func gossipName(worker string) bool { return worker != "" && len(worker) <= 2*maxName }
