package v1alpha1

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Duration is a Gateway API duration (GEP-2257): up to four numbers with the
// units h, m, s and ms, as in 1h30m or 250ms. Empty means the default.
//
// +kubebuilder:validation:MaxLength=32
// +kubebuilder:validation:Pattern=`^([0-9]{1,5}(h|m|s|ms)){1,4}$`
// +kubebuilder:title="a duration such as 250ms, 30s or 1h30m"
type Duration string

var durationForm = regexp.MustCompile(`^([0-9]{1,5}(h|m|s|ms)){1,4}$`)

// Parse returns the duration, or an error that says what the form is.
func (d Duration) Parse() (time.Duration, error) {
	if !durationForm.MatchString(string(d)) {
		return 0, fmt.Errorf("%q is not a duration such as 250ms, 30s or 1h30m", string(d))
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

// Window is a length of time over which something is counted: one number with
// one unit, s, m, h or d (24 hours), 366d at most.
//
// +kubebuilder:validation:MaxLength=5
// +kubebuilder:validation:Pattern=`^([1-9][0-9]{0,3}(s|m|h)|([1-9][0-9]?|[12][0-9]{2}|3[0-5][0-9]|36[0-6])d)$`
// +kubebuilder:title="a window such as 30s, 1m, 24h or 30d (366d at most)"
type Window string

var windowForm = regexp.MustCompile(`^([1-9][0-9]{0,3}(s|m|h)|([1-9][0-9]?|[12][0-9]{2}|3[0-5][0-9]|36[0-6])d)$`)

// Parse returns the length, or an error that says what the form is.
func (w Window) Parse() (time.Duration, error) {
	if !windowForm.MatchString(string(w)) {
		return 0, fmt.Errorf("%q is not a window such as 30s, 1m, 24h or 30d", string(w))
	}
	if days, ok := strings.CutSuffix(string(w), "d"); ok {
		n, err := strconv.Atoi(days)
		return time.Duration(n) * 24 * time.Hour, err
	}
	return time.ParseDuration(string(w))
}

// Or returns the length, or def when it is empty or malformed.
func (w Window) Or(def time.Duration) time.Duration {
	if t, err := w.Parse(); err == nil {
		return t
	}
	return def
}

// Size is a number of bytes with the unit Ki or Mi.
//
// +kubebuilder:validation:MaxLength=6
type Size string

var sizeForm = regexp.MustCompile(`^[1-9][0-9]{0,3}(Ki|Mi)$`)

// Bytes returns the number, or an error that says what the form is.
func (s Size) Bytes() (int64, error) {
	if !sizeForm.MatchString(string(s)) {
		return 0, fmt.Errorf("%q is not a size such as 64Ki or 4Mi", string(s))
	}
	n, err := strconv.ParseInt(string(s[:len(s)-2]), 10, 64)
	if strings.HasSuffix(string(s), "Mi") {
		return n << 20, err
	}
	return n << 10, err
}

// Decimal is an amount of money as a decimal string, so that nothing is
// rounded.
//
// +kubebuilder:validation:MaxLength=22
// +kubebuilder:validation:Pattern=`^[0-9]{1,12}(\.[0-9]{1,9})?$`
// +kubebuilder:title="a decimal number such as \"1.10\""
type Decimal string

// Float returns the amount for comparing; 0 when it is empty or malformed.
func (d Decimal) Float() float64 {
	f, _ := strconv.ParseFloat(string(d), 64)
	return f
}

// Currency is an ISO 4217 code.
//
// +kubebuilder:validation:MaxLength=3
// +kubebuilder:validation:Pattern=`^[A-Z]{3}$`
// +kubebuilder:title="a currency code such as USD"
type Currency string

// ResourceName is metadata.name of a resource.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`
// +kubebuilder:title="a name: lower-case letters, digits, dashes and dots"
type ResourceName string

// EntryName is the name of an entry of a list, unique in it.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
// +kubebuilder:title="a name: lower-case letters, digits and dashes"
type EntryName string

// ModelName is a name that clients or engines use for a model or adapter.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=256
// +kubebuilder:validation:Pattern=`^[^\x00-\x20\x7f]+( [^\x00-\x20\x7f]+)*$`
// +kubebuilder:title="a model name: no space at its ends and no control characters"
type ModelName string

// URL is an http or https URL without user, query and fragment.
//
// +kubebuilder:validation:MaxLength=1024
// +kubebuilder:validation:Pattern=`^https?://[^\s/?#@\\]+(/[^\s?#\\]*)?$`
// +kubebuilder:title="a URL such as https://host/path, without user, query and fragment"
type URL string

// SecureURL is a URL that is https, or http to the loopback interface.
//
// +kubebuilder:validation:MaxLength=1024
// +kubebuilder:validation:Pattern=`^(https://[^\s/?#@\\]+|http://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?)(/[^\s?#\\]*)?$`
// +kubebuilder:title="an https URL such as https://host/path, without user, query and fragment"
type SecureURL string

// LabelValue is the value of a label.
//
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$`
// +kubebuilder:title="a label value: letters, digits, dashes, dots and underscores"
type LabelValue string

// LabelSelector selects Pods of the same namespace. It has no expressions: a
// selector that anybody can read at a glance is part of the contract.
type LabelSelector struct {
	// MatchLabels must all be there. At least one: no selector takes every Pod.
	//
	// +kubebuilder:validation:MinProperties=1
	// +kubebuilder:validation:MaxProperties=16
	// +kubebuilder:validation:XValidation:rule="self.all(key, size(key) <= 316 && key.matches('^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$'))",message="a key is not a label name such as app or example.com/app"
	MatchLabels map[string]LabelValue `json:"matchLabels"`
}

// LocalReference names a resource of the same namespace.
type LocalReference struct {
	// Name of the resource.
	Name ResourceName `json:"name"`
}

// Objective is a promise about the requests of a pool or tenant.
//
// +kubebuilder:validation:XValidation:rule="has(self.threshold) || self.indicator == 'Availability'",message="is required for this indicator: the time that a request may take",fieldPath=".threshold"
// +kubebuilder:validation:XValidation:rule="!has(self.threshold) || self.indicator != 'Availability'",message="is of no use with Availability, which has no duration: remove it",fieldPath=".threshold"
type Objective struct {
	// Name is unique in the list.
	Name EntryName `json:"name"`
	// Match selects requests. Absent: all.
	Match *ObjectiveMatch `json:"match,omitempty"`
	// Indicator is what is measured.
	Indicator Indicator `json:"indicator"`
	// Threshold that a request must keep, 1ms to 24h; given for each indicator
	// but Availability.
	//
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1ms') && duration(self) <= duration('24h')",message="is not between 1ms and 24h"
	Threshold Duration `json:"threshold,omitempty"`
	// Target is the share of requests in percent, above 0 and up to 100.
	//
	// +kubebuilder:validation:MaxLength=8
	// +kubebuilder:validation:Pattern=`^(100(\.0{1,4})?|[1-9]?[0-9](\.[0-9]{1,4})?)$`
	// +kubebuilder:title="a percentage above 0 and up to 100 such as \"99.9\""
	// +kubebuilder:validation:XValidation:rule="double(self) > 0.0",message="is not above 0"
	Target string `json:"target"`
	// Window over which the share is taken, 1m at least.
	//
	// +kubebuilder:validation:XValidation:rule="self.endsWith('d') || duration(self) >= duration('1m')",message="is shorter than 1m"
	Window Window `json:"window"`
}

// ObjectiveMatch selects requests: fields are ANDed, entries of one are ORed.
type ObjectiveMatch struct {
	// Model is what the client asked for.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	Model []ModelName `json:"model,omitempty"`
	// Tenant of the request.
	//
	// +kubebuilder:validation:MaxItems=64
	// +listType=set
	Tenant []ResourceName `json:"tenant,omitempty"`
	// QoS class of the request.
	//
	// +kubebuilder:validation:MaxItems=3
	// +listType=set
	QoS []QoS `json:"qos,omitempty"`
}

// Indicator is what an Objective measures.
//
// +kubebuilder:validation:Enum=TTFT;ITL;TPOT;EndToEnd;Availability
type Indicator string

// The indicators.
const (
	// IndicatorTTFT is the time to the first token.
	IndicatorTTFT Indicator = "TTFT"
	// IndicatorITL is the time between two tokens.
	IndicatorITL Indicator = "ITL"
	// IndicatorTPOT is the mean time per output token after the first.
	IndicatorTPOT Indicator = "TPOT"
	// IndicatorEndToEnd is the time to the last token.
	IndicatorEndToEnd Indicator = "EndToEnd"
	// IndicatorAvailability is the share of requests that were answered.
	IndicatorAvailability Indicator = "Availability"
)

// WorkerCount counts workers, that is engine processes.
type WorkerCount struct {
	// Total that were found.
	//
	// +kubebuilder:validation:Minimum=0
	Total int32 `json:"total"`
	// Ready to take requests.
	//
	// +kubebuilder:validation:Minimum=0
	Ready int32 `json:"ready"`
}
