package limiter

import (
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/rpc"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	"github.com/kinference/kinference/services/limiter/internal/store"
)

// Bounds of what one call may ask for.
const (
	maxBuckets = 64
	maxExtend  = 1000
	maxOrg     = 256
	maxID      = 128
	maxKey     = 512

	defaultTTL, minTTL, maxTTL                = time.Minute, time.Second, 24 * time.Hour
	defaultLeaseTTL, minLeaseTTL, maxLeaseTTL = 3 * time.Second, 100 * time.Millisecond, time.Minute
)

func invalid(format string, a ...any) error {
	return rpc.Error(connect.CodeInvalidArgument, fmt.Sprintf(format, a...), 0)
}

// plain checks a name that becomes part of a key.
func plain(what, name string, most int) error {
	if name == "" || len(name) > most {
		return invalid("%s has %d bytes, want 1 to %d", what, len(name), most)
	}
	for i := range len(name) {
		if name[i] < ' ' || name[i] == 0x7f {
			return invalid("%s has a control character", what)
		}
	}
	return nil
}

// organisation is a hash tag of Redis, which ends with the first brace.
func organisation(name string) error {
	if err := plain("organisation", name, maxOrg); err != nil {
		return err
	}
	if strings.ContainsAny(name, "{}") {
		return invalid("organisation has a brace")
	}
	return nil
}

func ttl(d *durationpb.Duration, fallback, least, most time.Duration) (time.Duration, error) {
	if d == nil {
		return fallback, nil
	}
	if v := d.AsDuration(); d.CheckValid() != nil || v < least || v > most {
		return 0, invalid("ttl %v is not from %v to %v", v, least, most)
	}
	return d.AsDuration(), nil
}

func amount(what string, n int64) error {
	if n < 0 || n > store.Max {
		return invalid("%s is %d, want 0 to 2^51", what, n)
	}
	return nil
}

// zones caches time zones. The names come from resources, so they are few.
var zones = newCache(1000, time.LoadLocation)

// decode checks a bucket. now is when its request began, for its period.
func decode(b *limiterv1.Bucket, now time.Time) (store.Bucket, error) {
	out := store.Bucket{Key: b.GetKey(), Shadow: b.GetShadow(), MaxLeased: b.GetMaxLeased(), Period: time.Second}
	if err := plain("key of a bucket", out.Key, maxKey); err != nil {
		return out, err
	}
	if err := amount("max_leased of "+out.Key, out.MaxLeased); err != nil {
		return out, err
	}
	var err error
	switch k := b.GetKind().(type) {
	case *limiterv1.Bucket_Window:
		err = decodeWindow(k.Window, &out)
	case *limiterv1.Bucket_Calendar:
		err = decodeCalendar(k.Calendar, &out, now)
	case *limiterv1.Bucket_Concurrency:
		out.Set, out.Capacity = true, k.Concurrency.GetLimit()
		err = amount("limit of "+out.Key, out.Capacity)
	default:
		err = invalid("bucket %s has no kind", out.Key)
	}
	return out, err
}

func decodeWindow(w *limiterv1.Window, out *store.Bucket) error {
	out.Rate = w.GetLimit()
	out.Capacity, out.MaxDebt = out.Rate, out.Rate
	if w.Burst != nil {
		out.Capacity, out.MaxDebt = w.GetBurst(), w.GetBurst()
	}
	if w.MaxDebt != nil {
		out.MaxDebt = w.GetMaxDebt()
	}
	if err := errors.Join(amount("limit of "+out.Key, out.Rate), amount("burst of "+out.Key, out.Capacity), amount("max_debt of "+out.Key, out.MaxDebt)); err != nil {
		return err
	}
	if w.GetPeriod() == nil && out.Rate == 0 {
		return nil
	}
	out.Period = w.GetPeriod().AsDuration().Truncate(time.Microsecond)
	if w.GetPeriod().CheckValid() != nil || out.Period < time.Millisecond || out.Period > store.MaxPeriod {
		return invalid("period of %s is not from 1ms to %v", out.Key, store.MaxPeriod)
	}
	return nil
}

