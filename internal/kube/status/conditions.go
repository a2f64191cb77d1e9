package status

import (
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

// maxMessage bounds the message of a condition in bytes.
const maxMessage = 1024

// accepted says whether the newest version is valid. Warnings stand in the
// message.
func accepted(r *kube.Resource) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAccepted, Message: "is valid"}
	faults := pick(r.Problems, func(p resources.Problem) bool { return p.Severity == resources.Error })
	if len(faults) > 0 {
		c.Status, c.Reason = metav1.ConditionFalse, v1alpha1.ReasonConflicted
		for _, p := range faults {
			if p.Reason != resources.Claimed {
				c.Reason = v1alpha1.ReasonInvalid
			}
		}
		c.Message = say(faults)
		return c
	}
	warnings := pick(r.Problems, func(p resources.Problem) bool { return p.Reason != resources.Missing })
	if len(warnings) > 0 {
		c.Message = cut("is valid, but " + say(warnings))
	}
	return c
}

// resolvedRefs names what is not there.
func resolvedRefs(r *kube.Resource) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionResolvedRefs}
	missing := pick(r.Problems, func(p resources.Problem) bool { return p.Reason == resources.Missing })
	switch {
	case len(missing) > 0:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, v1alpha1.ReasonRefNotFound, say(missing)
	case r.Problems.Err() != nil:
		c.Status, c.Reason, c.Message = metav1.ConditionUnknown, v1alpha1.ReasonInvalid, "references are followed once the resource is valid"
	default:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonResolvedRefs, "all that it refers to is there"
	}
	return c
}

// programmed says whether every replica serves this generation. Once that was
// so it stays so for the generation: a replica that starts or reconnects reads
// the newest version before it serves anything. Only one that says otherwise
// counts against it.
func programmed(r *kube.Resource, before *metav1.Condition, replicas []*replica, now time.Time) metav1.Condition {
	c := metav1.Condition{Type: v1alpha1.ConditionProgrammed, Status: metav1.ConditionFalse, Reason: v1alpha1.ReasonPending}
	generation := r.Object.GetGeneration()
	if r.Served != generation {
		c.Reason, c.Message = v1alpha1.ReasonInvalid, serves("the router", r.Served)
		return c
	}
	settled := before != nil && before.Status == metav1.ConditionTrue && before.ObservedGeneration == generation
	for _, x := range replicas {
		older, behind := x.report.Behind[r.Object.GetUID()]
		switch {
		case behind && older != generation:
			c.Message = serves("router replica "+x.name, older)
			return c
		case settled:
		case now.Sub(x.heard) > silentAfter:
			c.Status, c.Message = metav1.ConditionUnknown, "router replica "+x.name+" has not answered for a while"
		case c.Message == "":
			c.Message = lacks(r, x)
		}
	}
	if c.Message == "" && len(replicas) == 0 && !settled {
		c.Message = "no router replica has said what it serves"
	}
	if c.Message == "" {
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, v1alpha1.ReasonProgrammed, "every router replica serves this generation"
	}
	return c
}

func serves(who string, generation int64) string {
	if generation == 0 {
		return who + " serves no generation of it"
	}
	return fmt.Sprintf("%s serves generation %d", who, generation)
}

// lacks says why a replica cannot serve this generation yet; empty when it does.
func lacks(r *kube.Resource, x *replica) string {
	version, follows := x.report.Versions[r.Scope]
	switch {
	case x.fault:
		return "router replica " + x.name + " says something that this version does not understand"
	case !follows:
		return "router replica " + x.name + " does not read " + r.Scope
	case x.report.More:
		return "router replica " + x.name + " serves older generations of too many resources to name"
	}
	// A replica that has seen nothing yet has no version, which is no number.
	if n, err := resourceversion.CompareResourceVersion(version, r.Arrived); err != nil || n < 0 {
		return "router replica " + x.name + " does not serve this generation yet"
	}
	return ""
}

func pick(all resources.Problems, want func(resources.Problem) bool) resources.Problems {
	var out resources.Problems
	for _, p := range all {
		if want(p) {
			out = append(out, p)
		}
	}
	return out
}

// say joins problems as they are said elsewhere, without the resource.
func say(problems resources.Problems) string {
	var parts []string
	for _, p := range problems {
		if p.Field == "" {
			parts = append(parts, p.Message)
		} else {
			parts = append(parts, p.Field+": "+p.Message)
		}
	}
	return cut(strings.Join(parts, "; "))
}

func cut(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage-3], "") + "..."
}
