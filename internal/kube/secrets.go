package kube

import (
	"encoding/base64"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/kinference/kinference/internal/apikey"
	"github.com/kinference/kinference/internal/resources"
)

// Secrets are read only if they say that they hold records of API keys: no other
// one ever gets into this process.
const keySelector = apikey.Label + "=true"

var secretResource = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}

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
