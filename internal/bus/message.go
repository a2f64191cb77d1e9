package bus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Kind tells what a KV message says.
type Kind string

// Kinds of KV messages.
const (
	// KindBatch carries engine batches with consecutive sequence numbers.
	KindBatch Kind = "batch"
	// KindClear says that what was published of this worker before is no longer
	// known to be true: the engine restarted, its events have a gap that replay
	// could not fill, its cache was reset, or it left. Entries are dropped; the
	// next batch starts at First in epoch Epoch.
	KindClear Kind = "clear"
	// KindSuspend says that the relay lost sight of the engine: entries are kept
	// but must not be trusted until a resume or a clear.
	KindSuspend Kind = "suspend"
	// KindResume ends a suspend: nothing was missed, or batches follow that fill
	// what was.
	KindResume Kind = "resume"
)

// Reasons of a clear that a reader acts on; the others are for people.
const (
	// ReasonGone: the worker left the catalog.
	ReasonGone = "gone"
	// ReasonUnverified: without replay nobody knows what was published before
	// the relay listened, First included.
	ReasonUnverified = "unverified"
)

// Headers of a KV message, beside the server's own message id.
const (
	headerKind   = "Kin-Kind"
	headerFirst  = "Kin-First"
	headerLast   = "Kin-Last"
	headerEpoch  = "Kin-Epoch"
	headerReason = "Kin-Reason"
	headerDigest = "Kin-Digest"
)

// Bounds of a KV message. The server's own limit (1 MB unless configured) is
// usually smaller: see Conn.MaxMessage.
const (
	maxData     = 8 << 20
	maxPayloads = 1 << 14
	maxEpoch    = 64
	maxReason   = 32 // also of a digest
)

// KVMessage is one message on the stream KV_EVENTS.
type KVMessage struct {
	Kind Kind
	// Epoch names one run of the engine process as the relay sees it: sequence
	// numbers are only comparable within one. 1 to 64 bytes of [A-Za-z0-9._:-].
	Epoch string
	// First and Last are the engine's sequence numbers of the payloads. In other
	// kinds First is the number that the next batch is expected to have, and
	// Last equals it.
	First, Last uint64
	// Payloads are the raw engine payloads (msgpack) of First to Last, in order.
	// Decoding sets them to parts of its input.
	Payloads [][]byte
	// Reason says why (clear and suspend): a constant word such as "gap",
	// "restart", "reset", ReasonGone. Up to 32 bytes of the same characters.
	Reason string
	// Digest names the engine's own bytes of the batch Last, or, in other kinds,
	// of the batch before First. A relay that starts compares it with what the
	// engine replays, to tell whether it is still the same process. Empty when
	// there is no such batch; up to 32 bytes of the same characters.
	Digest string
}

// Overhead is what each payload costs in a message beside its own bytes.
const Overhead = binary.MaxVarintLen32

// Validate tells whether the message can be sent.
func (m *KVMessage) Validate() error {
	if !token(m.Epoch, maxEpoch) {
		return errors.New("epoch is empty, too long or has odd characters")
	}
	if m.Reason != "" && !token(m.Reason, maxReason) {
		return errors.New("reason is too long or has odd characters")
	}
	if m.Digest != "" && !token(m.Digest, maxReason) {
		return errors.New("digest is too long or has odd characters")
	}
	switch m.Kind {
	case KindBatch:
		n := len(m.Payloads)
		if n == 0 || n > maxPayloads {
			return fmt.Errorf("batch has %d payloads, want 1 to %d", n, maxPayloads)
		}
		if m.Last < m.First || m.Last-m.First != uint64(n-1) {
			return fmt.Errorf("batch of sequence %d to %d has %d payloads", m.First, m.Last, n)
		}
	case KindClear, KindSuspend, KindResume:
		if len(m.Payloads) != 0 || m.First != m.Last {
			return fmt.Errorf("%s with payloads or a range", m.Kind)
		}
	default:
		return fmt.Errorf("unknown kind %.16q", string(m.Kind))
	}
	return nil
}

// token tells whether s has 1 to limit bytes, all harmless in headers, ids and logs.
func token(s string, limit int) bool {
	if s == "" || len(s) > limit {
		return false
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; !plain(c) && c != '.' && c != ':' {
			return false
		}
	}
	return true
}

// Encode makes the NATS message that says m about w. A batch has a message id
// of worker, epoch and range, so that sending it twice stores it once; the
// other kinds are idempotent and have none.
func (m *KVMessage) Encode(w Worker) (*nats.Msg, error) {
	if err := errors.Join(w.validate(), m.Validate()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	first, last := strconv.FormatUint(m.First, 10), strconv.FormatUint(m.Last, 10)
	// The keys are in canonical form already: no need for Set to look.
	h := nats.Header{
		headerKind:  {string(m.Kind)},
		headerFirst: {first},
		headerLast:  {last},
		headerEpoch: {m.Epoch},
	}
	if m.Reason != "" {
		h[headerReason] = []string{m.Reason}
	}
	if m.Digest != "" {
		h[headerDigest] = []string{m.Digest}
	}
	if m.Kind == KindBatch {
		// The range takes part because a relay that was restarted may cut the
		// same events in other pieces.
		h[jetstream.MsgIDHeader] = []string{w.tokens() + "/" + m.Epoch + "/" + first + "-" + last}
	}
	size := 0
	for _, p := range m.Payloads {
		size += len(p) + Overhead
	}
	data := make([]byte, 0, size)
	for _, p := range m.Payloads {
		data = binary.AppendUvarint(data, uint64(len(p)))
		data = append(data, p...)
	}
	if len(data) > maxData {
		return nil, fmt.Errorf("%w: %d bytes of payload, limit %d", ErrInvalid, len(data), maxData)
	}
	return &nats.Msg{Subject: w.KVSubject(), Header: h, Data: data}, nil
}

// Decode is the inverse of Encode. It reuses m.Payloads, whose elements point
// into data; m is undefined after an error.
func (m *KVMessage) Decode(h nats.Header, data []byte) error {
	if err := m.decode(h, data); err != nil {
		return fmt.Errorf("decode KV message: %w", err)
	}
	return nil
}

func (m *KVMessage) decode(h nats.Header, data []byte) error {
	m.Kind = Kind(header(h, headerKind))
	m.Epoch = header(h, headerEpoch)
	m.Reason = header(h, headerReason)
	m.Digest = header(h, headerDigest)
	var err error
	if m.First, err = strconv.ParseUint(header(h, headerFirst), 10, 64); err != nil {
		return errors.New("first sequence number is not a number")
	}
	if m.Last, err = strconv.ParseUint(header(h, headerLast), 10, 64); err != nil {
		return errors.New("last sequence number is not a number")
	}
	m.Payloads = m.Payloads[:0]
	if len(data) > maxData {
		return fmt.Errorf("%d bytes, limit %d", len(data), maxData)
	}
	for len(data) > 0 {
		if len(m.Payloads) == maxPayloads {
			return fmt.Errorf("more than %d payloads", maxPayloads)
		}
		n, k := binary.Uvarint(data)
		if k <= 0 || n > uint64(len(data)-k) {
			return errors.New("payload length is beyond the message")
		}
		end := k + int(n)
		m.Payloads = append(m.Payloads, data[k:end:end])
		data = data[end:]
	}
	return m.Validate()
}

// header returns the first value of key, "" for none.
func header(h nats.Header, key string) string {
	if v := h[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}
