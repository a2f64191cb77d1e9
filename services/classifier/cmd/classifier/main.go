// Command classifier runs the classifier service.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/classifier"
)

func main() { os.Exit(daemon.Main("classifier", new(classifier.Service), os.Args[1:], os.Stderr)) }
