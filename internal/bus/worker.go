package bus

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxName bounds a namespace, a set name and a uid, in bytes.
const maxName = 253

// MaxRank bounds the data-parallel rank of a worker.
const MaxRank = 1 << 16

// Worker names one engine rank: all events and reports are about one.
type Worker struct {
	Namespace string
	// Set is the InferenceWorkerSet's name within the namespace.
	Set string
	// UID names the engine's pod or endpoint. It is never an address that a
	// later engine could inherit.
	UID string
	// Rank is the data-parallel rank, from 0.
	Rank int
}

// ID is the worker's id everywhere else: <uid>/<rank>.
func (w Worker) ID() string { return w.UID + "/" + strconv.Itoa(w.Rank) }

// SetName is <namespace>/<set>.
func (w Worker) SetName() string { return w.Namespace + "/" + w.Set }

// ParseWorker is the inverse of ID and SetName.
func ParseWorker(id, set string) (Worker, error) {
	i, j := strings.LastIndexByte(id, '/'), strings.IndexByte(set, '/')
	if i < 0 || j < 0 {
		return Worker{}, fmt.Errorf("worker %.64q of set %.64q: want <uid>/<rank> of <namespace>/<name>", id, set)
	}
	rank, err := parseRank(id[i+1:])
	if err != nil {
		return Worker{}, err
	}
	w := Worker{Namespace: set[:j], Set: set[j+1:], UID: id[:i], Rank: rank}
	return w, w.validate()
}

func (w Worker) validate() error {
	for _, s := range []string{w.Namespace, w.Set, w.UID} {
		if len(s) > maxName {
			return fmt.Errorf("name %.32q… is longer than %d bytes", s, maxName)
		}
	}
	if w.Rank < 0 || w.Rank >= MaxRank {
		return fmt.Errorf("rank %d is out of range", w.Rank)
	}
	return nil
}

const (
	kvPrefix    = "kv.events."
	statePrefix = "worker.state."
)

// AllKVSubjects matches the KV events of every worker.
const AllKVSubjects = kvPrefix + ">"

// KVSubject is the subject of the worker's KV events:
// kv.events.<namespace>.<set>.<uid>.<rank>, each name escaped.
func (w Worker) KVSubject() string { return kvPrefix + w.tokens() }

// StateSubject is the subject of the worker's reports:
// worker.state.<namespace>.<set>.<uid>.<rank>, each name escaped.
func (w Worker) StateSubject() string { return statePrefix + w.tokens() }

// StateKey is the worker's key in the bucket of reports.
func (w Worker) StateKey() string { return w.tokens() }

func (w Worker) tokens() string {
	b := make([]byte, 0, len(w.Namespace)+len(w.Set)+len(w.UID)+16)
	for _, s := range []string{w.Namespace, w.Set, w.UID} {
		b = appendEscaped(b, s)
		b = append(b, '.')
	}
	return string(strconv.AppendInt(b, int64(w.Rank), 10))
}

// ParseKVSubject is the inverse of KVSubject.
func ParseKVSubject(subject string) (Worker, error) { return parseSubject(subject, kvPrefix) }

// ParseStateSubject is the inverse of StateSubject.
func ParseStateSubject(subject string) (Worker, error) { return parseSubject(subject, statePrefix) }

func parseSubject(subject, prefix string) (Worker, error) {
	rest, ok := strings.CutPrefix(subject, prefix)
	if !ok {
		return Worker{}, fmt.Errorf("subject %.64q does not start with %s", subject, prefix)
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 4 {
		return Worker{}, fmt.Errorf("subject %.64q has %d names, want 4", subject, len(parts))
	}
	var names [3]string
	for i := range names {
		s, err := unescape(parts[i])
		if err != nil {
			return Worker{}, fmt.Errorf("subject %.64q: %w", subject, err)
		}
		names[i] = s
	}
	rank, err := parseRank(parts[3])
	if err != nil {
		return Worker{}, err
	}
	w := Worker{Namespace: names[0], Set: names[1], UID: names[2], Rank: rank}
	return w, w.validate()
}

// parseRank accepts only what strconv.Itoa writes, so that one worker has one
// subject.
func parseRank(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n >= MaxRank || strconv.Itoa(n) != s {
		return 0, fmt.Errorf("rank %.16q is not a number from 0 to %d", s, MaxRank-1)
	}
	return n, nil
}

const hexDigits = "0123456789ABCDEF"

// plain tells which bytes stand for themselves: those that are legal in a
// subject token as well as in a key of a bucket. Dots separate tokens, spaces
// and wildcards are illegal, '=' starts an escape.
func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// appendEscaped writes other bytes as =XX and the empty name as "=", since a
// subject must not have empty tokens.
func appendEscaped(b []byte, s string) []byte {
	if s == "" {
		return append(b, '=')
	}
	for i := 0; i < len(s); i++ {
		if c := s[i]; plain(c) {
			b = append(b, c)
		} else {
			b = append(b, '=', hexDigits[c>>4], hexDigits[c&15])
		}
	}
	return b
}

var errEscape = errors.New("bad escape")

// unescape refuses anything that appendEscaped would not have written.
func unescape(s string) (string, error) {
	if s == "=" {
		return "", nil
	}
	if s == "" {
		return "", errEscape
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case plain(c):
			b = append(b, c)
		case c == '=' && i+2 < len(s):
			hi, lo := strings.IndexByte(hexDigits, s[i+1]), strings.IndexByte(hexDigits, s[i+2])
			if hi < 0 || lo < 0 || plain(byte(hi<<4|lo)) {
				return "", errEscape
			}
			b = append(b, byte(hi<<4|lo))
			i += 2
		default:
			return "", errEscape
		}
	}
	return string(b), nil
}
