package testenv_test

import (
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/testenv"
)

func TestRedisStopsAndStarts(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	if out, err := r.CLI("set", "k", "v"); err != nil || out != "OK" {
		t.Fatalf("set: got %q, %v", out, err)
	}
	r.Stop()
	if out, err := r.CLI("ping"); err == nil {
		t.Errorf("stopped server answers %q", out)
	}
	r.Start(t)
	if out, err := r.CLI("get", "k"); err != nil || out != "" {
		t.Errorf("get after a restart: got %q, %v, want nothing", out, err)
	}
}

func TestRedisClusterHasOwners(t *testing.T) {
	t.Parallel()
	g := testenv.RedisCluster(t, 1)
	primary, replica := g.Owner(t, "{a}k")
	if replica == nil {
		t.Fatal("the primary has no replica")
	}
	if out, err := primary.CLI("set", "{a}k", "v"); err != nil || out != "OK" {
		t.Errorf("set at the owner: got %q, %v", out, err)
	}
	if out, _ := replica.CLI("role"); !strings.HasPrefix(out, "slave") {
		t.Errorf("replica has role %q", out)
	}
}
