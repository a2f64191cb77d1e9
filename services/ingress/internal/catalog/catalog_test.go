package catalog_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

func TestNew(t *testing.T) {
	v := catalog.New(&routerv1.Catalog{
		Version: 7,
		Models: []*routerv1.Model{
			{Name: "z", Root: "z", Profiles: []string{"p", "gone"}, MaxModelLen: 100, Ready: true},
			{Name: "a", Root: "z", Profiles: []string{"l"}, Considered: []string{"p", "gone"}, External: true, ReadsTags: true},
			{Name: "lonely"},
		},
		Profiles: []*routerv1.Profile{
			{Id: "p", WorkerSet: "n/s", UpstreamModel: "z", TokenizerPath: "/m", PassTokenIds: true, BlockSize: 16, MaxModelLen: 100, Parity: routerv1.ParityState_PARITY_STATE_DIFFERS},
			{Id: "l", WorkerSet: "n/none", UpstreamModel: "a", Lora: "a"},
		},
		Workers: []*routerv1.Worker{{Uid: "1", WorkerSet: "n/s", Url: "http://1/"}, {Uid: "2", WorkerSet: "n/s", Url: "http://2"}},
		Epochs:  map[string]string{"2": "e", "gone": "f"},
	})
	p := &catalog.Profile{
		ID: "p", Set: "n/s", UpstreamModel: "z", TokenizerPath: "/m", PassTokenIDs: true, BlockSize: 16, MaxModelLen: 100,
		Workers: []catalog.Worker{{UID: "1", URL: "http://1"}, {UID: "2", URL: "http://2", Epoch: "e"}}, Parity: routerv1.ParityState_PARITY_STATE_DIFFERS,
	}
	l := &catalog.Profile{ID: "l", Set: "n/none", UpstreamModel: "a", LoRA: "a"}
	want := []*catalog.Model{
		{Name: "a", Root: "z", Adapter: true, Profiles: []*catalog.Profile{l}, Considered: []*catalog.Profile{l, p}, External: true, Ready: true, ReadsTags: true},
		{Name: "lonely"},
		{Name: "z", Root: "z", MaxModelLen: 100, Ready: true, Profiles: []*catalog.Profile{p}, Considered: []*catalog.Profile{p}},
	}
	if diff := cmp.Diff(want, v.Models); diff != "" || v.Version != 7 {
		t.Errorf("version %d %s", v.Version, diff)
	}
	if diff := cmp.Diff([]*catalog.Profile{p, l}, v.Profiles); diff != "" {
		t.Error(diff)
	}
	if v.Model("z") != v.Models[2] || v.Model("Z") != nil || v.Model("") != nil {
		t.Error("look-ups by name are wrong")
	}
	if empty := catalog.New(nil); len(empty.Models) != 0 || empty.Model("x") != nil {
		t.Error("no catalog is not an empty one")
	}
}
