package indexspeed_test

import (
	"testing"

	"github.com/kinference/kinference/internal/bench/indexspeed"
)

// TestMeasure runs it small: every figure is there and plausible.
func TestMeasure(t *testing.T) {
	got := map[string]float64{}
	for _, f := range indexspeed.Measure(1, 16) {
		got[f.Name] = f.Value
	}
	for _, name := range []string{
		"blocks", "bytes_per_block", "fill_block_events_per_s", "ingest_decoded_block_events_per_s", "ingest_block_events_per_s", "clear_ms", "clear_hidden_us",
		"lookup_10_blocks_16_workers_ns", "lookup_100_blocks_16_workers_ns", "lookup_1000_blocks_16_workers_ns", "lookup_8000_blocks_16_workers_ns",
		"lookup_8000_blocks_miss_ns", "lookup_p50_under_ingest_ns", "lookup_p99_under_ingest_us", "ingest_under_lookups_block_events_per_s", "request_128k_tokens_hash_and_lookup_us",
		"snapshot_ms", "snapshot_bytes_per_block", "restore_ms", "restore_and_tail_ms", "stream_bytes_per_block_stored_and_removed",
	} {
		if !(got[name] > 0) {
			t.Errorf("%s is %v, want more than 0", name, got[name])
		}
	}
}