func decodeCalendar(c *limiterv1.Calendar, out *store.Bucket, now time.Time) error {
	out.Capacity, out.MaxDebt = c.GetLimit(), c.GetLimit()
	if err := amount("limit of "+out.Key, out.Capacity); err != nil {
		return err
	}
	if len(c.GetTimeZone()) > 64 || c.GetTimeZone() == "Local" {
		return invalid("time zone of %s is unknown", out.Key)
	}
	zone, err := zones.get(c.GetTimeZone())
	if err != nil {
		return invalid("time zone of %s is unknown", out.Key)
	}
	start, end, ok := period(c.GetPeriod(), now.In(zone))
	if !ok {
		return invalid("period of %s is unknown", out.Key)
	}
	// The start in UTC: an hour that a clock goes through twice is two hours.
	out.Key += "@" + start.UTC().Format("2006-01-02T15:04Z")
	out.Ends = end
	return nil
}

// period is the one that t lies in, in the time zone of t.
func period(p limiterv1.Calendar_Period, t time.Time) (start, end time.Time, ok bool) {
	y, m, d := t.Date()
	day := func(year int, month time.Month, day int) time.Time {
		return firstMoment(year, month, day, t.Location())
	}
	switch p {
	case limiterv1.Calendar_PERIOD_HOUR:
		// An hour of the clock; zones are off by half hours and less, too.
		start = t.Add(-time.Duration(t.Minute())*time.Minute - time.Duration(t.Second())*time.Second - time.Duration(t.Nanosecond()))
		return start, start.Add(time.Hour), true
	case limiterv1.Calendar_PERIOD_DAY:
		return day(y, m, d), day(y, m, d+1), true
	case limiterv1.Calendar_PERIOD_WEEK:
		d -= (int(t.Weekday()) + 6) % 7
		return day(y, m, d), day(y, m, d+7), true
	case limiterv1.Calendar_PERIOD_MONTH:
		return day(y, m, 1), day(y, m+1, 1), true
	default:
		return start, end, false
	}
}

// firstMoment is the first moment of a day. A clock may jump over midnight, or
// come by it twice; the date, in seconds around it, never goes back.
func firstMoment(y int, m time.Month, d int, zone *time.Location) time.Time {
	noon := time.Date(y, m, d, 12, 0, 0, 0, zone)
	want := date(noon)
	begin := noon.Add(-36 * time.Hour)
	return begin.Add(time.Duration(sort.Search(36*3600, func(i int) bool {
		return date(begin.Add(time.Duration(i)*time.Second)) >= want
	})) * time.Second)
}

// date is a number that grows with the date.
func date(t time.Time) int {
	y, m, d := t.Date()
	return (y*16+int(m))*32 + d
}

// charges checks the charges of a request that began at now.
func charges(in []*limiterv1.Charge, least int, now time.Time) ([]store.Charge, error) {
	if len(in) < least || len(in) > maxBuckets {
		return nil, invalid("got %d charges, want %d to %d", len(in), least, maxBuckets)
	}
	out := make([]store.Charge, len(in))
	for i, c := range in {
		b, err := decode(c.GetBucket(), now)
		if err != nil {
			return nil, err
		}
		if err := amount("amount of "+b.Key, c.GetAmount()); err != nil {
			return nil, err
		}
		out[i] = store.Charge{Bucket: b, Amount: c.GetAmount()}
		if b.Set && out[i].Amount != 1 {
			return nil, invalid("amount of %s is %d, want 1 for concurrency", b.Key, out[i].Amount)
		}
		for j := range i {
			if out[j].Key == b.Key && out[j].Set == b.Set {
				return nil, invalid("bucket %s is charged twice", b.Key)
			}
		}
	}
	return out, nil
}
