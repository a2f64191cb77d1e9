package kube

import (
	"context"
	"encoding/base64"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
)

// KeySecrets writes records of API keys to Secrets of the Kubernetes API. Safe for
// concurrent use, also by several processes: a Secret that somebody else has changed
// meanwhile is read anew.
type KeySecrets struct{ Client dynamic.Interface }

// changes bounds how often a Secret is read anew.
const changes = 10

// Put changes or adds one record of a Secret, as resources.KeyFolder does. The Secret
// is made where there is none; one without the label is somebody else's.
func (k *KeySecrets) Put(ctx context.Context, namespace, name string, change func([]apikey.Record) (apikey.Record, error)) error {
	api := k.Client.Resource(secretResource).Namespace(namespace)
	for range changes {
		u, err := api.Get(ctx, name, metav1.GetOptions{})
		missing := apierrors.IsNotFound(err)
		switch {
		case missing:
			u = &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "v1", "kind": "Secret", "type": "Opaque",
				"metadata": map[string]any{"name": name, "namespace": namespace, "labels": map[string]any{apikey.Label: "true"}},
			}}
		case err != nil:
			return fmt.Errorf("read the Secret %s/%s: %w", namespace, name, err)
		case u.GetLabels()[apikey.Label] != "true":
			return fmt.Errorf("the Secret %s/%s %w: it has no label %s", namespace, name, resources.ErrNotOurs, apikey.Label)
		}
		r, err := change(resources.NewKeySecret(namespace, name, secretData(u)).Keys)
		if err != nil {
			return err
		}
		if err := unstructured.SetNestedField(u.Object, base64.StdEncoding.EncodeToString(r.Encode()), "data", r.ID); err != nil {
			return fmt.Errorf("change the Secret %s/%s: its data is no map", namespace, name)
		}
		if missing {
			_, err = api.Create(ctx, u, metav1.CreateOptions{FieldManager: "kinference"})
		} else {
			_, err = api.Update(ctx, u, metav1.UpdateOptions{FieldManager: "kinference"}) // of this version only
		}
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("write the Secret %s/%s: %w", namespace, name, err)
		}
	}
	return fmt.Errorf("write the Secret %s/%s: others change it all the time", namespace, name)
}
