package usage

import "os"

// Tidy does now what happens every few seconds.
func Tidy(r *Recorder) { r.spool.tidy(false) }

// Disk replaces what writes to files.
func Disk(r *Recorder, put func(f *os.File, b []byte, at int64) (int, error)) {
	r.spool.mu.Lock()
	defer r.spool.mu.Unlock()
	r.spool.put = put
}
