package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	kvtrackerv1 "github.com/kinference/kinference/proto/gen/kinference/kvtracker/v1"
)

// ReportBucket is the name of the bucket with the last report of each worker.
const ReportBucket = "worker-state"

// maxReport bounds an encoded report.
const maxReport = 4 << 10

// PublishReport sends a report to those who listen now; it is not stored and
// may be lost.
func (c *Conn) PublishReport(r *kvtrackerv1.WorkerReport) error {
	w, data, err := encodeReport(r)
	if err != nil {
		return err
	}
	if err := c.nc.Publish(w.StateSubject(), data); err != nil {
		return fmt.Errorf("publish report: %w", err)
	}
	return nil
}

// StoreReport puts a report into the bucket, for those who join later. It is
// meant for changes (readiness, block size, gone) and every few seconds, not
// for every sample. The bucket is made where it is missing.
func (c *Conn) StoreReport(ctx context.Context, r *kvtrackerv1.WorkerReport) error {
	w, data, err := encodeReport(r)
	if err != nil {
		return err
	}
	kv, err := c.reports(ctx)
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, apiTimeout)
		defer cancel()
		_, err = kv.Put(ctx, w.StateKey(), data)
	}
	if err != nil {
		return fmt.Errorf("store report: %w", err)
	}
	return nil
}

// reports returns the bucket; it is bound anew each time, because the server
// may have lost it. Entries go after ten minutes without an update.
func (c *Conn) reports(ctx context.Context) (jetstream.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	kv, err := c.js.KeyValue(ctx, ReportBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = c.js.CreateOrUpdateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket:      ReportBucket,
			Description: "last report of each inference worker",
			History:     1,
			TTL:         10 * time.Minute,
			MaxBytes:    64 << 20,
			Storage:     jetstream.MemoryStorage,
		})
	}
	return kv, err
}

// ConsumeReports calls fn with the reports in the bucket and with every report
// that is published, until ctx is done; it returns nil then. Reports may come
// twice and out of order: the newest sampled_unix_nanos wins. fn is called from
// one goroutine at a time and owns its argument. Malformed reports go to
// trouble, as does every interruption.
func (c *Conn) ConsumeReports(ctx context.Context, fn func(*kvtrackerv1.WorkerReport), trouble func(error)) error {
	if trouble == nil {
		trouble = func(error) {}
	}
	// A slow reader loses samples, not memory: the newest wins anyway.
	msgs := make(chan *nats.Msg, 8192)
	sub, err := c.nc.ChanSubscribe(statePrefix+">", msgs)
	if err != nil {
		return fmt.Errorf("subscribe to reports: %w", err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	status := c.nc.StatusChanged(nats.CONNECTED)
	defer c.nc.RemoveStatusListener(status)

	// The bucket is read at the start and after each reconnect, in pieces: a
	// failure is tried again.
	retry := time.NewTimer(0)
	defer retry.Stop()
	for try := 0; ; {
		select {
		case <-ctx.Done():
			return nil
		case m := <-msgs:
			r, err := decodeReport(m.Subject, m.Data)
			if err != nil {
				trouble(err)
				continue
			}
			fn(r)
		case _, ok := <-status:
			if !ok { // the connection was closed
				status = nil
				continue
			}
			try = 0
			retry.Reset(0)
		case <-retry.C:
			if err := c.readBucket(ctx, fn, trouble); err != nil && ctx.Err() == nil {
				trouble(fmt.Errorf("read stored reports: %w", err))
				retry.Reset(min(100*time.Millisecond<<min(try, 6), 5*time.Second))
				try++
			}
		}
	}
}

// readBucket calls fn with each report in the bucket.
func (c *Conn) readBucket(ctx context.Context, fn func(*kvtrackerv1.WorkerReport), trouble func(error)) error {
	kv, err := c.reports(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	watch, err := kv.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer func() { _ = watch.Stop() }()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case e, ok := <-watch.Updates():
			if !ok {
				return errors.New("watch ended")
			}
			if e == nil { // all that was stored
				return nil
			}
			r, err := decodeReport(statePrefix+e.Key(), e.Value())
			if err != nil {
				trouble(err)
				continue
			}
			fn(r)
		}
	}
}

func encodeReport(r *kvtrackerv1.WorkerReport) (Worker, []byte, error) {
	w, err := ParseWorker(r.GetWorker(), r.GetWorkerSet())
	if err != nil {
		return w, nil, fmt.Errorf("encode report: %w", err)
	}
	data, err := proto.Marshal(r)
	if err != nil {
		return w, nil, fmt.Errorf("encode report: %w", err)
	}
	return w, data, nil
}

// decodeReport refuses a report that speaks of another worker than its subject.
func decodeReport(subject string, data []byte) (*kvtrackerv1.WorkerReport, error) {
	w, err := ParseStateSubject(subject)
	if err != nil {
		return nil, err
	}
	if len(data) > maxReport {
		return nil, fmt.Errorf("report of %d bytes, limit %d", len(data), maxReport)
	}
	r := new(kvtrackerv1.WorkerReport)
	if err := proto.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("decode report: %w", err)
	}
	if r.GetWorker() != w.ID() || r.GetWorkerSet() != w.SetName() {
		return nil, fmt.Errorf("report on subject of %.64q speaks of another worker", w.ID())
	}
	if r.GetSampledUnixNanos() < 0 {
		return nil, fmt.Errorf("report on %.64q was sampled before 1970", w.ID())
	}
	return r, nil
}
