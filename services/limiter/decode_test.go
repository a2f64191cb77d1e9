package limiter

import (
	"math"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

func TestPeriods(t *testing.T) {
	const layout = "2006-01-02 15:04 -0700"
	hour, day, week, month := limiterv1.Calendar_PERIOD_HOUR, limiterv1.Calendar_PERIOD_DAY, limiterv1.Calendar_PERIOD_WEEK, limiterv1.Calendar_PERIOD_MONTH
	for _, tc := range []struct {
		name, zone   string
		at           string // UTC
		period       limiterv1.Calendar_Period
		start, end   string
		wantDuration time.Duration
	}{
		{"plain day", "", "2026-11-29T12:00:00Z", day, "2026-11-29 00:00 +0000", "2026-11-30 00:00 +0000", 24 * time.Hour},
		{"day that loses an hour", "Europe/Berlin", "2026-03-29T12:00:00Z", day, "2026-03-29 00:00 +0100", "2026-03-30 00:00 +0200", 23 * time.Hour},
		{"day that gains an hour", "Europe/Berlin", "2026-10-25T12:00:00Z", day, "2026-10-25 00:00 +0200", "2026-10-26 00:00 +0100", 25 * time.Hour},
		{"month of winter time", "Europe/Berlin", "2026-10-31T22:59:59Z", month, "2026-10-01 00:00 +0200", "2026-11-01 00:00 +0100", 745 * time.Hour},
		{"next month", "Europe/Berlin", "2026-10-31T23:00:00Z", month, "2026-11-01 00:00 +0100", "2026-12-01 00:00 +0100", 720 * time.Hour},
		{"end of the year", "Asia/Tokyo", "2026-12-31T15:00:00Z", month, "2027-01-01 00:00 +0900", "2027-02-01 00:00 +0900", 744 * time.Hour},
		{"week from Monday", "America/New_York", "2026-11-29T12:00:00Z", week, "2026-11-23 00:00 -0500", "2026-11-30 00:00 -0500", 168 * time.Hour},
		{"midnight does not exist", "America/Sao_Paulo", "2017-10-15T12:00:00Z", day, "2017-10-15 01:00 -0200", "2017-10-16 00:00 -0200", 23 * time.Hour},
		{"midnight comes twice", "America/Havana", "2026-11-01T12:00:00Z", day, "2026-11-01 00:00 -0400", "2026-11-02 00:00 -0500", 25 * time.Hour},
		{"before midnight twice", "America/Sao_Paulo", "2018-02-18T01:30:00Z", day, "2018-02-17 00:00 -0200", "2018-02-18 00:00 -0300", 25 * time.Hour},
		{"hour of a half zone", "Asia/Kolkata", "2026-11-29T12:10:00Z", hour, "2026-11-29 17:00 +0530", "2026-11-29 18:00 +0530", time.Hour},
		{"hour that comes again", "Europe/Berlin", "2026-10-25T01:30:00Z", hour, "2026-10-25 02:00 +0100", "2026-10-25 03:00 +0100", time.Hour},
	} {
		t.Run(tc.name, func(t *testing.T) {
			zone, err := time.LoadLocation(tc.zone)
			if err != nil {
				t.Fatal(err)
			}
			at, err := time.Parse(time.RFC3339, tc.at)
			if err != nil {
				t.Fatal(err)
			}
			start, end, _ := period(tc.period, at.In(zone))
			if got := start.Format(layout); got != tc.start {
				t.Errorf("got start %s, want %s", got, tc.start)
			}
			if got := end.Format(layout); got != tc.end {
				t.Errorf("got end %s, want %s", got, tc.end)
			}
			if got := end.Sub(start); got != tc.wantDuration {
				t.Errorf("got %v long, want %v", got, tc.wantDuration)
			}
		})
	}
}

func windowOf(key string, limit int64, period time.Duration) *limiterv1.Bucket {
	return &limiterv1.Bucket{Key: key, Kind: &limiterv1.Bucket_Window{Window: &limiterv1.Window{Limit: limit, Period: durationpb.New(period)}}}
}

func TestBadBucketsAreNamed(t *testing.T) {
	good := windowOf("ok", 10, time.Minute)
	with := func(f func(*limiterv1.Bucket)) *limiterv1.Bucket {
		b := proto.CloneOf(good)
		f(b)
		return b
	}
	for _, tc := range []struct {
		name   string
		charge *limiterv1.Charge
		want   string
	}{
		{"good", &limiterv1.Charge{Bucket: good, Amount: 5}, ""},
		{"no bucket", &limiterv1.Charge{}, "key of a bucket has 0 bytes"},
		{"no kind", &limiterv1.Charge{Bucket: &limiterv1.Bucket{Key: "k"}}, "no kind"},
		{"long key", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) { b.Key = strings.Repeat("x", 513) })}, "513 bytes"},
		{"line in key", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) { b.Key = "a\nb" })}, "control character"},
		{"negative", &limiterv1.Charge{Bucket: good, Amount: -1}, "amount of ok is -1"},
		{"overflow", &limiterv1.Charge{Bucket: good, Amount: math.MaxInt64}, "want 0 to 2^51"},
		{"negative limit", &limiterv1.Charge{Bucket: windowOf("k", -1, time.Minute)}, "limit of k is -1"},
		{"no period", &limiterv1.Charge{Bucket: windowOf("k", 1, 0)}, "period of k"},
		{"long period", &limiterv1.Charge{Bucket: windowOf("k", 1, 46*24*time.Hour)}, "period of k"},
		{"huge period", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) { b.GetWindow().Period = &durationpb.Duration{Seconds: math.MaxInt64} })}, "period of ok"},
		{"no refill", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) {
			b.Kind = &limiterv1.Bucket_Window{Window: &limiterv1.Window{Burst: new(int64(3))}}
		})}, ""},
		{"unknown zone", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) {
			b.Kind = &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Period: limiterv1.Calendar_PERIOD_DAY, TimeZone: "../passwd"}}
		})}, "time zone"},
		{"no calendar period", &limiterv1.Charge{Bucket: with(func(b *limiterv1.Bucket) {
			b.Kind = &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{}}
		})}, "period of ok is unknown"},
		{"two permits", &limiterv1.Charge{Amount: 2, Bucket: with(func(b *limiterv1.Bucket) {
			b.Kind = &limiterv1.Bucket_Concurrency{Concurrency: &limiterv1.Concurrency{Limit: 3}}
		})}, "want 1 for concurrency"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := charges([]*limiterv1.Charge{tc.charge}, 1, time.Now())
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if err != nil && connect.CodeOf(err) != connect.CodeInvalidArgument {
				t.Errorf("got code %v", connect.CodeOf(err))
			}
		})
	}
	if _, err := charges([]*limiterv1.Charge{{Bucket: good}, {Bucket: good}}, 1, time.Now()); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("same bucket twice: got %v", err)
	}
	if _, err := charges(make([]*limiterv1.Charge, 65), 1, time.Now()); err == nil {
		t.Error("65 charges: no error")
	}
	for _, org := range []string{"", "a{b", "a}b", "a\x00b", strings.Repeat("x", 257)} {
		if organisation(org) == nil {
			t.Errorf("organisation %q: no error", org)
		}
	}
}

