// Package admission is the validating webhook: it refuses what `kinfctl validate`
// refuses, by the same code, before the Kubernetes API stores it.
//
// The schemas of the definitions carry what they can alone; the webhook adds what
// only code can say, seen together with all other resources, and turns warnings
// into those of the client. Each router replica serves it, with a certificate
// from files. Nothing depends on it for safety: what gets past a webhook that is
// away is left out of the catalog and named in its status, so that its
// failurePolicy is best Ignore.
//
// A Webhook is safe for concurrent use. Bad requests are answered, not fatal.
package admission

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/json" // whole numbers stay whole

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/kube"
	"github.com/kinference/kinference/internal/resources"
)

// Path of the webhook.
const Path = "/validate"

const (
	// maxBody bounds a review: it holds a resource of at most 3 MiB, the limit
	// of the API, twice.
	maxBody = 8 << 20
	// The API cuts a warning at 256 characters and drops what is too much.
	maxWarning  = 256
	maxWarnings = 16
)

// Webhook answers admission reviews.
type Webhook struct {
	// Others returns all resources and whether they are known yet; see
	// kube.Source.
	Others func() ([]resources.Object, bool)
	// Log may be nil.
	Log *slog.Logger
}

// ServeHTTP answers the review of one resource. Before the other resources are
// known it answers 503.
func (w *Webhook) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		rw.Header().Set("Allow", http.MethodPost)
		http.Error(rw, "want POST", http.StatusMethodNotAllowed)
		return
	}
	review, err := read(http.MaxBytesReader(rw, r.Body, maxBody))
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	others, ok := w.Others()
	if !ok {
		http.Error(rw, "the resources are not read yet", http.StatusServiceUnavailable)
		return
	}
	response := validate(review.Request, others)
	response.UID = review.Request.UID
	if w.Log != nil && !response.Allowed {
		w.Log.Info("refused a resource", "kind", review.Request.Kind.Kind, "namespace", review.Request.Namespace,
			"name", review.Request.Name, "reason", response.Result.Message)
	}
	out := admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: response}
	rw.Header().Set("Content-Type", "application/json")
	body, err := json.Marshal(out)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = rw.Write(body) // else the caller is gone
}

func read(body io.Reader) (*admissionv1.AdmissionReview, error) {
	data, err := io.ReadAll(body)
	if err != nil {
		return nil, fmt.Errorf("read review: %w", err)
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(data, &review); err != nil {
		return nil, fmt.Errorf("read review: %w", err)
	}
	if review.APIVersion != admissionv1.SchemeGroupVersion.String() || review.Request == nil {
		return nil, errors.New("want an AdmissionReview of admission.k8s.io/v1 with a request")
	}
	return &review, nil
}

// validate tells whether a resource may be stored.
func validate(req *admissionv1.AdmissionRequest, others []resources.Object) *admissionv1.AdmissionResponse {
	kind := kube.KindOf(req.Kind.Kind)
	if kind == nil || req.Kind.Group != v1alpha1.Group {
		return refuse(fmt.Sprintf("unknown kind %s of group %q: the webhook is for those of %s", req.Kind.Kind, req.Kind.Group, v1alpha1.Group))
	}
	if req.Operation != admissionv1.Create && req.Operation != admissionv1.Update {
		return &admissionv1.AdmissionResponse{Allowed: true}
	}
	content, err := parse(req.Object)
	if err != nil {
		return refuse(err.Error())
	}
	obj, err := kind.Decode(content)
	if err != nil {
		return refuse(err.Error())
	}
	if req.Operation == admissionv1.Update {
		// Whoever removes a finalizer or sets an annotation cannot help that the
		// rules have changed since the resource was made.
		before, err := parse(req.OldObject)
		if obj.GetDeletionTimestamp() != nil || err == nil && sameMeaning(before, content) {
			return &admissionv1.AdmissionResponse{Allowed: true}
		}
	}
	if obj.GetNamespace() == "" {
		obj.SetNamespace(req.Namespace)
	}
	problems := resources.ValidateObject(obj, others)
	response := &admissionv1.AdmissionResponse{Allowed: true}
	if text := errorsOf(problems); text != "" {
		response = refuse(text)
	}
	response.Warnings = warningsOf(problems)
	return response
}

func parse(raw runtime.RawExtension) (map[string]any, error) {
	content := map[string]any{}
	if err := json.Unmarshal(raw.Raw, &content); err != nil {
		return nil, fmt.Errorf("the object of the review cannot be read: %w", err)
	}
	return content, nil
}

// sameMeaning tells whether two versions differ only in what nobody checks.
func sameMeaning(before, after map[string]any) bool {
	labels := func(m map[string]any) any {
		metadata, _ := m["metadata"].(map[string]any)
		return metadata["labels"]
	}
	return reflect.DeepEqual(before["spec"], after["spec"]) && reflect.DeepEqual(labels(before), labels(after))
}

func refuse(message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid, Message: message,
	}}
}

// errorsOf says what kinfctl says, a line for each; empty when there is none.
func errorsOf(problems resources.Problems) string {
	var lines []string
	for _, p := range problems {
		if p.Severity == resources.Error {
			lines = append(lines, text(p))
		}
	}
	return strings.Join(lines, "\n")
}

func warningsOf(problems resources.Problems) []string {
	var out []string
	for _, p := range problems {
		if p.Severity == resources.Warning && len(out) < maxWarnings {
			w := text(p)
			if len(w) > maxWarning {
				w = strings.ToValidUTF8(w[:maxWarning-3], "") + "..."
			}
			out = append(out, w)
		}
	}
	return out
}

// text is a problem without severity and resource, which the client knows.
func text(p resources.Problem) string {
	if p.Field == "" {
		return p.Message
	}
	return p.Field + ": " + p.Message
}
