package bus_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/natsd"
	"github.com/kinference/kinference/internal/testenv"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// fill sets every field, so that one which the encoder forgets is noticed.
func fill(m protoreflect.Message, seed int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		n := seed*100 + i + 1
		var v protoreflect.Value
		switch {
		case f.Message() != nil && f.Message().FullName() == "google.protobuf.Timestamp":
			v = protoreflect.ValueOfMessage(timestamppb.New(time.Unix(1_700_000_000+int64(n), 123456789)).ProtoReflect())
		case f.Message() != nil:
			inner := m.NewField(f).Message()
			fill(inner, n)
			v = protoreflect.ValueOfMessage(inner)
		case f.IsList():
			list := m.NewField(f).List()
			list.Append(protoreflect.ValueOfString(fmt.Sprintf("a%d", n)))
			list.Append(protoreflect.ValueOfString("ü \"\\\n\x00\u2028"))
			v = protoreflect.ValueOfList(list)
		case f.Kind() == protoreflect.StringKind:
			v = protoreflect.ValueOfString(fmt.Sprintf("s%d", n))
		case f.Kind() == protoreflect.BoolKind:
			v = protoreflect.ValueOfBool(true)
		case f.Kind() == protoreflect.Uint32Kind:
			v = protoreflect.ValueOfUint32(math.MaxUint32 - uint32(n))
		case f.Kind() == protoreflect.DoubleKind:
			v = protoreflect.ValueOfFloat64(float64(n) / 7)
		case f.Kind() == protoreflect.EnumKind:
			v = protoreflect.ValueOfEnum(2)
		default:
			panic("fill " + f.FullName())
		}
		m.Set(f, v)
	}
}

func TestUsageEventKeepsEveryField(t *testing.T) {
	full := new(usagev1.Usage)
	fill(full.ProtoReflect(), 0)
	zero := &usagev1.Usage{ // an explicit zero is a value
		Id: "x", Ended: timestamppb.New(time.Unix(5, 0)), Ttft: proto.Float64(0),
		Tokens: &usagev1.Tokens{Input: proto.Uint32(0), CachedInput: proto.Uint32(0), Output: proto.Uint32(0)},
	}
	for name, want := range map[string]*usagev1.Usage{"full": full, "zero": zero} {
		data := bus.EncodeUsage(nil, want)
		if !json.Valid(data) {
			t.Fatalf("%s: no JSON: %s", name, data)
		}
		got, err := bus.DecodeUsage(data)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, data)
		}
		if !proto.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
	}
	broken := bus.EncodeUsage(nil, &usagev1.Usage{Id: "x", User: "a\xffb"})
	if !json.Valid(broken) {
		t.Errorf("text that is no UTF-8 breaks the event: %q", broken)
	}
}

func TestDecodeUsageRefuses(t *testing.T) {
	for name, data := range map[string]string{
		"text":          `usage`,
		"no CloudEvent": `{"id":"x","data":{"id":"x","ended":"2026-01-01T00:00:00Z"}}`,
		"another type":  `{"specversion":"1.0","type":"kinference.usage.v2","id":"x","data":{"id":"x","ended":"2026-01-01T00:00:00Z"}}`,
		"other ids":     `{"specversion":"1.0","type":"kinference.usage.v1","id":"y","data":{"id":"x","ended":"2026-01-01T00:00:00Z"}}`,
		"no time":       `{"specversion":"1.0","type":"kinference.usage.v1","id":"x","data":{"id":"x"}}`,
		"no data":       `{"specversion":"1.0","type":"kinference.usage.v1","id":"x"}`,
		"no number":     `{"specversion":"1.0","type":"kinference.usage.v1","id":"x","data":{"id":"x","status":"secret"}}`,
	} {
		_, err := bus.DecodeUsage([]byte(data))
		if !errors.Is(err, bus.ErrNoUsage) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %v", name, err)
		}
	}
	more := `{"specversion":"1.0","type":"kinference.usage.v1","id":"x","new":1,"data":{"id":"x","ended":"2026-01-01T00:00:00Z","inventedLater":{"a":[1]}}}`
	if _, err := bus.DecodeUsage([]byte(more)); err != nil {
		t.Errorf("a later version with more fields: %v", err)
	}
}

