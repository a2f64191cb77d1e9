package classifier

import (
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// quiet is JSON whose errors do not repeat what was sent, as protojson's do.
type quiet struct{ name string }

var _ connect.Codec = quiet{}

func (q quiet) Name() string { return q.name }

func (quiet) Marshal(m any) ([]byte, error) {
	p, ok := m.(proto.Message)
	if !ok {
		return nil, errors.New("not a message")
	}
	return protojson.Marshal(p)
}

func (quiet) Unmarshal(data []byte, m any) error {
	p, ok := m.(proto.Message)
	if !ok {
		return errors.New("not a message")
	}
	if protojson.Unmarshal(data, p) != nil {
		return errors.New("the body is not a valid message")
	}
	return nil
}
