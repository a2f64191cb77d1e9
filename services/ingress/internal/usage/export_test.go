package usage

// Tidy does now what happens every few seconds.
func Tidy(r *Recorder) { r.spool.tidy(false) }
