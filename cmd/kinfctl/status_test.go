package main

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

func TestPrintStatus(t *testing.T) {
	const (
		agrees  = routerv1.ParityState_PARITY_STATE_AGREES
		differs = routerv1.ParityState_PARITY_STATE_DIFFERS
	)
	now := time.Unix(1000, 0)
	s := &adminv1.StatusResponse{
		CatalogVersion: 7, TrackerConnected: true,
		Profiles: []*adminv1.ProfileStatus{
			{Profile: "n/s/m", Source: adminv1.TokenSource_TOKEN_SOURCE_LOCAL, PassTokenIds: true, BlockSize: 16, Tokens: agrees, WorkersAgree: 2, WorkersDiffer: 1,
				Cached: agrees, CachedCounts: &adminv1.CachedCounts{Agree: 40, TooFew: 1, TooMany: 2}},
			{Profile: "n/t/m", Source: adminv1.TokenSource_TOKEN_SOURCE_DISTRUSTED, Tokens: differs, TokensCause: routerv1.ParityCause_PARITY_CAUSE_TEMPLATE, WorkersDiffer: 1,
				Cached: differs, CachedCause: routerv1.ParityCause_PARITY_CAUSE_BLOCK_SIZE, CachedDiffers: []string{"x/0", "y/0"}},
			{Profile: "n/u/m", Source: adminv1.TokenSource_TOKEN_SOURCE_ASKED, CachedCause: routerv1.ParityCause_PARITY_CAUSE_NOT_REPORTED},
		},
		Workers: []*adminv1.WorkerStatus{
			{Worker: "x/0", Ready: true, BlockSize: 16, MaxModelLen: 4096, Tokens: agrees, TokensCheckedUnixNanos: time.Unix(940, 0).UnixNano()},
			{Worker: "y/0", Reason: "no answer", Index: &adminv1.WorkerIndex{Live: true}},
			{Worker: "z/0", Ready: true, Index: &adminv1.WorkerIndex{}},
			{Worker: "zz/0", Ready: true},
		},
	}
	if err := json.Unmarshal([]byte(`{"sample_age":{"nanos":210000000},"index":{"live":true,"complete":true,"blocks":12,"lag":{"nanos":3000000}}}`), s.Workers[0]); err != nil {
		t.Fatal(err)
	}
	const want = `catalog version 7, kvtracker followed

profile  tokens from             token ids                                  block  cached tokens                          agree  too few  too many
n/s/m    tokenizer, passed on    ok (1 of 3 workers differ)                 16     ok                                     40     1        2
n/t/m    workers, not tokenizer  differs: template (1 of 1 workers differ)  -      differs: block size at x/0 and 1 more  0      0        0
n/u/m    workers                 -                                          -      unchecked: not reported                0      0        0

worker  ready      sample  block  context  index         blocks  lag  token ids  checked
x/0     yes        200ms   16     4096     complete      12      3ms  ok         1m0s ago
y/0     no answer  -       -      -        incomplete    0       0s   unchecked  -
z/0     yes        -       -      -        not followed  0       0s   unchecked  -
zz/0    yes        -       -      -        unknown       -       -    unchecked  -
`
	var out bytes.Buffer
	if err := printStatus(&out, s, now); err != nil {
		t.Fatal(err)
	}
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestStatusJSON(t *testing.T) {
	serve(t, &adminv1.StatusResponse{CatalogVersion: 7})
	if out, errs, code := kinfctl(t, "status", "-o", "json"); code != 0 || out != `{"catalogVersion":"7"}`+"\n" {
		t.Errorf("%d %s: %s", code, errs, out)
	}
}