// FuzzDecode: whatever comes in, what passes is within the bounds that the
// arithmetic of the stores needs.
func FuzzDecode(f *testing.F) {
	for _, req := range []*limiterv1.ReserveRequest{
		{Organisation: "ns/acme", RequestId: "r", Charges: []*limiterv1.Charge{{Bucket: windowOf("t/tpm", 1000, time.Minute), Amount: 5}}},
		{Charges: []*limiterv1.Charge{{Bucket: &limiterv1.Bucket{Key: "usd", Kind: &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: 1, Period: 4, TimeZone: "Europe/Berlin"}}}}}},
		{Charges: []*limiterv1.Charge{{Amount: 1, Bucket: &limiterv1.Bucket{Key: "c", Kind: &limiterv1.Bucket_Concurrency{Concurrency: &limiterv1.Concurrency{Limit: 3}}}}}},
	} {
		data, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, int64(1_790_000_000), int64(5), int64(7))
	}
	f.Fuzz(func(t *testing.T, data []byte, seconds, used, elapsed int64) {
		var req limiterv1.ReserveRequest
		if proto.Unmarshal(data, &req) != nil {
			return
		}
		_ = organisation(req.GetOrganisation())
		now := time.Unix(seconds%(1<<40), 0)
		cs, err := charges(req.GetCharges(), 1, now)
		if err != nil {
			return
		}
		for i := range cs {
			b := &cs[i].Bucket
			if b.Capacity < 0 || b.Capacity > store.Max || b.MaxDebt < 0 || b.MaxDebt > store.Max || b.Rate < 0 || b.Rate > store.Max || cs[i].Amount < 0 || cs[i].Amount > store.Max {
				t.Fatalf("out of bounds: %+v", b)
			}
			if b.Period < time.Microsecond || b.Period > store.MaxPeriod || b.Key == "" || len(b.Key) > maxKey+20 {
				t.Fatalf("out of bounds: %+v", b)
			}
			if d := b.Lifetime(now); d < 0 || d > store.Longest+24*time.Hour {
				t.Fatalf("lifetime %v of %+v", d, b)
			}
			u := used & (store.Max - 1)
			got, credit, _ := b.Decay(u, 0, 0, elapsed&(1<<52-1))
			if got < 0 || got > u || credit < 0 || credit >= b.Period.Microseconds() {
				t.Fatalf("%+v: %d decays to %d, credit %d", b, u, got, credit)
			}
			st := store.State{Used: u}
			if wait, ever := b.Wait(st, cs[i].Amount, 0); ever && wait < 0 {
				t.Fatalf("%+v: wait %v", b, wait)
			} else if ever && !b.Set && b.Ends.IsZero() && wait < 1<<50*time.Microsecond {
				// What is told is true: it fits then, and not a microsecond before.
				need := store.Need(cs[i].Amount)
				if u, _, _ := b.Decay(u, 0, 0, wait.Microseconds()); b.Capacity-u < need {
					t.Fatalf("%+v: %d does not fit after %v", b, need, wait)
				}
				if wait > 0 {
					if u, _, _ := b.Decay(st.Used, 0, 0, wait.Microseconds()-1); b.Capacity-u >= need {
						t.Fatalf("%+v: %d fits before %v", b, need, wait)
					}
				}
			}
		}
	})
}
