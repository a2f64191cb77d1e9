package limits

import (
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
	routerv1 "github.com/kinference/kinference/proto/gen/kinference/router/v1"
)

// leasedShare is the part of a bucket that ingress processes together may hold
// in shares: one in so many. It is the most that can be admitted too much when
// they die.
const leasedShare = 10

var periods = map[routerv1.CalendarPeriod]limiterv1.Calendar_Period{
	routerv1.CalendarPeriod_CALENDAR_PERIOD_HOUR:  limiterv1.Calendar_PERIOD_HOUR,
	routerv1.CalendarPeriod_CALENDAR_PERIOD_DAY:   limiterv1.Calendar_PERIOD_DAY,
	routerv1.CalendarPeriod_CALENDAR_PERIOD_WEEK:  limiterv1.Calendar_PERIOD_WEEK,
	routerv1.CalendarPeriod_CALENDAR_PERIOD_MONTH: limiterv1.Calendar_PERIOD_MONTH,
}

// maxPeriod is the longest that the limiter knows.
const maxPeriod = 45 * 24 * time.Hour

// bucket is the limit as the limiter knows it.
func (l *Limit) bucket(key string) *limiterv1.Bucket {
	b := &limiterv1.Bucket{Key: key, Shadow: l.Shadow, MaxLeased: l.Bucket() / leasedShare}
	switch {
	case l.Count == Concurrency:
		b.Kind, b.MaxLeased = &limiterv1.Bucket_Concurrency{Concurrency: &limiterv1.Concurrency{Limit: l.Capacity}}, 0
	case l.Calendar != nil:
		b.Kind = &limiterv1.Bucket_Calendar{Calendar: &limiterv1.Calendar{Limit: l.Capacity, Period: periods[l.Calendar.GetPeriod()], TimeZone: l.Calendar.GetTimeZone()}}
	default:
		limit, period := l.Capacity, l.Window
		if period > maxPeriod {
			limit, period = mulDiv(limit, int64(maxPeriod), int64(period), 0), maxPeriod
		}
		b.Kind = &limiterv1.Bucket_Window{Window: &limiterv1.Window{Limit: limit, Period: durationpb.New(period), Burst: proto.Int64(l.Bucket())}}
	}
	return b
}