func TestUsageSubject(t *testing.T) {
	for tenant, want := range map[string]string{
		"team-a/support": "usage.team-a.support",
		"":               "usage.=.=",
		"a.b/c*>":        "usage.a=2Eb.c=2A=3E",
	} {
		if got := bus.UsageSubject(tenant); got != want {
			t.Errorf("%q: got %s, want %s", tenant, got, want)
		}
	}
}

func usageMessages(from, to int) []bus.UsageMessage {
	var list []bus.UsageMessage
	for i := from; i < to; i++ {
		id := fmt.Sprintf("id-%d", i)
		list = append(list, bus.UsageMessage{ID: id, Subject: bus.UsageSubject("ns/t"), Data: bus.EncodeUsage(nil, &usagev1.Usage{Id: id, Ended: timestamppb.Now()})})
	}
	return list
}

// Events that are published while the server is restarted and taken by a
// handler that fails come all, and the stream holds each once.
func TestUsageStreamSurvivesRestart(t *testing.T) {
	server := natsd.Options{Dir: t.TempDir(), Port: testenv.FreePort(t)}
	srv, err := natsd.Start(server)
	if err != nil {
		t.Fatal(err)
	}
	stop := sync.OnceFunc(srv.Stop)
	t.Cleanup(func() { stop() })
	c, err := bus.Connect(t.Context(), srv.URL(), "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)

	publish := func(list []bus.UsageMessage) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for len(list) > 0 && ctx.Err() == nil {
			list = c.PublishUsage(ctx, bus.UsageSettings{}, list).Left
		}
		if len(list) > 0 {
			t.Fatalf("%d events were not stored", len(list))
		}
	}
	publish(usageMessages(0, 100))
	stop()
	again, err := natsd.Start(server)
	if err != nil {
		t.Fatal(err)
	}
	stop = sync.OnceFunc(again.Stop)
	publish(usageMessages(50, 200)) // half of the first come again

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	seen := map[string]int{}
	var fails, total int
	go func() {
		done <- c.ConsumeUsage(ctx, bus.UsageSettings{}, "test", func(_ context.Context, batch []bus.UsageDelivery) error {
			if fails++; fails == 1 {
				return errors.New("the store is away")
			}
			for _, d := range batch {
				u, err := bus.DecodeUsage(d.Data)
				if err != nil {
					t.Errorf("decode: %v", err)
					continue
				}
				seen[u.GetId()]++
				total++
			}
			if len(seen) == 200 {
				cancel()
			}
			return nil
		}, nil)
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("not all events came")
	}
	if total != 200 {
		t.Errorf("%d events came, want each of 200 once", total)
	}
}

