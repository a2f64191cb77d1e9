package provider

import (
	"bufio"
	"io"

	"github.com/aws/aws-sdk-go-v2/aws/protocol/eventstream"
)

// frames reads the event stream of AWS, whose decoder checks the sums.
type frames struct {
	src     *bufio.Reader
	decoder *eventstream.Decoder
	payload []byte
	max     int
}

func newFrames(src io.Reader, max int) *frames {
	return &frames{src: bufio.NewReaderSize(src, 32<<10), decoder: eventstream.NewDecoder(), max: max}
}
