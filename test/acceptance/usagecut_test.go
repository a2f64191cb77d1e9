package acceptance

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/fleetsim"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/proto/gen/kinference/accounting/v1/accountingv1connect"
	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// Tenants' streams that end by themselves are in the ledger to the token. Of those that
// clients leave it has what the engine said last, marked: never more than was
// generated or less than the client had got. How much less than was generated is shown:
// a step for each beside what the way to the engine and back takes.
func TestCutStreamsInTheLedger(t *testing.T) {
	known := &truth{used: map[string][]fleetsim.Used{}}
	var seen sync.Map // by id: the tokens that a client had when it left
	// A step takes about 38 ms, as on a real L40S: long beside the way to it.
	e := start(t, settings{workers: 2, scale: 1, worker: func(_ int, c *fleetsim.Config) { c.OnUsed = known.add }})
	e.write("tenants.yaml", usageResources())
	ledger := rpc.Client(t.Context(), e.stack.AccountingURL(), accountingv1connect.NewAccountingServiceClient)
	e.eventually("tenants have paths", func() bool {
		resp, err := e.client.Post(e.stack.URL()+"/blue/v1/chat/completions", "application/json", strings.NewReader(req{text: "ping", max: 1}.body()))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	const each = 8
	var clients sync.WaitGroup
	for _, tenant := range usageTenants {
		for i := range each {
			clients.Go(func() {
				leaves := i%2 == 0
				r := req{text: words(i, 40), max: 12 + i, stream: true, extra: `,"ignore_eos":true`}
				if leaves {
					r.max = 400
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				hr, err := http.NewRequestWithContext(ctx, http.MethodPost, e.stack.URL()+"/"+tenant+"/v1/chat/completions", strings.NewReader(r.body()))
				if err != nil {
					t.Error(err)
					return
				}
				hr.Header.Set("Content-Type", "application/json")
				id := fmt.Sprintf("%s-%d", tenant, i)
				hr.Header.Set("X-Request-Id", id)
				resp, err := e.client.Do(hr)
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				lines, n := bufio.NewScanner(resp.Body), 0
				for lines.Scan() && (!leaves || n < 10+3*i) {
					if strings.HasPrefix(lines.Text(), "data:") {
						n++
					}
				}
				seen.Store(id, n-1) // the first one has the role
			})
		}
	}
	clients.Wait()
	var events []*usagev1.Usage
	e.eventually("the ledger has all", func() bool {
		all, err := export(t.Context(), ledger)
		events = events[:0]
		for _, u := range all {
			if len(u.GetTenants()) > 0 && !strings.HasPrefix(u.GetRequestId(), "req-") && u.GetTokens().GetOutput() > 1 {
				events = append(events, u)
			}
		}
		known.mu.Lock()
		defer known.mu.Unlock()
		used := 0
		for id := range known.used {
			if tenant, _, ok := strings.Cut(id, "-"); ok && tenant != "req" {
				used++
			}
		}
		return err == nil && len(events) == each*len(usageTenants) && used >= len(events)
	})
	known.mu.Lock()
	defer known.mu.Unlock()
	ledgerSums, engineSums := map[string]int{}, map[string]int{}
	cut, unseen, step := 0, 0, time.Duration(0)
	for _, u := range events {
		used := known.used[u.GetRequestId()]
		if len(used) != 1 {
			t.Fatalf("%s: engines had it %d times", u.GetRequestId(), len(used))
		}
		got, want := int(u.GetTokens().GetOutput()), used[0].Output
		if u.GetOutcome() == usagev1.Outcome_OUTCOME_OK {
			if got != want || u.GetTokens().GetOutputEstimated() {
				t.Errorf("%s: the ledger has %v, the engine %d", u.GetRequestId(), u.GetTokens(), want)
			}
			ledgerSums[u.GetTenants()[0]] += got
			engineSums[u.GetTenants()[0]] += want
			continue
		}
		cut++
		unseen += want - got
		step = max(step, time.Duration(u.GetItlMean()*float64(time.Second)))
		had, _ := seen.Load(u.GetRequestId())
		if got > want || got < had.(int) || !u.GetTokens().GetOutputEstimated() {
			t.Errorf("%s was cut off: the ledger has %v, the engine %d, the client %v", u.GetRequestId(), u.GetTokens(), want, had)
		}
	}
	t.Logf("whole answers: ledger %v, engines %v; of %d cut off %d tokens were not seen, with steps of up to %s", ledgerSums, engineSums, cut, unseen, step.Round(time.Millisecond))
	if want := len(usageTenants) * each / 2; cut != want {
		t.Errorf("%d were cut off, want %d", cut, want)
	}
	if unseen > 2*cut { // one for the step under way, one for the way
		t.Logf("SLOW: %d tokens of %d streams were not seen", unseen, cut)
	}
}
