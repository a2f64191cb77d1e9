package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
	"github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1/kvtrackerv1connect"
)

// Delays between attempts to reach the tracker.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = 2 * time.Second
)

// Follow keeps the table in step with the tracker's stream until ctx is done.
func (t *Table) Follow(ctx context.Context, client kvtrackerv1connect.KVTrackerServiceClient, log *slog.Logger) error {
	delay := firstRetry
	for ctx.Err() == nil {
		synced, err := t.stream(ctx, client)
		t.end()
		if ctx.Err() != nil {
			return nil
		}
		if synced {
			delay = firstRetry
		}
		if delay == firstRetry { // once per outage, not per attempt
			log.Warn("kvtracker is away: routing by own knowledge", "err", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		delay = min(2*delay, lastRetry)
	}
	return nil
}

func (t *Table) stream(ctx context.Context, client kvtrackerv1connect.KVTrackerServiceClient) (synced bool, err error) {
	s, err := client.WatchWorkers(ctx, &kvtrackerv1.WatchWorkersRequest{})
	if err != nil {
		return false, fmt.Errorf("watch workers: %w", err)
	}
	defer s.Close()
	t.begin()
	for s.Receive() {
		t.Update(time.Now(), s.Msg())
		synced = synced || s.Msg().Synced
	}
	return synced, s.Err()
}
