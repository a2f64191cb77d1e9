package overhead

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/stats"
)

// Disconnect is how long a worker went on with requests whose client had left:
// from the moment at which the client ends the request until the engine's count
// of running requests is down.
type Disconnect struct {
	HTTP2, Stream bool
	// Milliseconds.
	P50, P99, Max float64
	// Over is how many took more than 100 ms.
	Samples, Over int
}

// Name is the row's scenario name: disconnect_h2_whole.
func (d *Disconnect) Name() string {
	protocol, kind := "h1", "whole"
	if d.HTTP2 {
		protocol = "h2"
	}
	if d.Stream {
		kind = "stream"
	}
	return "disconnect_" + protocol + "_" + kind
}

// disconnectTokens are more than an engine generates until the client leaves.
const disconnectTokens = 4000

// Disconnects lets n clients, one after the other, leave in the middle of an
// answer, for both protocols and kinds of answer. running is the engine's count.
func Disconnects(ctx context.Context, url, model string, n int, running func() int) ([]Disconnect, error) {
	body := load.Chat(model, []load.Message{{Role: "user", Content: "a long answer please"}}, disconnectTokens)
	whole := bytes.Replace(body, []byte(`"stream":true,"stream_options":{"include_usage":true}`), []byte(`"stream":false`), 1)
	if bytes.Equal(whole, body) {
		return nil, errors.New("the form of requests changed")
	}
	var out []Disconnect
	for _, d := range []Disconnect{{Stream: true}, {}, {HTTP2: true, Stream: true}, {HTTP2: true}} {
		protocols := new(http.Protocols)
		protocols.SetHTTP1(!d.HTTP2)
		protocols.SetUnencryptedHTTP2(d.HTTP2)
		transport := &http.Transport{Protocols: protocols, DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext}
		text := body
		if !d.Stream {
			text = whole
		}
		var ms []float64
		for range n {
			took, err := leave(ctx, transport, url+"/v1/chat/completions", text, d.Stream, running)
			if err != nil {
				transport.CloseIdleConnections()
				return nil, fmt.Errorf("%s: %w", d.Name(), err)
			}
			ms = append(ms, float64(took.Microseconds())/1000)
		}
		transport.CloseIdleConnections()
		slices.Sort(ms)
		d.P50, d.P99, d.Max, d.Samples = stats.Quantile(ms, .5), stats.Quantile(ms, .99), ms[len(ms)-1], len(ms)
		for _, v := range ms {
			if v > 100 {
				d.Over++
			}
		}
		out = append(out, d)
	}
	return out, nil
}

// leave sends a request and gives it up once it runs, and has content if it is a
// stream.
func leave(ctx context.Context, transport http.RoundTripper, url string, body []byte, stream bool, running func() int) (time.Duration, error) {
	if err := until(ctx, func() bool { return running() == 0 }); err != nil {
		return 0, err
	}
	request, cancel := context.WithCancel(ctx)
	defer cancel()
	req, err := http.NewRequestWithContext(request, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	content, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		resp, err := transport.RoundTrip(req)
		if err != nil {
			content <- err
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			content <- fmt.Errorf("status %d", resp.StatusCode)
			return
		}
		buf := make([]byte, 4<<10)
		_, err = resp.Body.Read(buf)
		content <- err
		_, _ = io.Copy(io.Discard, resp.Body)
	}()
	defer func() { cancel(); <-ended }()
	if stream {
		select {
		case err = <-content:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return 0, err
		}
	}
	if err := until(ctx, func() bool { return running() > 0 }); err != nil {
		return 0, err
	}
	start := time.Now()
	cancel()
	if err := until(ctx, func() bool { return running() == 0 }); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}

// patience bounds the wait for a change of the engine's count.
const patience = 10 * time.Second

func until(ctx context.Context, holds func() bool) error {
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for end := time.Now().Add(patience); !holds(); {
		select {
		case <-tick.C:
			if time.Now().After(end) {
				return errors.New("the engine's count of running requests does not change")
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
