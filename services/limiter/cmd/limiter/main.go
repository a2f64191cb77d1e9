// Command limiter runs the limiter service.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/limiter"
)

func main() { os.Exit(daemon.Main("limiter", new(limiter.Service), os.Args[1:], os.Stderr)) }
