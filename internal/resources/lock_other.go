//go:build !unix

package resources

import (
	"context"
	"errors"
)

// lockFile is for systems that can lock files.
func lockFile(context.Context, string) (unlock func(), err error) {
	return nil, errors.New("files cannot be locked on this system")
}
