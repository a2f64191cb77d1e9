// Command ingress answers clients in the OpenAI dialect and proxies to workers.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/ingress"
)

func main() { os.Exit(daemon.Main("ingress", new(ingress.Service), os.Args[1:], os.Stderr)) }
