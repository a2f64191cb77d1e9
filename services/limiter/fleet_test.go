package limiter_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kinference/kinference/internal/limit"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/internal/testenv"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/proto/gen/kinference/limiter/v1/limiterv1connect"
	"github.com/kinference/kinference/services/limiter"
)

var fleetTime = flag.Duration("fleet-time", 2*time.Second, "how long TestFourProcesses loads one bucket")

// member is what one process of the fleet is told by its environment.
type member struct {
	URL, File string
	Leases    bool
	Clients   int
	For       time.Duration // from its own beginning: on a busy machine that is late
}

const memberEnv = "KINFERENCE_TEST_FLEET_MEMBER"

const (
	fleetLimit  = 100_000 // tokens
	fleetPeriod = 10 * time.Second
	fleetLeased = fleetLimit / 10
)

func fleetBuckets() []limit.Charge {
	team := window("team/tokens", fleetLimit, fleetPeriod)
	team.MaxLeased = fleetLeased
	org := window("org/tokens", 10*fleetLimit, fleetPeriod)
	org.MaxLeased = 10 * fleetLeased
	return []limit.Charge{{Bucket: org}, {Bucket: team}}
}

// tally is what a process has used and when, in a file that outlives it.
type tally struct {
	Used, Requests, Trips, Away int64
	First, Last                 int64 // Unix microseconds of the first request and the last grant
}

