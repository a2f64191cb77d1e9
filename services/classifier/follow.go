package classifier

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
)

// follow takes the custom tags from the router's catalog until ctx is done. While
// the router is away, those in hand hold.
func (s *server) follow(ctx context.Context, url string) {
	const least, most = 50 * time.Millisecond, 3 * time.Second
	router := rpc.Client(ctx, url, routerv1connect.NewRouterServiceClient)
	var held []*routerv1.CustomTags
	for delay := least; ctx.Err() == nil; delay = min(2*delay, most) {
		stream, err := router.WatchCatalog(ctx, &routerv1.WatchCatalogRequest{})
		if err == nil {
			for stream.Receive() {
				delay = least
				list := stream.Msg().GetCatalog().GetCustomTags()
				if slices.EqualFunc(list, held, func(a, b *routerv1.CustomTags) bool { return proto.Equal(a, b) }) {
					continue
				}
				held = list
				s.define(ctx, s.read(ctx, list))
			}
			err = stream.Err()
			_ = stream.Close()
		}
		if ctx.Err() != nil {
			return
		}
		daemon.Logger(ctx).Warn("catalog stream ended", "err", err, "retry_in", delay.String())
		select {
		case <-ctx.Done():
		case <-time.After(delay/2 + rand.N(delay)):
		}
	}
}

// read takes custom tags out of a catalog. What cannot be read, of a newer router
// say, is left out, so that whoever asks for it is told that nobody looked.
func (s *server) read(ctx context.Context, list []*routerv1.CustomTags) map[string][]v1alpha1.CustomTag {
	out := map[string][]v1alpha1.CustomTag{}
	for _, m := range list {
		var tags []v1alpha1.CustomTag
		if err := json.Unmarshal([]byte(m.GetTagsJson()), &tags); err != nil {
			daemon.Logger(ctx).Error("custom tags cannot be read", "namespace", m.GetNamespace(), "err", err)
			continue
		}
		out[m.GetNamespace()] = tags
	}
	return out
}
