package rpc

import (
	"context"
	"sync/atomic"
)

// Place is the replica of a service that answered a call. The zero value is none. It is
// safe for concurrent use and must not be copied.
type Place struct{ at atomic.Pointer[replica] }

// Same reports whether two places are the same replica, or none. They may be nil.
func (p *Place) Same(o *Place) bool { return p.get() == o.get() }

func (p *Place) get() *replica {
	if p == nil {
		return nil
	}
	return p.at.Load()
}

func (p *Place) set(r *replica) {
	if p != nil {
		p.at.Store(r)
	}
}

type placeKey struct{}

// Stay returns a context whose calls, by a client of several replicas, leave in p which one
// answered. The next such call goes there, too, as long as that one answers.
func Stay(ctx context.Context, p *Place) context.Context {
	return context.WithValue(ctx, placeKey{}, p)
}

// At returns a context whose calls go to p, or elsewhere as long as that one does not
// answer. It leaves p as it is, which may be nil: then they go where others do.
func At(ctx context.Context, p *Place) context.Context {
	at := new(Place)
	at.set(p.get())
	return Stay(ctx, at)
}
