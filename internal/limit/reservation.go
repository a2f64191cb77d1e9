package limit

// Reservation is a granted request. Its methods may be called by any goroutine;
// the first call of Commit or Release counts, none blocks.
type Reservation struct{}

// Commit settles with what was used, by charge. Fewer amounts than charges
// leave the others as they were estimated.
func (r *Reservation) Commit(amounts []int64) {}

// Release gives everything back: the request never reached an engine.
func (r *Reservation) Release() {}
