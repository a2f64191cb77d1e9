package main

import (
	"strings"
	"testing"

	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

func TestPrintIndex(t *testing.T) {
	var b strings.Builder
	err := printIndex(&b, &adminv1.InspectIndexResponse{Index: &kvtrackerv1.InspectResponse{
		Blocks: 1000, Bytes: 31_000, States: 7, Holed: 1,
		Prefixes: []*kvtrackerv1.Prefix{{First: 0xabc, Last: 0xdef, Blocks: 64, Below: 900, Holders: 8, Whole: 3}},
	}})
	want := `1000 blocks in 0.0 MB (31.0 bytes each), 7 combinations of holders, 1 workers with holes

FIRST BLOCK       BLOCKS  BELOW  HOLD THE FIRST  HOLD ALL
0000000000000abc  64      900    8               3
`
	if err != nil || b.String() != want {
		t.Errorf("got %v and\n%s\nwant\n%s", err, b.String(), want)
	}
}
