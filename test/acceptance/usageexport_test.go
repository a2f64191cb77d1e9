package acceptance

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// The example in deploy/ copies each event once, though events come twice and it is
// killed in between; and its stream is one that NATS takes.
func TestUsageExportExample(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "usage-export")
	if out, err := exec.Command("go", "build", "-o", bin, "../../deploy/examples/usage-export/main.go").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	nats := testenv.NATS(t)
	c, err := bus.Connect(t.Context(), nats, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	raw, err := os.ReadFile("../../deploy/examples/usage-export/stream.json")
	if err != nil {
		t.Fatal(err)
	}
	var config jetstream.StreamConfig
	if err := json.Unmarshal(raw, &config); err != nil {
		t.Fatal(err)
	}
	config.Replicas, config.MaxBytes = 1, 64<<20 // this server is alone, and the disk may be small
	if _, err := c.JetStream().CreateStream(t.Context(), config); err != nil {
		t.Fatalf("stream.json: %v", err)
	}
	publish := func(from, to int, again string) {
		var list []bus.UsageMessage
		for i := from; i < to; i++ {
			u := &usagev1.Usage{Id: fmt.Sprintf("id-%d", i), Ended: timestamppb.Now(), Tenants: []string{"ns/t"}}
			// Another message id stands for an event that comes again much later.
			list = append(list, bus.UsageMessage{ID: u.Id + again, Subject: bus.UsageSubject("ns/t"), Data: bus.EncodeUsage(nil, u)})
		}
		for len(list) > 0 {
			list = c.PublishUsage(t.Context(), bus.UsageSettings{}, list).Left
		}
	}
	e := &env{t: t}
	file := filepath.Join(t.TempDir(), "usage.jsonl")
	export := mortalProcess(t, "usage-export", bin, "-nats", nats, "-file", file)
	publish(0, 1500, "")
	e.eventually("the first are copied", func() bool { return len(exported(t, file)) > 100 })
	export.end(syscall.SIGKILL)
	publish(0, 200, "-again")
	publish(1500, 2000, "")
	export.start()
	var ids []string
	e.eventually("all are copied", func() bool { ids = exported(t, file); return len(ids) >= 2000 })
	seen := map[string]bool{}
	for _, id := range ids {
		if seen[id] {
			t.Errorf("%s is there twice", id)
		}
		seen[id] = true
	}
	if len(seen) != 2000 {
		t.Errorf("%d events, want 2000", len(seen))
	}
}

// exported are the ids in a file.
func exported(t *testing.T, path string) (ids []string) {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var e struct{ ID string }
		if json.Unmarshal(lines.Bytes(), &e) == nil {
			ids = append(ids, e.ID)
		}
	}
	return ids
}
