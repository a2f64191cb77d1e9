package limits

import (
	"net/http"
	"strconv"
	"time"

	"github.com/kinference/kinference/internal/openai"
	limiterv1 "github.com/kinference/kinference/proto/gen/kinference/limiter/v1"
)

// MaxRetry is how long a client may be told to wait and still be told to try
// again by itself. SDKs sleep that long, or give up on what is longer.
const MaxRetry = time.Minute

// ShouldRetry is the header that official SDKs obey above the status.
const ShouldRetry = "X-Should-Retry"

// Level is how much of a limit is left.
type Level struct {
	Charge *Charge
	State  *limiterv1.State
}

// Tightest finds the limits of which the smallest share is left, among those
// that deny and that the caller may know of. The zero Level stands for none.
func Tightest(charges []Charge, states []*limiterv1.State, counts func(Count) bool) (out Level) {
	share := func(s *limiterv1.State) float64 { return float64(s.GetRemaining()) / float64(max(1, s.GetLimit())) }
	for i := range min(len(charges), len(states)) {
		c, s := &charges[i], states[i]
		if s == nil || !c.Own || c.Limit.Shadow || !counts(c.Limit.Count) {
			continue
		}
		if out.State == nil || share(s) < share(out.State) {
			out = Level{c, s}
		}
	}
	return out
}

// whole is an amount as clients count it, rounded down and never negative.
func (l *Level) whole(units int64) string {
	return strconv.FormatInt(max(0, units)/l.Charge.Limit.Scale, 10)
}

// Dialect is the form in which the clients of an API learn how much is left.
type Dialect interface {
	// Levels sets the headers of an answer, granted or refused. Limits whose
	// levels are not known leave none.
	Levels(h http.Header, now time.Time, charges []Charge, states []*limiterv1.State)
}

// OpenAI is the dialect with x-ratelimit headers: one group for requests and
// one for tokens of whatever sort.
type OpenAI struct{}

// Levels implements Dialect. Resets are durations as 6m0s.
func (OpenAI) Levels(h http.Header, _ time.Time, charges []Charge, states []*limiterv1.State) {
	set := func(what string, l Level) {
		if l.State == nil {
			return
		}
		h.Set("X-Ratelimit-Limit-"+what, l.whole(l.State.GetLimit()))
		h.Set("X-Ratelimit-Remaining-"+what, l.whole(l.State.GetRemaining()))
		if l.State.GetReset_() != nil {
			h.Set("X-Ratelimit-Reset-"+what, roundUp(l.State.GetReset_().AsDuration(), time.Millisecond).String())
		}
	}
	set("Requests", Tightest(charges, states, func(c Count) bool { return c == Requests }))
	set("Tokens", Tightest(charges, states, Count.Tokens))
}

// Anthropic is the dialect with anthropic-ratelimit headers, where input and
// output tokens have groups of their own.
type Anthropic struct{}

// Levels implements Dialect. Resets are times of RFC 3339.
func (Anthropic) Levels(h http.Header, now time.Time, charges []Charge, states []*limiterv1.State) {
	set := func(what string, counts func(Count) bool) {
		l := Tightest(charges, states, counts)
		if l.State == nil {
			return
		}
		h.Set("Anthropic-Ratelimit-"+what+"-Limit", l.whole(l.State.GetLimit()))
		h.Set("Anthropic-Ratelimit-"+what+"-Remaining", l.whole(l.State.GetRemaining()))
		if l.State.GetReset_() != nil {
			h.Set("Anthropic-Ratelimit-"+what+"-Reset", roundUpTime(now.Add(l.State.GetReset_().AsDuration())).UTC().Format(time.RFC3339))
		}
	}
	set("Requests", func(c Count) bool { return c == Requests })
	set("Tokens", Count.Tokens)
	set("Input-Tokens", func(c Count) bool { return c == InputTokens })
	set("Output-Tokens", func(c Count) bool { return c == OutputTokens })
}

