//go:build !unix

package usage

import "os"

func lock(*os.File) error { return nil }
