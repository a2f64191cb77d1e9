// Command router runs the router service.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/router"
)

func main() { os.Exit(daemon.Main("router", new(router.Service), os.Args[1:], os.Stderr)) }
