package main

import (
	"bytes"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

func secs(s float64) *durationpb.Duration {
	return durationpb.New(time.Duration(s * float64(time.Second)))
}

func TestPrintQueue(t *testing.T) {
	s := &adminv1.StatusResponse{
		CatalogVersion: 7, TrackerConnected: true, Queued: 3,
		Queue: []*adminv1.QueueClass{{Qos: "interactive", Waiting: 2, Oldest: secs(4)}, {Qos: "batch", Waiting: 1, Oldest: secs(60)}},
		Waiting: []*adminv1.QueuedRequest{
			{RequestId: "a", Model: "m", Tenant: "n/team", Qos: "interactive", Waited: secs(4), Worker: "x/0", PredictedWait: secs(1.5), Why: "queue"},
			{RequestId: "b", Model: "m", Qos: "interactive", Waited: secs(1), Why: "policy"},
		},
		Peers: []*adminv1.PeerStatus{{Router: "ABC", Age: secs(1.23)}},
	}
	const want = `catalog version 7, kvtracker followed

profile  tokens from  token ids  block  cached tokens  agree  too few  too many

worker  ready  sample  block  context  index  blocks  lag  token ids  checked

other router  heard of
ABC           1.2s ago

waiting      requests  longest
interactive  2         4s
batch        1         1m0s

request  model  tenant  class        waits  for  from now  why
a        m      n/team  interactive  4s     x/0  1.5s      queue
b        m              interactive  1s     -    0s        policy
`
	var out bytes.Buffer
	if err := printStatus(&out, s, time.Unix(1000, 0)); err != nil {
		t.Fatal(err)
	}
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestPrintScores(t *testing.T) {
	d := &adminv1.Decision{
		RequestId: "r", Model: "m", Pool: "n/p", Policy: "k2", CatalogVersion: 1, Chosen: "x/0", ServedBy: "x/0", Reason: "so", TimeScale: 2,
		Waited: secs(12.3), Held: []string{"pages"}, Ahead: 4,
		Candidates: []*adminv1.Candidate{
			{Worker: "x/0", PredictedTtft: secs(1), Interference: secs(.2), EvictionLoss: secs(.05), Score: 2.5, PagesNeeded: 100, PagesFree: 120, Filled: 7, Settles: true},
			{Worker: "y/0", PredictedTtft: secs(2), Score: 4, PagesNeeded: 100, PagesFree: 20, Hold: "pages"},
			{Worker: "z/0", Dropped: "not ready"},
		},
	}
	const want = `request    r
model      m (pool n/p)
decided    1970-01-01T00:00:00Z by k2, catalog version 1
chosen     x/0
reason     so
waited     12.3s, last for room for its KV blocks, 4 before it

worker  predicted  = wait  + prefill  e2e  cost  prompt  in cache  on its way  in flight  running  waiting  kv   dropped
x/0     1s         0s      0s         0s   -     0       0         0           0          0        0        0 %  
y/0     2s         0s      0s         0s   -     0       0         0           0          0        0        0 %  
z/0     0s         0s      0s         0s   -     0       0         0           0          0        0        0 %  not ready

worker  score  = predicted  + delay of others  + evicted  KV blocks  free  wanted  holds
x/0     1.25s  1s           200ms              50ms       100        120   35 %    
y/0     2s     2s           0s                 0s         100        20    -       pages
`
	var out bytes.Buffer
	if err := printDecision(&out, d); err != nil {
		t.Fatal(err)
	}
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}
