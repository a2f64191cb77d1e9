package credential

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinference/kinference/internal/provider"
)

// While nobody answers who is asked for keys, requests get the old ones, and wait for
// that once at most, however many come at the same time.
func TestLoanWhileNobodyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l loans
		asked, away := 0, false
		get := func() (provider.Credentials, error) {
			return l.get(t.Context(), "k", nil, func(now time.Time) (provider.Credentials, time.Time, error) {
				asked++
				if away {
					time.Sleep(tokenTime)
					return provider.Credentials{}, now, errors.New("no answer")
				}
				return provider.Credentials{Bearer: "old"}, now.Add(time.Hour), nil
			})
		}
		if c, err := get(); err != nil || c.Bearer != "old" {
			t.Fatal(c, err)
		}
		time.Sleep(56 * time.Minute)
		away = true
		begun := time.Now()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				if c, err := get(); err != nil || c.Bearer != "old" {
					t.Error(c, err)
				}
			})
		}
		all.Wait()
		if waited := time.Since(begun); waited > tokenTime || asked != 2 {
			t.Errorf("waited %v, asked %d times", waited, asked)
		}
		time.Sleep(again)
		if _, err := get(); err != nil || asked != 3 {
			t.Errorf("asked %d times, %v", asked, err)
		}
		time.Sleep(time.Hour)
		for range 3 {
			if c, err := get(); err == nil || c.Bearer != "" || asked != 4 {
				t.Errorf("after the end: %v %v, asked %d times", c, err, asked)
			}
		}
	})
}
