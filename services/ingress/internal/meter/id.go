package meter

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"time"
)

// NewID makes a UUIDv7 (RFC 9562): unique for ever, and later ones sort behind
// earlier ones to the millisecond.
func NewID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	ms := uint64(time.Now().UnixMilli())
	binary.BigEndian.PutUint16(b[:], uint16(ms>>32))
	binary.BigEndian.PutUint32(b[2:], uint32(ms))
	b[6] = b[6]&0x0f | 0x70
	b[8] = b[8]&0x3f | 0x80
	var s [36]byte
	hex.Encode(s[:8], b[:4])
	hex.Encode(s[9:13], b[4:6])
	hex.Encode(s[14:18], b[6:8])
	hex.Encode(s[19:23], b[8:10])
	hex.Encode(s[24:], b[10:])
	s[8], s[13], s[18], s[23] = '-', '-', '-', '-'
	return string(s[:])
}