func TestUsageConsumerStartsOver(t *testing.T) {
	c, err := bus.Connect(t.Context(), testenv.NATS(t), "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	// The first finds no stream, and makes it.
	if r := c.PublishUsage(t.Context(), bus.UsageSettings{}, usageMessages(0, 1)); len(r.Left) != 1 || r.Err == nil {
		t.Errorf("without a stream: got %+v", r)
	}
	if r := c.PublishUsage(t.Context(), bus.UsageSettings{}, usageMessages(0, 1200)); r.Err != nil || len(r.Left) > 0 || r.Low != 1 || r.High != 1200 {
		t.Fatalf("publish: %+v", r)
	}
	if r := c.PublishUsage(t.Context(), bus.UsageSettings{}, usageMessages(0, 1)); r.Err != nil || r.Low != 0 {
		t.Errorf("publish again: got %+v, want no number", r)
	}
	for _, name := range []string{"one", "two"} { // a new store has a new consumer
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		err := c.ConsumeUsage(ctx, bus.UsageSettings{}, name, func(_ context.Context, batch []bus.UsageDelivery) error {
			if n += len(batch); n >= 1200 {
				cancel()
			}
			return nil
		}, nil)
		cancel()
		if err != nil || n != 1200 {
			t.Errorf("%s: got %d events, %v", name, n, err)
		}
		if lag, err := c.UsageLag(t.Context(), name); err != nil || lag != 0 {
			t.Errorf("%s: lag %d, %v", name, lag, err)
		}
		if err := c.DropUsageConsumer(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
	if err := c.DropUsageConsumer(t.Context(), "one"); err != nil {
		t.Errorf("drop again: %v", err)
	}
}

// A consumer whose reader does not come back goes, if it shall, and keeps nothing on
// the stream any more.
func TestIdleUsageConsumerGoes(t *testing.T) {
	c, err := bus.Connect(t.Context(), testenv.NATS(t), "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	for name, idle := range map[string]time.Duration{"stays": 0, "goes": time.Second} {
		// As long as it is read with it stays. A context with a deadline ends a moment after
		// that has passed, and the client complains in between.
		ctx, cancel := context.WithCancel(t.Context())
		end := time.AfterFunc(2*time.Second, cancel)
		if err := c.ConsumeUsage(ctx, bus.UsageSettings{Idle: idle}, name, func(context.Context, []bus.UsageDelivery) error { return nil }, func(err error) {
			if ctx.Err() == nil {
				t.Errorf("%s: %v", name, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		end.Stop()
		cancel()
	}
	deadline, tick := time.After(time.Minute), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := c.UsageLag(t.Context(), "goes"); errors.Is(err, jetstream.ErrConsumerNotFound) {
			break
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("it is still there")
		}
	}
	if _, err := c.UsageLag(t.Context(), "stays"); err != nil {
		t.Error(err)
	}
}

// A full stream makes room for new events by those that every consumer has, and
// by no others.
func TestTrimUsage(t *testing.T) {
	c, err := bus.Connect(t.Context(), testenv.NATS(t), "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	set := bus.UsageSettings{MaxBytes: 1 << 20}
	if _, err := c.EnsureUsageStream(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	next := 0
	fill := func() (stored int) {
		for {
			r := c.PublishUsage(t.Context(), set, usageMessages(next, next+100))
			next += 100
			stored += 100 - len(r.Left)
			if len(r.Left) > 0 { // it refuses rather than drops
				return stored
			}
		}
	}
	consume := func(name string, n int) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		got := 0
		if err := c.ConsumeUsage(ctx, set, name, func(_ context.Context, batch []bus.UsageDelivery) error {
			if got += len(batch); got >= n {
				cancel()
			}
			return nil
		}, nil); err != nil {
			t.Fatal(err)
		}
	}
	all := fill()
	if s, err := c.TrimUsage(t.Context()); err != nil || s.Removed != 0 {
		t.Errorf("without a consumer: %+v, %v", s, err)
	}
	consume("fast", all)
	consume("slow", 1) // one batch
	s, err := c.TrimUsage(t.Context())
	if err != nil || s.Removed != 512 || s.Slow != "slow" {
		t.Errorf("with a slow one: %+v, %v", s, err)
	}
	if n := fill(); n < 400 {
		t.Errorf("only %d fit after 512 went", n)
	}
	if err := c.DropUsageConsumer(t.Context(), "slow"); err != nil {
		t.Fatal(err)
	}
	if s, err := c.TrimUsage(t.Context()); err != nil || s.Removed == 0 {
		t.Errorf("without the slow one: %+v, %v", s, err)
	}
	if s, err := c.TrimUsage(t.Context()); err != nil || s.Removed != 0 || s.Bytes > s.MaxBytes/10*7 {
		t.Errorf("with room: %+v, %v", s, err)
	}
}
