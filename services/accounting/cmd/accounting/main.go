// Command accounting runs the accounting service.
package main

import (
	"os"

	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/services/accounting"
)

func main() { os.Exit(daemon.Main("accounting", new(accounting.Service), os.Args[1:], os.Stderr)) }
