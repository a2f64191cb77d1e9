// Command kvtracker runs the kvtracker service, as tracker or as relay.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/kvtracker"
)

func main() { os.Exit(daemon.Main("kvtracker", new(kvtracker.Service), os.Args[1:], os.Stderr)) }
