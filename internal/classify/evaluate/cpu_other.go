//go:build !unix

package evaluate

import "time"

// cpu is the wall clock, in microseconds, where kinfctl does not know the CPU time of a process.
func cpu() float64 { return float64(time.Now().UnixMicro()) }