func roundUp(d, unit time.Duration) time.Duration { return (max(d, 0) + unit - 1).Truncate(unit) }

func roundUpTime(t time.Time) time.Time { return t.Add(time.Second - 1).Truncate(time.Second) }

// Refusal is a request that does not fit.
type Refusal struct {
	// Charge that does not fit, and how much of it was wanted; the level may be
	// unknown.
	Charge *Charge
	Wanted int64
	State  *limiterv1.State
	// Never says that waiting does not help.
	Never bool
	// After this time it fits; 0: unknown.
	After time.Duration
}

// spent reports whether it is a matter of money or of the calendar, or of a
// limit that grants nothing.
func (r *Refusal) spent() bool {
	l := r.Charge.Limit
	return l.Budget() || l.Bucket() == 0 || r.Never && r.Wanted <= l.Bucket()
}

// Retry reports whether a client may try again by itself.
func (r *Refusal) Retry() bool { return !r.Never && !r.spent() && r.After <= MaxRetry }

// Message says what was refused: by name and number if the caller may know.
func (r *Refusal) Message() string {
	l := r.Charge.Limit
	b := make([]byte, 0, 160)
	which := "a limit that it shares with others"
	if r.Charge.Own {
		which = "limit " + l.Name
	}
	if r.Never && r.Wanted > l.Bucket() && l.Bucket() > 0 {
		b = append(append(b, "The request is too large for "...), which...)
	} else {
		b = append(append(b, "The request exceeds "...), which...)
	}
	if r.Charge.Own {
		b = append(append(b, " ("...), unit[l.Count]...)
		b = append(b, "): "...)
		b = append(append(b, "limit "...), amount(l, l.Bucket(), false)...)
		if r.State != nil && !r.Never {
			b = append(append(b, ", remaining "...), amount(l, max(0, r.State.GetRemaining()), false)...)
		}
		b = append(append(b, ", requested "...), amount(l, r.Wanted, true)...)
	}
	switch {
	case r.Never && r.Wanted > l.Bucket() && l.Bucket() > 0 && l.Count != Requests:
		b = append(b, ". Shorten the prompt or ask for less output."...)
	case r.Never:
		b = append(b, ". Waiting does not help."...)
	case r.After > 0:
		b = append(append(b, ". Try again in "...), roundUp(r.After, time.Millisecond).String()...)
		b = append(b, '.')
	default:
		b = append(b, ". Try again later."...)
	}
	return string(b)
}

var unit = [...]string{
	Requests: "requests", Concurrency: "requests at the same time", InputTokens: "input tokens", CachedTokens: "cached input tokens",
	OutputTokens: "output tokens", TotalTokens: "tokens", Cost: "money", GPUTime: "device seconds",
}

// amount is units as clients count them.
func amount(l *Limit, units int64, up bool) string {
	if l.Count == Cost {
		return strconv.FormatFloat(float64(units)/float64(l.Scale), 'f', -1, 64) + " " + l.Currency
	}
	if up {
		units += l.Scale - 1
	}
	return strconv.FormatInt(units/l.Scale, 10)
}

// OpenAIError is the refusal in OpenAI's form. h gets what the error itself
// does not hold.
func (r *Refusal) OpenAIError(h http.Header) *openai.Error {
	e := &openai.Error{Status: http.StatusTooManyRequests, Type: "requests", Code: "rate_limit_exceeded", Message: r.Message()}
	switch {
	case r.spent():
		e.Type, e.Code = "insufficient_quota", "insufficient_quota"
	case r.Charge.Limit.Count.Tokens():
		e.Type = "tokens"
	}
	if !r.Never {
		e.RetryAfter = max(roundUp(r.After, time.Millisecond), time.Millisecond)
	}
	if !r.Retry() {
		h.Set(ShouldRetry, "false")
	}
	return e
}
