package v1alpha1

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Duration is a Gateway API duration (GEP-2257): up to four numbers with the
// units h, m, s and ms, as in 1h30m or 250ms. Windows may use d (24 h) too.
// Empty means the default.
type Duration string

var durationForm = regexp.MustCompile(`^([0-9]{1,5}(d|h|m|s|ms)){1,4}$`)

// Parse returns the duration, or an error that says what the form is.
func (d Duration) Parse() (time.Duration, error) {
	if !durationForm.MatchString(string(d)) {
		return 0, fmt.Errorf("%q is not a duration such as 250ms, 30s or 1h30m", string(d))
	}
	if days, rest, ok := strings.Cut(string(d), "d"); ok {
		n, err := strconv.Atoi(days)
		if err != nil {
			return 0, fmt.Errorf("%q: days come first", string(d))
		}
		if rest == "" {
			rest = "0s"
		}
		t, err := time.ParseDuration(rest)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration", string(d))
		}
		return time.Duration(n)*24*time.Hour + t, nil
	}
	return time.ParseDuration(string(d))
}

// Or returns the duration, or def when it is empty or malformed.
func (d Duration) Or(def time.Duration) time.Duration {
	if t, err := d.Parse(); err == nil {
		return t
	}
	return def
}

// Objective is a promise about the requests of a pool or tenant.
type Objective struct {
	Name string `json:"name"`
	// Match selects requests; absent means all.
	Match *ObjectiveMatch `json:"match,omitempty"`
	// Indicator is what is measured.
	Indicator Indicator `json:"indicator"`
	// Threshold that a request must keep; required except for Availability.
	Threshold Duration `json:"threshold,omitempty"`
	// Target is the share of requests in percent, a decimal string.
	Target string `json:"target"`
	// Window over which the share is taken.
	Window Duration `json:"window"`
}

// ObjectiveMatch selects requests: fields are ANDed, entries of one ORed.
type ObjectiveMatch struct {
	Model  []string `json:"model,omitempty"`
	Tenant []string `json:"tenant,omitempty"`
	QoS    []string `json:"qos,omitempty"`
}

// Indicator is what an Objective measures.
type Indicator string

// The indicators.
const (
	IndicatorTTFT         Indicator = "TTFT"
	IndicatorITL          Indicator = "ITL"
	IndicatorTPOT         Indicator = "TPOT"
	IndicatorEndToEnd     Indicator = "EndToEnd"
	IndicatorAvailability Indicator = "Availability"
)
