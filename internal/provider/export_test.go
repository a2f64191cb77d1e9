package provider

import (
	"io"

	"github.com/aws/aws-sdk-go-v2/aws/protocol/eventstream"
)

// MaxFrameHeaders is the limit of a frame's headers, for tests.
const MaxFrameHeaders = maxFrameHeaders

// Frames returns what reads the frames of src, for tests.
func Frames(src io.Reader, limit int) func() (eventstream.Message, error) {
	return newFrames(src, limit).next
}
