package v1alpha1

// Limit bounds what a tenant, or those whose requests match, may use. Exactly
// one quantity is given. 0 denies everything; a quantity that is absent is not
// limited. A request must fit all limits of all levels.
//
// +kubebuilder:validation:XValidation:rule="[has(self.tokens), has(self.requests), has(self.concurrency), has(self.cost), has(self.gpuSeconds)].filter(given, given).size() == 1",message="give exactly one of tokens, requests, concurrency, cost and gpuSeconds"
// +kubebuilder:validation:XValidation:rule="!has(self.concurrency) || !has(self.window)",message="is of no use with concurrency, which counts what runs now: remove it",fieldPath=".window"
// +kubebuilder:validation:XValidation:rule="!has(self.concurrency) || !has(self.calendar)",message="is of no use with concurrency, which counts what runs now: remove it",fieldPath=".calendar"
// +kubebuilder:validation:XValidation:rule="has(self.concurrency) || has(self.window) != has(self.calendar)",message="give window or calendar, one of the two"
// +kubebuilder:validation:XValidation:rule="!has(self.burst) || has(self.window)",message="is of no use without window",fieldPath=".burst"
type Limit struct {
	// Name is unique in the list. It is shown to clients and in metrics.
	Name EntryName `json:"name"`
	// Per tells what has a count of its own. Several together have one for
	// each combination.
	//
	// +kubebuilder:default={Tenant}
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=4
	// +listType=set
	Per []LimitScope `json:"per,omitempty"`
	// Tokens of prompts and answers.
	Tokens *TokenLimit `json:"tokens,omitempty"`
	// Requests counts requests.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	Requests *int64 `json:"requests,omitempty"`
	// Concurrency is the number of requests at the same time.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	Concurrency *int32 `json:"concurrency,omitempty"`
	// Cost in money.
	Cost *CostLimit `json:"cost,omitempty"`
	// GPUSeconds of the workers.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	GPUSeconds *int64 `json:"gpuSeconds,omitempty"`
	// Window in which the quantity is granted. It refills continuously.
	Window Window `json:"window,omitempty"`
	// Burst is the time whose grant may be used at once. Default: one window.
	Burst Window `json:"burst,omitempty"`
	// Calendar grants the quantity anew with each period.
	Calendar *Calendar `json:"calendar,omitempty"`
	// OnUnavailable tells what to do while the counts cannot be reached.
	//
	// +kubebuilder:default=Local
	OnUnavailable OnUnavailable `json:"onUnavailable,omitempty"`
	// Shadow counts and records what would have been denied, and denies nothing.
	Shadow bool `json:"shadow,omitempty"`
}

// LimitScope is something that has a count of its own.
//
// +kubebuilder:validation:Enum=Tenant;User;Key;Model
type LimitScope string

// The scopes of a limit.
const (
	// PerTenant counts all requests of the tenant together.
	PerTenant LimitScope = "Tenant"
	// PerUser counts by authenticated user.
	PerUser LimitScope = "User"
	// PerKey counts by API key.
	PerKey LimitScope = "Key"
	// PerModel counts by the name of the model that answers.
	PerModel LimitScope = "Model"
)

// TokenLimit is a number of tokens of one sort.
//
// +kubebuilder:validation:XValidation:rule="[has(self.input), has(self.cachedInput), has(self.output), has(self.total)].filter(given, given).size() == 1",message="give exactly one of input, cachedInput, output and total: each sort has a limit of its own"
// +kubebuilder:validation:XValidation:rule="!has(self.weights) || has(self.total)",message="is of no use without total, whose sorts it weighs",fieldPath=".weights"
type TokenLimit struct {
	// Input tokens that had to be computed.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	Input *int64 `json:"input,omitempty"`
	// CachedInput tokens that came from a prefix cache.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	CachedInput *int64 `json:"cachedInput,omitempty"`
	// Output tokens.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	Output *int64 `json:"output,omitempty"`
	// Total of all of them, weighed by Weights.
	//
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000000000
	Total *int64 `json:"total,omitempty"`
	// Weights of a token of each sort in Total.
	Weights *TokenWeights `json:"weights,omitempty"`
}

// TokenWeights tells what a token of each sort counts.
type TokenWeights struct {
	// Input counts so much.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Input *float64 `json:"input,omitempty"`
	// CachedInput counts so much.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	CachedInput *float64 `json:"cachedInput,omitempty"`
	// Output counts so much.
	//
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	Output *float64 `json:"output,omitempty"`
}

// CostLimit is an amount of money.
type CostLimit struct {
	// Amount that may be spent.
	Amount Decimal `json:"amount"`
	// Currency of Amount.
	Currency Currency `json:"currency"`
}

// Calendar is a period that begins at the same time for everybody.
type Calendar struct {
	// Period after which the count is 0 again. Weeks begin on Monday.
	Period CalendarPeriod `json:"period"`
	// TimeZone of the period's beginning, a name of the IANA database.
	//
	// +kubebuilder:default=UTC
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,2}$`
	// +kubebuilder:title="a time zone such as UTC or Europe/Berlin"
	TimeZone string `json:"timeZone,omitempty"`
}

// CalendarPeriod is the length of a Calendar's period.
//
// +kubebuilder:validation:Enum=Hour;Day;Week;Month
type CalendarPeriod string

// The periods.
const (
	PeriodHour  CalendarPeriod = "Hour"
	PeriodDay   CalendarPeriod = "Day"
	PeriodWeek  CalendarPeriod = "Week"
	PeriodMonth CalendarPeriod = "Month"
)

// OnUnavailable tells what to do while the counts of a limit cannot be reached.
//
// +kubebuilder:validation:Enum=Allow;Local;Deny
type OnUnavailable string

// What can be done.
const (
	// UnavailableAllow lets requests pass and counts them later.
	UnavailableAllow OnUnavailable = "Allow"
	// UnavailableLocal has each replica grant its share by itself.
	UnavailableLocal OnUnavailable = "Local"
	// UnavailableDeny refuses requests.
	UnavailableDeny OnUnavailable = "Deny"
)
