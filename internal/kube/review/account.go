package review

import (
	"context"
	"errors"
	"slices"
	"strings"

	authentication "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Account finds the ServiceAccount of a token that was made for an audience. ok is
// false for a token that is no good, and for one of another kind of user. Errors
// say nothing of the token.
func (c *Client) Account(ctx context.Context, token, audience string) (namespace, name string, ok bool, err error) {
	r := authentication.TokenReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"},
		Spec:     authentication.TokenReviewSpec{Token: token, Audiences: []string{audience}},
	}
	var out authentication.TokenReview
	if err := c.create(ctx, tokens, &r, &out); err != nil {
		if apierrors.IsForbidden(err) {
			return "", "", false, errors.New("review a token: grant the verb create on tokenreviews")
		}
		return "", "", false, errors.New("review a token: the Kubernetes API gave no answer")
	}
	// An API server that does not know audiences names none, and would take any.
	if !out.Status.Authenticated || !slices.Contains(out.Status.Audiences, audience) {
		return "", "", false, nil
	}
	rest, ok := strings.CutPrefix(out.Status.User.Username, "system:serviceaccount:")
	if !ok {
		return "", "", false, nil
	}
	namespace, name, ok = strings.Cut(rest, ":")
	return namespace, name, ok && namespace != "" && name != "", nil
}
