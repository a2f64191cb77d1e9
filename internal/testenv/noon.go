package testenv

import (
	"fmt"
	"sync"
	"time"
)

// Noon returns the name of a time zone in which it was noon within the last hour
// when it was first asked for. The calendar's day there does not end during a test,
// at whatever hour the test runs.
var Noon = sync.OnceValue(func() string { return noon(time.Now()) })

func noon(now time.Time) string {
	switch ahead := 12 - now.UTC().Hour(); { // of UTC, in hours
	case ahead > 0:
		return fmt.Sprintf("Etc/GMT-%d", ahead) // the names have the sign of POSIX
	case ahead < 0:
		return fmt.Sprintf("Etc/GMT+%d", -ahead)
	}
	return "UTC"
}