// TestFleetMember is a process of the fleet, started by TestFourProcesses.
func TestFleetMember(t *testing.T) {
	spec := os.Getenv(memberEnv)
	if spec == "" {
		return
	}
	var m member
	if err := json.Unmarshal([]byte(spec), &m); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(m.File, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	trips := &counting{LimiterServiceClient: rpc.Client(ctx, m.URL, limiterv1connect.NewLimiterServiceClient)}
	c, err := limit.New(ctx, limit.Settings{Limiter: trips, NoLeases: !m.Leases, LeaseTTL: 2 * time.Second, Timeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	var away atomic.Int64
	var mu sync.Mutex
	sum := tally{First: time.Now().UnixMicro()}
	note := func(used int64) {
		mu.Lock()
		defer mu.Unlock()
		sum.Used += used
		sum.Requests++
		sum.Trips, sum.Away = trips.reserves.Load(), away.Load()
		sum.Last = time.Now().UnixMicro()
		data, err := binary.Append(nil, binary.LittleEndian, sum)
		if err == nil {
			_, err = file.WriteAt(data, 0)
		}
		if err != nil {
			t.Error(err)
		}
	}
	var clients sync.WaitGroup
	end := time.Now().Add(m.For)
	for i := range m.Clients {
		clients.Go(func() {
			for j := 0; time.Now().Before(end); j++ {
				r := limit.Request{Organisation: "ns/acme", ID: fmt.Sprint(os.Getpid(), "/", i, "/", j), Charges: fleetBuckets()}
				estimate := 200 + rand.Int64N(400)
				for k := range r.Charges {
					r.Charges[k].Amount, r.Charges[k].OnUnavailable = estimate, limit.Deny
				}
				a, err := c.Reserve(ctx, r)
				switch {
				case err != nil:
					t.Error(err)
					return
				case !a.Granted():
					// Clients that come back when they are told to.
					if a.Reason == limit.Away {
						away.Add(1)
						a.RetryAfter = 100 * time.Millisecond
					}
					time.Sleep(min(max(a.RetryAfter, 5*time.Millisecond), 100*time.Millisecond))
				default:
					used := estimate/2 + rand.Int64N(estimate/2)
					note(used)
					a.Reservation.Commit([]int64{used, used})
				}
			}
		})
	}
	clients.Wait()
	closeClient(t, c)
}

// start starts a process of the fleet, in a group of its own.
func (m member) start(t *testing.T) *exec.Cmd {
	t.Helper()
	spec, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestFleetMember$")
	cmd.Env = append(os.Environ(), memberEnv+"="+string(spec))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// TestFourProcesses: 200 clients in four processes on one bucket use no more
// than it allows and, where leases are lost in a crash, than may be leased.
func TestFourProcesses(t *testing.T) {
	if os.Getenv(memberEnv) != "" {
		return
	}
	for _, tc := range []struct {
		name   string
		leases bool
		kill   bool
		bound  int64
	}{
		{"without leases", false, false, 0},
		{"with leases", true, false, 0},
		{"with leases and crashes", true, true, fleetLeased},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := testenv.Redis(t)
			client, url := serve(t, limiter.Config{RedisAddrs: r.Addr, RedisTimeout: 50 * time.Millisecond, BreakerFailures: 1000})
			m := member{URL: url, Leases: tc.leases, Clients: 50, For: time.Second + *fleetTime}
			var peak atomic.Int64
			stop := watchLeases(t, client, &peak)
			var files []string
			var running []*exec.Cmd
			launch := func() *exec.Cmd {
				m.File = filepath.Join(t.TempDir(), "tally")
				files = append(files, m.File)
				cmd := m.start(t)
				running = append(running, cmd)
				return cmd
			}
			var victim *exec.Cmd
			for range 4 {
				victim = launch()
			}
			if tc.kill {
				until(t, "load", func() bool { return read(t, files[3]).Requests > 20 })
				_ = syscall.Kill(-victim.Process.Pid, syscall.SIGKILL)
				launch() // Kubernetes starts another one
			}
			for _, cmd := range running {
				if err := cmd.Wait(); err != nil && cmd != victim || err == nil && tc.kill && cmd == victim {
					t.Errorf("a process ended with %v", err)
				}
			}
			stop()
			var all tally
			for _, f := range files {
				x := read(t, f)
				all.Used, all.Requests, all.Trips, all.Away = all.Used+x.Used, all.Requests+x.Requests, all.Trips+x.Trips, all.Away+x.Away
				if x.First > 0 && (all.First == 0 || x.First < all.First) {
					all.First = x.First
				}
				all.Last = max(all.Last, x.Last)
			}
			took := time.Duration(all.Last-all.First) * time.Microsecond
			allowed := fleetLimit + int64(float64(fleetLimit)*took.Seconds()/fleetPeriod.Seconds())
			t.Logf("%v: %d tokens in %d requests, %d questions to the limiter, of which %d got no answer; the bucket allows %d: %.2f %%; at most %d leased", took.Round(time.Millisecond), all.Used, all.Requests, all.Trips, all.Away,
				allowed, 100*float64(all.Used)/float64(allowed), peak.Load())
			if all.Used > allowed+tc.bound {
				t.Errorf("%d tokens were used of %d + %d", all.Used, allowed, tc.bound)
			}
			if peak.Load() > fleetLeased {
				t.Errorf("%d tokens were leased at once, want %d at most", peak.Load(), fleetLeased)
			}
			// On a machine that is too busy to answer less may be used.
			if all.Used < allowed/2 && all.Away < all.Requests {
				t.Errorf("%d tokens were used of %d: too few", all.Used, allowed)
			}
			until(t, "return of all leases", func() bool {
				return remaining(t, client, fleetBuckets()[1].Bucket).Leased == 0
			})
		})
	}
}

// watchLeases notes the most that is leased of the bucket.
func watchLeases(t *testing.T, c limiterv1connect.LimiterServiceClient, peak *atomic.Int64) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			if r, err := c.Read(ctx, &limiterv1.ReadRequest{Organisation: "ns/acme", Buckets: []*limiterv1.Bucket{fleetBuckets()[1].Bucket}}); err == nil {
				peak.Store(max(peak.Load(), r.States[0].Leased))
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

func read(t *testing.T, path string) (out tally) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || len(data) == 0 {
		return out // it has not begun
	}
	if _, err := binary.Decode(data, binary.LittleEndian, &out); err != nil {
		t.Fatal(err)
	}
	return out
}
