// Command usage-export copies usage events from NATS into a file of JSON lines,
// each event once. It is an example to start from: it needs nothing of Kinference
// but the documented stream, and the NATS client.
//
//	usage-export -nats nats://127.0.0.1:4222 -consumer billing -file usage.jsonl
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// event is what this program needs to know of a CloudEvent; data is copied as
// it is.
type event struct {
	SpecVersion string          `json:"specversion"`
	Type        string          `json:"type"`
	ID          string          `json:"id"`
	Data        json.RawMessage `json:"data"`
}

func main() {
	url := flag.String("nats", nats.DefaultURL, "URLs of NATS")
	name := flag.String("consumer", "usage-export", "name of the durable consumer: the stream remembers how far it is")
	subject := flag.String("subject", "usage.>", "what to export: usage.<namespace>.<tenant> for one tenant")
	path := flag.String("file", "usage.jsonl", "file to append to")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *url, *name, *subject, *path); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, url, name, subject, path string) error {
	out, err := open(path)
	if err != nil {
		return err
	}
	defer out.file.Close()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		if err := follow(ctx, js, name, subject, out); err != nil && ctx.Err() == nil {
			log.Printf("try again in 2 s: %v", err)
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Second):
			}
		}
	}
	return nil
}

// follow writes batches until something fails.
func follow(ctx context.Context, js jetstream.JetStream, name, subject string, out *sink) error {
	consumer, err := js.CreateOrUpdateConsumer(ctx, "USAGE", jetstream.ConsumerConfig{
		Durable: name, FilterSubject: subject, AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second, MaxAckPending: 2000,
	})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		batch, err := consumer.Fetch(500, jetstream.FetchMaxWait(time.Second))
		if err != nil {
			return err
		}
		var taken []jetstream.Msg
		for m := range batch.Messages() {
			if err := out.add(m.Data()); err != nil {
				log.Printf("left out: %v", err) // it would come again for ever
			}
			taken = append(taken, m)
		}
		// First on the disk, then acknowledged: what comes again is known by its id.
		if err := out.sync(); err != nil {
			return err
		}
		for _, m := range taken {
			if err := m.DoubleAck(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// sink is the file, and the ids that are in it.
type sink struct {
	file *os.File
	w    *bufio.Writer
	ids  map[string]bool
}

// open reads the ids of what is there. A last line that was cut off is removed.
func open(path string) (*sink, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	s := &sink{file: f, ids: map[string]bool{}}
	r, good := bufio.NewReader(f), int64(0)
	for {
		line, err := r.ReadBytes('\n')
		var e event
		if err != nil || json.Unmarshal(line, &e) != nil {
			break
		}
		s.ids[e.ID] = true
		good += int64(len(line))
	}
	if err := f.Truncate(good); err != nil {
		return nil, err
	}
	if _, err := f.Seek(good, 0); err != nil {
		return nil, err
	}
	s.w = bufio.NewWriter(f)
	return s, nil
}

func (s *sink) add(data []byte) error {
	var e event
	if err := json.Unmarshal(data, &e); err != nil {
		return err
	}
	if e.SpecVersion != "1.0" || e.Type != "kinference.usage.v1" || e.ID == "" {
		return errors.New("not a usage event of version 1")
	}
	if s.ids[e.ID] {
		return nil
	}
	if _, err := fmt.Fprintf(s.w, "%s\n", data); err != nil {
		return err
	}
	s.ids[e.ID] = true
	return nil
}

func (s *sink) sync() error {
	if err := s.w.Flush(); err != nil {
		return err
	}
	return s.file.Sync()
}
