package resources

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Severity tells what a Problem means for the catalog.
type Severity int

// The severities.
const (
	// Warning: the catalog is good, but something is not as written.
	Warning Severity = iota
	// Error: there is no catalog.
	Error
)

func (s Severity) String() string {
	if s == Error {
		return "error"
	}
	return "warning"
}

// Reason sorts problems by who can mend them, as conditions in a status do.
type Reason int

// The reasons.
const (
	// Faulty: the resource itself is wrong, or not as it seems.
	Faulty Reason = iota
	// Missing: it refers to something that is not there.
	Missing
	// Claimed: another resource, which is older, claims the same.
	Claimed
)

// Problem is one thing that is wrong with the resources.
type Problem struct {
	Severity Severity
	Reason   Reason
	// File is relative to the folder, empty for what came from the Kubernetes
	// API; Line counts from 1, 0 when the file as a whole is meant.
	File string
	Line int
	// Resource is kind namespace/name, empty when not known.
	Resource string
	// Field is the path of the field, as in spec.models[0].name.
	Field string
	// Message says what is wrong and what is wanted.
	Message string
}

// String is file:line: severity: resource: field: message, as far as they are
// known.
func (p Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		b.WriteString(": ")
	}
	b.WriteString(p.Severity.String() + ": ")
	if p.Resource != "" {
		b.WriteString(p.Resource + ": ")
	}
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Message)
	return b.String()
}

// Problems of a folder, in the order of file and line.
type Problems []Problem

// Err joins the problems of severity Error; nil when there are none.
func (ps Problems) Err() error {
	var errs []error
	for _, p := range ps {
		if p.Severity == Error {
			errs = append(errs, errors.New(p.String()))
		}
	}
	return errors.Join(errs...)
}

func (ps Problems) sort() {
	slices.SortStableFunc(ps, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), strings.Compare(a.Resource, b.Resource),
			strings.Compare(a.Field, b.Field), strings.Compare(a.Message, b.Message))
	})
}
