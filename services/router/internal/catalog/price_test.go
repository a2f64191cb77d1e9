package catalog

import (
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func TestPrices(t *testing.T) {
	set := &resources.WorkerSet{Name: "ns/s", Accelerators: 8, HourlyPrice: "1.98", Currency: "EUR"}
	set.Profiles = []*resources.Profile{{ID: "ns/s/m", Set: set, Names: []string{"m", "alias"}}}
	provider := &resources.Provider{Name: "ns/p"}
	provider.Models = []*resources.ProviderModel{
		{Provider: provider, UpstreamModel: "up", Names: []string{"up", "big"}, Price: &v1alpha1.TokenPrice{Currency: "USD", PerMillion: v1alpha1.PricePerMillion{Input: "3", Output: "15.00"}}},
		{Provider: provider, UpstreamModel: "free"},
	}
	c := &resources.Catalog{Sets: []*resources.WorkerSet{set, {Name: "ns/unpriced"}}, Providers: []*resources.Provider{provider}}
	got := prices(c)
	want := []*routerv1.Price{
		{Backend: "ns/s", Currency: "EUR", Hourly: "15.84", Names: []string{"m", "alias"}},
		{Backend: "ns/p", Model: "up", Currency: "USD", Input: "3", CachedInput: "3", Output: "15.00", Names: []string{"up", "big"}},
	}
	if len(got) != len(want) {
		t.Fatalf("got %v", got)
	}
	versions := map[string]bool{}
	for i, p := range got {
		versions[p.Version] = true
		p = proto.CloneOf(p)
		p.Version = ""
		if !proto.Equal(p, want[i]) {
			t.Errorf("got %v, want %v", p, want[i])
		}
	}
	set.HourlyPrice = "1.99"
	versions[prices(c)[0].Version] = true
	set.HourlyPrice = "1.98"
	versions[prices(c)[0].Version] = true
	if len(versions) != 3 {
		t.Errorf("versions are %v: want one for each price that there was", versions)
	}
}

func TestTimes(t *testing.T) {
	for _, tt := range []struct {
		decimal string
		n       int
		want    string
	}{{"1.98", 8, "15.84"}, {"0.000000001", 1024, "0.000001024"}, {"999999999999", 2, "1999999999998"}, {"7", 1, "7"}, {"0", 8, "0"}} {
		if got, ok := times(tt.decimal, tt.n); got != tt.want || !ok {
			t.Errorf("%s × %d: got %s, want %s", tt.decimal, tt.n, got, tt.want)
		}
	}
	if _, ok := times("1e3", 2); ok {
		t.Error("1e3 was taken")
	}
}
