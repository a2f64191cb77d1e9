package v1alpha1_test

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kinference/kinference/api/v1alpha1"
)

func TestTimes(t *testing.T) {
	for text, want := range map[v1alpha1.Duration]time.Duration{
		"250ms": 250 * time.Millisecond, "30s": 30 * time.Second, "1h30m": 90 * time.Minute, "0s": 0,
		"": -1, "30": -1, "1d": -1, "1.5s": -1, "-1s": -1, "30 s": -1, "1h1m1s1ms1h": -1,
	} {
		if got, err := text.Parse(); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("Duration %q: %v, %v", text, got, err)
		}
	}
	for text, want := range map[v1alpha1.Window]time.Duration{
		"1m": time.Minute, "24h": 24 * time.Hour, "30d": 720 * time.Hour, "366d": 366 * 24 * time.Hour, "9999s": 9999 * time.Second,
		"": -1, "0m": -1, "367d": -1, "1h30m": -1, "100ms": -1, "10000s": -1,
	} {
		if got, err := text.Parse(); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("Window %q: %v, %v", text, got, err)
		}
	}
	if v1alpha1.Duration("x").Or(time.Second) != time.Second || v1alpha1.Window("").Or(time.Second) != time.Second || v1alpha1.Window("2s").Or(0) != 2*time.Second {
		t.Error("Or")
	}
}

func TestSizesAndAmounts(t *testing.T) {
	for text, want := range map[v1alpha1.Size]int64{"64Ki": 64 << 10, "4Mi": 4 << 20, "": -1, "4Gi": -1, "0Mi": -1, "4MB": -1, "10000Ki": -1} {
		if got, err := text.Bytes(); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("Size %q: %v, %v", text, got, err)
		}
	}
	if v1alpha1.Decimal("1.10").Float() != 1.1 || v1alpha1.Decimal("").Float() != 0 {
		t.Error("Decimal")
	}
	for scope, want := range map[v1alpha1.CacheScope]string{"Tenant": "", "User": "", "Shared:research": "research"} {
		if got := scope.Group(); got != want {
			t.Errorf("%s: %q", scope, got)
		}
	}
}

// Each kind and its list is known to clients, and copies are deep.
func TestScheme(t *testing.T) {
	s := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{
		v1alpha1.KindGatewayBackend, v1alpha1.KindInferencePolicy, v1alpha1.KindInferencePool,
		v1alpha1.KindInferenceProvider, v1alpha1.KindInferenceTenant, v1alpha1.KindInferenceWorkerSet,
	} {
		for _, k := range []string{kind, kind + "List"} {
			o, err := s.New(schema.GroupVersionKind{Group: v1alpha1.Group, Version: v1alpha1.Version, Kind: k})
			if err != nil {
				t.Error(err)
			} else if copied := o.DeepCopyObject(); !reflect.DeepEqual(o, copied) {
				t.Errorf("%s: copy differs", k)
			}
		}
	}
}

// 0 denies and absent does not limit: both survive a round trip.
func TestZeroIsNotAbsent(t *testing.T) {
	var l v1alpha1.Limit
	if err := json.Unmarshal([]byte(`{"name":"l","requests":0,"tokens":{"total":0}}`), &l); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(l)
	if err != nil || string(out) != `{"name":"l","tokens":{"total":0},"requests":0}` {
		t.Errorf("%s, %v", out, err)
	}
	if l.Requests == nil || l.Concurrency != nil || l.Tokens.Input != nil {
		t.Errorf("%+v", l)
	}
}
