package bus

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// SnapshotBucket is the object store with snapshots of the KV index.
const SnapshotBucket = "kv-snapshots"

// maxSnapshot bounds what is read of the store: some 80 million blocks.
const maxSnapshot = 2 << 30

// snapshotTime bounds the transfer of a snapshot.
const snapshotTime = time.Minute

// ErrNoSnapshot says that there is none of that name.
var ErrNoSnapshot = errors.New("no snapshot")

// Position is a place in the stream of KV events: behind the message Seq of the stream
// that was created then.
type Position struct {
	Created time.Time
	Seq     uint64
}

// PutSnapshot stores a snapshot in place of the former one of that name.
func (c *Conn) PutSnapshot(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, snapshotTime)
	defer cancel()
	store, err := c.js.ObjectStore(ctx, SnapshotBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		store, err = c.js.CreateObjectStore(ctx, jetstream.ObjectStoreConfig{
			Bucket: SnapshotBucket, Description: "Snapshots of the KV index with their place in the stream of events", Storage: jetstream.FileStorage,
		})
		if errors.Is(err, jetstream.ErrBucketExists) { // made by a peer meanwhile
			store, err = c.js.ObjectStore(ctx, SnapshotBucket)
		}
	}
	if err != nil {
		return fmt.Errorf("open store %s: %w", SnapshotBucket, err)
	}
	if _, err := store.Put(ctx, jetstream.ObjectMeta{Name: name}, bytes.NewReader(data)); err != nil {
		return fmt.Errorf("store snapshot: %w", err)
	}
	return nil
}

// Snapshot reads a snapshot and when it was stored; ErrNoSnapshot if there is none.
func (c *Conn) Snapshot(ctx context.Context, name string) (data []byte, stored time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, snapshotTime)
	defer cancel()
	store, err := c.js.ObjectStore(ctx, SnapshotBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, stored, ErrNoSnapshot
	}
	if err != nil {
		return nil, stored, fmt.Errorf("open store %s: %w", SnapshotBucket, err)
	}
	for range snapshotTries {
		data, stored, err = read(ctx, store, name)
		if err == nil || errors.Is(err, ErrNoSnapshot) || ctx.Err() != nil {
			break
		}
	}
	if err != nil {
		return nil, stored, fmt.Errorf("read snapshot: %w", err)
	}
	return data, stored, nil
}

// A snapshot that is replaced while it is read never comes to its end, and nobody says so.
const (
	snapshotTries = 5
	leastRate     = 4 << 20 // bytes a second
)

func read(ctx context.Context, store jetstream.ObjectStore, name string) ([]byte, time.Time, error) {
	info, err := store.GetInfo(ctx, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, time.Time{}, ErrNoSnapshot
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	if info.Size > maxSnapshot {
		return nil, time.Time{}, fmt.Errorf("%d bytes, limit %d", info.Size, maxSnapshot)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second+time.Duration(info.Size/leastRate)*time.Second)
	defer cancel()
	object, err := store.Get(ctx, name)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer object.Close()
	data, err := io.ReadAll(io.LimitReader(object, maxSnapshot))
	return data, info.ModTime, err
}

// SnapshotTime is when the snapshot of that name was stored; ErrNoSnapshot if there is none.
func (c *Conn) SnapshotTime(ctx context.Context, name string) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	store, err := c.js.ObjectStore(ctx, SnapshotBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return time.Time{}, ErrNoSnapshot
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("open store %s: %w", SnapshotBucket, err)
	}
	info, err := store.GetInfo(ctx, name)
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return time.Time{}, ErrNoSnapshot
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("look for snapshot: %w", err)
	}
	return info.ModTime, nil
}

// Continues tells whether all messages behind a place are still in the stream.
func (c *Conn) Continues(ctx context.Context, p Position) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := c.js.Stream(ctx, KVStream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("stream %s: %w", KVStream, err)
	}
	info := stream.CachedInfo()
	return info.Created.Equal(p.Created) && info.State.LastSeq >= p.Seq && info.State.FirstSeq <= p.Seq+1, nil
}
