package testenv

import (
	"testing"
	"time"
)

func TestNoon(t *testing.T) {
	for hour := range 24 {
		now := time.Date(2026, 11, 30, hour, 59, 59, 0, time.UTC)
		zone, err := time.LoadLocation(noon(now))
		if err != nil {
			t.Fatal(err)
		}
		if got := now.In(zone).Hour(); got != 12 {
			t.Errorf("at %d h UTC it is %d h in %s", hour, got, zone)
		}
	}
}
