package classifier_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/proto/gen/kinference/router/v1/routerv1connect"
	"github.com/kinference/kinference/services/classifier"
)

// router streams the catalogs that a test gives it.
type router struct {
	routerv1connect.UnimplementedRouterServiceHandler
	catalogs chan *routerv1.Catalog
}

func (r *router) WatchCatalog(ctx context.Context, _ *routerv1.WatchCatalogRequest, s *connect.ServerStream[routerv1.WatchCatalogResponse]) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case c := <-r.catalogs:
			if c == nil {
				return connect.NewError(connect.CodeUnavailable, nil)
			}
			if err := s.Send(&routerv1.WatchCatalogResponse{Catalog: c}); err != nil {
				return err
			}
		}
	}
}

// Custom tags come from the catalog of the router, change with it, and stay while the
// stream breaks. Those that cannot be read are not looked for.
func TestFollowsTheCatalog(t *testing.T) {
	r := &router{catalogs: make(chan *routerv1.Catalog)}
	l := testenv.Listen(t)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = rpc.Serve(ctx, l, rpc.Mount[routerv1connect.RouterServiceHandler](ctx, r, routerv1connect.NewRouterServiceHandler))
	}()
	t.Cleanup(func() { cancel(); <-ended })
	s := start(t, classifier.Config{Timeout: 10 * time.Second, RouterURL: "http://" + l.Addr().String()})
	define := func(words ...string) {
		t.Helper()
		text, err := json.Marshal([]v1alpha1.CustomTag{{Name: "falcon", Any: []v1alpha1.TagDetector{{Keywords: words}}}})
		if err != nil {
			t.Fatal(err)
		}
		r.catalogs <- &routerv1.Catalog{CustomTags: []*routerv1.CustomTags{{Namespace: "ns", TagsJson: string(text)}}}
	}
	until := func(text string, want classifierv1.State) {
		t.Helper()
		req := user(text)
		req.Options = &classifierv1.Options{Namespace: "ns"}
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for deadline := time.After(time.Minute); ; {
			res, err := s.Classify(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if state(res, "falcon") == want {
				return
			}
			select {
			case <-deadline:
				t.Fatalf("falcon is %v, want %v", state(res, "falcon"), want)
			case <-tick.C:
			}
		}
	}
	define("peregrine")
	until("the peregrine", classifierv1.State_STATE_TRUE)
	define("osprey")
	until("the osprey", classifierv1.State_STATE_TRUE)
	until("the peregrine", classifierv1.State_STATE_FALSE)
	r.catalogs <- nil // the stream breaks
	until("the osprey", classifierv1.State_STATE_TRUE)
	r.catalogs <- &routerv1.Catalog{CustomTags: []*routerv1.CustomTags{{Namespace: "ns", TagsJson: "{"}}}
	until("the osprey", classifierv1.State_STATE_UNSPECIFIED) // not looked for
	define("merlin")
	until("the merlin", classifierv1.State_STATE_TRUE)
}
