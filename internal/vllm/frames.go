package vllm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// replayEnd is the sequence number of the message that ends a replay. Its
// payload is empty, which is what marks the end.
const replayEnd = math.MaxUint64

// maxFrames bounds the frames of a message; vLLM sends at most five.
const maxFrames = 16

// ErrFrames is returned for a ZMQ message that is none of vLLM's.
var ErrFrames = errors.New("malformed event frames")

// ParseEvent splits a message of the event socket: topic, sequence number and
// batch. The payload shares memory with frames.
func ParseEvent(frames [][]byte) (topic string, seq uint64, payload []byte, err error) {
	seq, payload, err = fromRight(frames)
	if err == nil && len(frames) > 2 {
		topic = string(frames[len(frames)-3])
	}
	return topic, seq, payload, err
}

// ParseReplay splits a reply of the replay socket, with or without the empty
// delimiter frame and the topic that newer engines add. end is true for the
// message after the last batch. The payload shares memory with frames.
func ParseReplay(frames [][]byte) (seq uint64, payload []byte, end bool, err error) {
	seq, payload, err = fromRight(frames)
	return seq, payload, err == nil && len(payload) == 0, err
}

// fromRight reads the last two frames: the ones before differ by version.
func fromRight(frames [][]byte) (seq uint64, payload []byte, err error) {
	n := len(frames)
	if n < 2 || n > maxFrames {
		return 0, nil, fmt.Errorf("%w: %d frames", ErrFrames, n)
	}
	if len(frames[n-2]) != 8 {
		return 0, nil, fmt.Errorf("%w: sequence number of %d bytes", ErrFrames, len(frames[n-2]))
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], nil
}

// EventFrames builds a message of the event socket.
func EventFrames(topic string, seq uint64, payload []byte) [][]byte {
	return [][]byte{[]byte(topic), seqFrame(seq), payload}
}

// ReplayRequest builds the request for all batches from start on, as a DEALER
// sends it.
func ReplayRequest(start uint64) [][]byte { return [][]byte{{}, seqFrame(start)} }

// ParseReplayRequest splits a request as a ROUTER receives it. Like vLLM it
// accepts exactly [identity, "", sequence number].
func ParseReplayRequest(frames [][]byte) (identity []byte, start uint64, err error) {
	if len(frames) != 3 || len(frames[1]) != 0 || len(frames[2]) != 8 {
		return nil, 0, fmt.Errorf("%w: replay request of %d frames", ErrFrames, len(frames))
	}
	return frames[0], binary.BigEndian.Uint64(frames[2]), nil
}

// ReplayFrames builds a replay reply as the ROUTER of an engine of version v
// sends it, without the identity that goes first.
func ReplayFrames(topic string, seq uint64, payload []byte, v Version) [][]byte {
	if v.AtLeast(V0_26) {
		return [][]byte{{}, []byte(topic), seqFrame(seq), payload}
	}
	return [][]byte{{}, seqFrame(seq), payload}
}

// ReplayEndFrames builds the message that ends a replay, like ReplayFrames.
func ReplayEndFrames(v Version) [][]byte { return ReplayFrames("", replayEnd, nil, v) }

func seqFrame(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }
