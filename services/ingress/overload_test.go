package ingress_test

import (
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/internal/rpc"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// What the router had no room for is told, so that objectives count it: once, as
// overload and with nothing used. What is the client's fault is not.
func TestUsageTellsOfOverload(t *testing.T) {
	events, change := collectUsage(t)
	e := start(t, change).ready()
	fails := func(err error) string {
		e.router.set(func(*routerv1.RouteRequest) (*routerv1.RouteResponse, error) { return nil, err })
		resp, _ := e.post(chatPath, chatRequest(true, ""))
		return resp.Header.Get("X-Request-Id")
	}
	fault := fails(rpc.Error(connect.CodeInvalidArgument, "bad", 0))
	for status, err := range map[uint32]error{
		429: rpc.Error(connect.CodeResourceExhausted, "full", 0),
		503: rpc.Error(connect.CodeUnavailable, "no worker", time.Second),
	} {
		u := events.event(fails(err))
		if !u.GetOverload() || u.GetStatus() != status || counted(u)[:7] != "? ? ? ?" || u.GetAttempts() != 0 || u.GetModel() == "" {
			t.Errorf("status %d: got %v", status, u)
		}
	}
	events.mu.Lock()
	defer events.mu.Unlock()
	if len(events.byID[fault]) > 0 {
		t.Errorf("a client's fault: got %v", events.byID[fault])
	}
}
