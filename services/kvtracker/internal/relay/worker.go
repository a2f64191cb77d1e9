package relay

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/kinference/kinference/internal/bus"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// maxRanks bounds the ranks of one engine process.
const maxRanks = 1024

// worker is a running engine process of the catalog: a link per rank if it
// publishes events, and a scraper.
type worker struct {
	relay  *relay
	spec   *routerv1.Worker
	links  []*link
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func rankCount(w *routerv1.Worker) int { return int(min(max(w.GetRanks(), 1), maxRanks)) }

// followedCount is the number of ranks, from 0, whose events can be followed.
func followedCount(w *routerv1.Worker) int {
	n := 0
	for ; w.GetKvEvents() != "" && n < rankCount(w); n++ {
		if _, err := rankEndpoint(w.GetKvEvents(), n); err != nil {
			break
		}
		if _, err := rankEndpoint(w.GetKvReplay(), n); err != nil {
			break
		}
	}
	return n
}

// sameWorker tells whether nothing changed that would need a new connection.
func sameWorker(a, b *routerv1.Worker) bool { return proto.Equal(a, b) }

func (r *relay) start(ctx context.Context, spec *routerv1.Worker) *worker {
	ctx, cancel := context.WithCancel(ctx)
	w := &worker{relay: r, spec: spec, cancel: cancel}
	s := newScraper(r, spec)
	w.wg.Go(func() { s.run(ctx) })
	followed := followedCount(spec)
	if spec.GetKvEvents() != "" && followed < rankCount(spec) {
		r.log.Warn("some ranks of the worker have no event endpoint", "worker", spec.GetUid(), "followed", followed)
	}
	for rank := range followed {
		l, err := newLink(r, spec, rank)
		if err != nil {
			r.log.Warn("worker's event endpoint cannot be used", "worker", spec.GetUid(), "err", err)
			break
		}
		w.links = append(w.links, l)
		l.start(ctx)
	}
	return w
}

// stop ends the worker. That many ranks stay in the catalog, and that many of
// them will be followed again: what is known of the others goes.
func (w *worker) stop(ranks, followed int) {
	w.cancel()
	w.wg.Wait()
	var wg sync.WaitGroup
	for rank, l := range w.links {
		wg.Go(func() { l.stop(rank >= followed) })
	}
	wg.Wait()
	for rank := ranks; rank < rankCount(w.spec); rank++ {
		id, err := bus.ParseWorker(w.spec.GetUid()+"/"+strconv.Itoa(rank), w.spec.GetWorkerSet())
		if err == nil {
			w.relay.gone(id)
		}
	}
}

// rankEndpoint returns the endpoint of a rank: vLLM adds the rank to the port.
func rankEndpoint(base string, rank int) (string, error) {
	if base == "" || rank == 0 {
		return base, nil
	}
	addr, ok := strings.CutPrefix(base, "tcp://")
	if !ok {
		return "", fmt.Errorf("endpoint %q has no port for rank %d", base, rank)
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", fmt.Errorf("endpoint %q: %w", base, err)
	}
	n, err := strconv.Atoi(port)
	if err != nil || n <= 0 || n+rank > 65535 {
		return "", fmt.Errorf("endpoint %q has no port for rank %d", base, rank)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+rank)), nil
}
