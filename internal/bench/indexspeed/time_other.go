//go:build !linux

package indexspeed

import "time"

// threadTime is the wall clock where there is no time of a thread.
func threadTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
