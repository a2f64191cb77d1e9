package usage

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"time"
)

// An entry in a file: length of what follows the header (4 bytes), CRC-32C of
// kind and body (4 bytes), kind, body. Numbers are little endian. The body of
// an open entry and of an event is the id, the subject, and the CloudEvent as it
// goes to NATS; that of a progress entry a time in Unix milliseconds and then
// id, input + 1 and output + 1 of each request. Ids and subjects have their
// length before them; these numbers are varints.
const (
	kindOpen     = 1
	kindProgress = 2
	kindEvent    = 3

	headerLen = 9
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func appendEntry(dst []byte, kind byte, id, subject string, data []byte) []byte {
	dst = append(dst, make([]byte, headerLen)...)
	dst = appendString(dst, id)
	dst = appendString(dst, subject)
	dst = append(dst, data...)
	return seal(dst, kind)
}

func appendString(dst []byte, s string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(s))), s...)
}

// seal writes the header of the only entry in b.
func seal(b []byte, kind byte) []byte {
	b[8] = kind
	binary.LittleEndian.PutUint32(b, uint32(len(b)-headerLen))
	binary.LittleEndian.PutUint32(b[4:], crc32.Checksum(b[8:], castagnoli))
	return b
}

// entry is one that was read. Its slices are valid until the next one.
type entry struct {
	kind              byte
	id, subject, data []byte // data: the CloudEvent, or the body of a progress entry
}

// walk calls f with the entries of a file from at to size, as many as one read
// gets, until f returns false. It returns how many bytes those were, and whether
// what follows is not readable.
func walk(r io.ReaderAt, at, size int64, f func(entry) bool) (n int64, bad bool) {
	buf := make([]byte, min(readBytes, size-at))
	if got, err := r.ReadAt(buf, at); err != nil && got < len(buf) {
		return 0, true
	}
	for b := buf; len(b) > 0; {
		if len(b) < headerLen {
			return n, at+int64(len(buf)) == size
		}
		length := int64(binary.LittleEndian.Uint32(b))
		if length > readBytes-headerLen {
			return n, true
		}
		whole := headerLen + length
		if int64(len(b)) < whole {
			return n, at+int64(len(buf)) == size
		}
		if crc32.Checksum(b[8:whole], castagnoli) != binary.LittleEndian.Uint32(b[4:]) {
			return n, true
		}
		e, ok := parse(b[8], b[headerLen:whole])
		if !ok {
			return n, true
		}
		b = b[whole:]
		n += whole
		if !f(e) {
			return n, false
		}
	}
	return n, false
}

func parse(kind byte, body []byte) (e entry, ok bool) {
	e.kind = kind
	if kind == kindProgress {
		e.data = body
		return e, true
	}
	if e.id, body, ok = cutString(body); !ok {
		return e, false
	}
	if e.subject, e.data, ok = cutString(body); !ok {
		return e, false
	}
	return e, true // of a kind that a later version invents nothing is used
}

func cutString(b []byte) (s, rest []byte, ok bool) {
	n, used := binary.Uvarint(b)
	if used <= 0 || n > uint64(len(b)-used) {
		return nil, nil, false
	}
	b = b[used:]
	return b[:n], b[n:], true
}

// progress is how far an answer was; counts below 0 are unknown.
type progress struct {
	at            time.Time
	input, output int64
}

// eachProgress reads a progress entry.
func (e *entry) eachProgress(f func(id []byte, p progress)) {
	b := e.data
	ms, used := binary.Uvarint(b)
	if used <= 0 {
		return
	}
	p := progress{at: time.UnixMilli(int64(ms))}
	for b = b[used:]; len(b) > 0; {
		id, rest, ok := cutString(b)
		if !ok {
			return
		}
		input, n := binary.Uvarint(rest)
		if n <= 0 {
			return
		}
		output, m := binary.Uvarint(rest[n:])
		if m <= 0 {
			return
		}
		b = rest[n+m:]
		p.input, p.output = int64(input)-1, int64(output)-1
		f(id, p)
	}
}

// progressEntry makes one.
type progressEntry struct {
	b []byte
	n int
}

func newProgress(dst []byte, now time.Time) *progressEntry {
	dst = append(dst, make([]byte, headerLen)...)
	return &progressEntry{b: binary.AppendUvarint(dst, uint64(max(now.UnixMilli(), 0)))}
}

func (p *progressEntry) add(id string, input, output int64) {
	p.n++
	p.b = appendString(p.b, id)
	p.b = binary.AppendUvarint(p.b, uint64(max(input, -1)+1))
	p.b = binary.AppendUvarint(p.b, uint64(max(output, -1)+1))
}

func (p *progressEntry) full() bool    { return len(p.b) > readBytes/2 }
func (p *progressEntry) entry() []byte { return seal(p.b, kindProgress) }
