// Package review asks the Kubernetes API whose a bearer token is and what its user
// may do.
//
// The router's admin API lets callers in by it. It needs the rights of the built-in
// ClusterRole system:auth-delegator: create on tokenreviews and
// subjectaccessreviews. A Client is safe for concurrent use and remembers nothing;
// an error means that the API could not be asked.
package review

import (
	"context"
	"errors"
	"fmt"

	authentication "k8s.io/api/authentication/v1"
	authorization "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/kinference/kinference/api/v1alpha1"
)

// User is who a token belongs to.
type User struct {
	Name, UID string
	Groups    []string
	Extra     map[string][]string
}

// Client asks.
type Client struct{ api dynamic.Interface }

// New returns a client of the API: one made by kube.Client, of its own.
func New(api dynamic.Interface) *Client { return &Client{api} }

var (
	tokens = schema.GroupVersionResource{Group: "authentication.k8s.io", Version: "v1", Resource: "tokenreviews"}
	access = schema.GroupVersionResource{Group: "authorization.k8s.io", Version: "v1", Resource: "subjectaccessreviews"}
)

// Authenticate finds the user of a token; nil if it is nobody's.
func (c *Client) Authenticate(ctx context.Context, token string) (*User, error) {
	r := authentication.TokenReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"},
		Spec:     authentication.TokenReviewSpec{Token: token},
	}
	var out authentication.TokenReview
	if err := c.create(ctx, tokens, &r, &out); err != nil {
		return nil, fmt.Errorf("review a token: %w", err)
	}
	if !out.Status.Authenticated {
		return nil, nil
	}
	u := &User{Name: out.Status.User.Username, UID: out.Status.User.UID, Groups: out.Status.User.Groups}
	if len(out.Status.User.Extra) > 0 {
		u.Extra = make(map[string][]string, len(out.Status.User.Extra))
		for k, v := range out.Status.User.Extra {
			u.Extra[k] = v
		}
	}
	return u, nil
}

// Allowed tells whether a user may do something with a resource of our API group,
// in all namespaces.
func (c *Client) Allowed(ctx context.Context, u *User, resource, verb string) (bool, error) {
	r := authorization.SubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SubjectAccessReview"},
		Spec: authorization.SubjectAccessReviewSpec{
			User: u.Name, UID: u.UID, Groups: u.Groups,
			ResourceAttributes: &authorization.ResourceAttributes{Group: v1alpha1.Group, Resource: resource, Verb: verb},
		},
	}
	if len(u.Extra) > 0 {
		r.Spec.Extra = make(map[string]authorization.ExtraValue, len(u.Extra))
		for k, v := range u.Extra {
			r.Spec.Extra[k] = v
		}
	}
	var out authorization.SubjectAccessReview
	if err := c.create(ctx, access, &r, &out); err != nil {
		return false, fmt.Errorf("review access: %w", err)
	}
	return out.Status.Allowed && !out.Status.Denied, nil
}

func (c *Client) create(ctx context.Context, what schema.GroupVersionResource, in, out any) error {
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(in)
	if err != nil {
		return err
	}
	answer, err := c.api.Resource(what).Create(ctx, &unstructured.Unstructured{Object: object}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if answer == nil {
		return errors.New("no answer")
	}
	return runtime.DefaultUnstructuredConverter.FromUnstructured(answer.Object, out)
}
