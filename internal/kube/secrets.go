package kube

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
)

// Secrets are read only if they say that they hold records of API keys: no other
// one ever gets into this process.
const keySelector = apikey.Label + "=true"

var (
	secretResource = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	reviewResource = schema.GroupVersionResource{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews"}
)

// secret is what is kept of a Secret: the records, or what is wrong with them.
type secret struct {
	metav1.ObjectMeta
	keys *resources.KeySecret
}

func toSecret(obj any) (any, error) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok {
		return obj, nil
	}
	return &secret{ObjectMeta: slim(u), keys: resources.NewKeySecret(u.GetNamespace(), u.GetName(), secretData(u))}, nil
}

// secretData is the content of a Secret. What is not base64 is left as it is, and
// is no record.
func secretData(u *unstructured.Unstructured) map[string][]byte {
	texts, _, _ := unstructured.NestedStringMap(u.Object, "data")
	data := make(map[string][]byte, len(texts))
	for name, text := range texts {
		content, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			content = nil
		}
		data[name] = content
	}
	return data
}

// keySecret implements resources.Options.Keys.
func (s *Source) keySecret(namespace, name string) *resources.KeySecret {
	store := s.secrets[namespace]
	if store == nil {
		store = s.secrets[""]
	}
	if store == nil {
		return nil
	}
	obj, _, err := store.GetByKey(namespace + "/" + name)
	if x, ok := obj.(*secret); ok && err == nil {
		return x.keys
	}
	return nil
}

// Reviewer asks the Kubernetes API whose a token is. Use NewReviewer. Safe for
// concurrent use.
type Reviewer struct{ client dynamic.Interface }

// NewReviewer makes a reviewer with a rate limit of its own.
func NewReviewer(c *rest.Config) (*Reviewer, error) {
	client, err := Client(c)
	return &Reviewer{client}, err
}

// Review returns the ServiceAccount whose token this is, made for an audience. ok is
// false for a token that is no good, and for one of another kind of user. Errors
// say nothing of the token.
func (r *Reviewer) Review(ctx context.Context, token, audience string) (namespace, name string, ok bool, err error) {
	answer, err := r.client.Resource(reviewResource).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
		"spec": map[string]any{"token": token, "audiences": []any{audience}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return "", "", false, fmt.Errorf("review a token: %w", safe(err))
	}
	status, _, _ := unstructured.NestedMap(answer.Object, "status")
	// An API server that does not know audiences names none, and would take any.
	audiences, _, _ := unstructured.NestedStringSlice(status, "audiences")
	if good, _ := status["authenticated"].(bool); !good || !slices.Contains(audiences, audience) {
		return "", "", false, nil
	}
	user, _, _ := unstructured.NestedString(status, "user", "username")
	namespace, name, ok = account(user)
	return namespace, name, ok, nil
}

// safe is an error without what might repeat a request.
func safe(err error) error {
	if f := explain(err); f.refused {
		return errors.New("the Kubernetes API does not allow it: grant the verb create on tokenreviews")
	}
	return errors.New("the Kubernetes API gave no answer")
}

// account reads the name of a ServiceAccount as a user.
func account(user string) (namespace, name string, ok bool) {
	rest, ok := strings.CutPrefix(user, "system:serviceaccount:")
	if !ok {
		return "", "", false
	}
	namespace, name, ok = strings.Cut(rest, ":")
	return namespace, name, ok && namespace != "" && name != ""
}
