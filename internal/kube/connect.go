package kube

import (
	"fmt"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Requests a second that a client may make over time, and at once. Reading is
// a list and a watch per kind; writing is one request per status.
const (
	requestRate  = 50
	requestBurst = 100
)

// Connect reads how to reach the Kubernetes API: from a kubeconfig file, or from
// the Pod that this process runs in when the path is empty. It does not call the
// API.
func Connect(kubeconfig string) (*rest.Config, error) {
	var c *rest.Config
	var err error
	if kubeconfig == "" {
		c, err = rest.InClusterConfig()
	} else {
		c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("read how to reach the Kubernetes API: %w", err)
	}
	c.UserAgent = "kinference"
	c.WarningHandler = rest.NoWarnings{} // they would go past the log
	return c, nil
}

// Client makes a client with a rate limit of its own, so that a burst of one
// kind of requests does not hold up another.
func Client(c *rest.Config) (dynamic.Interface, error) {
	own := rest.CopyConfig(c)
	own.QPS, own.Burst, own.RateLimiter = requestRate, requestBurst, nil
	client, err := dynamic.NewForConfig(own)
	if err != nil {
		return nil, fmt.Errorf("make a client of the Kubernetes API: %w", err)
	}
	return client, nil
}
