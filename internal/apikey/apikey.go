// Package apikey makes and checks API keys, and keeps the records of them.
//
// A key is kin_<id>_<secret>_<checksum>: a prefix that scanners for leaked
// secrets find, an id that may be shown, 256 random bits, and a checksum by
// which a mistyped or made-up key is known before anything is looked up. What is
// stored of a key is a Record with its SHA-256; at that entropy a slow hash
// would protect nothing and cost the CPU of every request. Records live in
// Secrets, one entry for each id.
//
// The router reads records, its admin API and kinfctl write them, and ingress
// checks keys. Everything here is a pure function and safe for concurrent use.
package apikey

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/big"
	"strings"
	"time"
)

const (
	// Prefix of every key.
	Prefix = "kin_"
	// Label on Secrets of Kubernetes that hold records; its value is "true".
	Label = "kinference.buoyant.io/api-keys"

	idLen     = 12
	secretLen = 43 // base 62: just over 256 bits
	sumLen    = 6
	// Len is the length of a key.
	Len = len(Prefix) + idLen + 1 + secretLen + 1 + sumLen

	digits = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	// idDigits are those of an id, which is a name in Kubernetes, too.
	idDigits = 36
)

// Bounds of a record.
const (
	maxUser        = 253
	maxDescription = 253
	maxRecord      = 4 << 10
	// MaxRecords is how many keys one Secret may hold.
	MaxRecords = 1000
)

// New makes a key and its id. The key is not stored anywhere.
func New() (key, id string) {
	id = random(idLen, idDigits)
	key = Prefix + id + "_" + random(secretLen, len(digits))
	return key + "_" + checksum(key), id
}

// random returns n digits of a base.
func random(n, base int) string {
	out := make([]byte, n)
	limit := big.NewInt(int64(base))
	for i := range out {
		d, err := rand.Int(rand.Reader, limit)
		if err != nil { // cannot be: the reader never fails
			panic(err)
		}
		out[i] = digits[d.Int64()]
	}
	return string(out)
}

// checksum is the CRC-32 of a text as six digits.
func checksum(text string) string {
	var out [sumLen]byte
	sum := crc32.ChecksumIEEE([]byte(text))
	for i := sumLen - 1; i >= 0; i-- {
		out[i] = digits[sum%uint32(len(digits))]
		sum /= uint32(len(digits))
	}
	return string(out[:])
}

// Parse returns the id of a text that has the form of a key and the right
// checksum. That says nothing about whether such a key was ever made.
func Parse(key string) (id string, ok bool) {
	const secretAt = len(Prefix) + idLen + 1
	const sumAt = secretAt + secretLen + 1
	if len(key) != Len || !strings.HasPrefix(key, Prefix) || key[secretAt-1] != '_' || key[sumAt-1] != '_' {
		return "", false
	}
	id = key[len(Prefix) : secretAt-1]
	if !ValidID(id) || !alphanumeric(key[secretAt:sumAt-1]) || checksum(key[:sumAt-1]) != key[sumAt:] {
		return "", false
	}
	return id, true
}

// ValidID reports whether a text has the form of a key's id.
func ValidID(id string) bool {
	if len(id) != idLen {
		return false
	}
	for _, c := range []byte(id) {
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'z') {
			return false
		}
	}
	return true
}

func alphanumeric(s string) bool {
	for _, c := range []byte(s) {
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z') {
			return false
		}
	}
	return true
}

// Hash is what a Record has of a key.
func Hash(key string) [sha256.Size]byte { return sha256.Sum256([]byte(key)) }

// latest is the last time that can be written.
var latest = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

// Record is what is stored of a key.
type Record struct {
	// ID is the name of the record in its Secret.
	ID string
	// SHA256 of the whole key.
	SHA256 [sha256.Size]byte
	// User it was made for; empty: nobody in particular.
	User string
	// Description is for people.
	Description string
	// Created, Expires and Revoked; zero: not known, never, not.
	Created, Expires, Revoked time.Time
}

// form is a Record as it is written.
type form struct {
	SHA256      string     `json:"sha256"`
	User        string     `json:"user,omitempty"`
	Description string     `json:"description,omitempty"`
	Created     *time.Time `json:"created,omitempty"`
	Expires     *time.Time `json:"expires,omitempty"`
	Revoked     *time.Time `json:"revoked,omitempty"`
}

// Encode writes a record as JSON, without its id.
func (r *Record) Encode() []byte {
	at := func(t time.Time) *time.Time {
		if t.IsZero() {
			return nil
		}
		if t = t.UTC().Truncate(time.Second); t.After(latest) {
			t = latest
		}
		return &t
	}
	out, err := json.Marshal(form{hex.EncodeToString(r.SHA256[:]), r.User, r.Description, at(r.Created), at(r.Expires), at(r.Revoked)})
	if err != nil { // cannot be: the form always marshals
		panic(err)
	}
	return out
}

// Decode reads a record. The errors hold nothing of what was read: it may be a
// secret that got into the wrong place.
func Decode(id string, data []byte) (Record, error) {
	if !ValidID(id) {
		return Record{}, fmt.Errorf("the name is not the id of a key: %d lower-case letters and digits", idLen)
	}
	if len(data) > maxRecord {
		return Record{}, fmt.Errorf("is longer than %d bytes", maxRecord)
	}
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	var f form
	if dec.Decode(&f) != nil || dec.More() {
		return Record{}, errors.New(`is no record of a key, such as {"sha256":"…","user":"alice","expires":"2027-01-31T00:00:00Z"}`)
	}
	sum, err := hex.DecodeString(f.SHA256)
	switch {
	case err != nil || len(sum) != sha256.Size:
		return Record{}, errors.New("sha256 is not the SHA-256 of a key: 64 hexadecimal digits")
	case len(f.User) > maxUser || !printable(f.User):
		return Record{}, fmt.Errorf("user is longer than %d bytes or not printable", maxUser)
	case len(f.Description) > maxDescription || !printable(f.Description):
		return Record{}, fmt.Errorf("description is longer than %d bytes or not printable", maxDescription)
	}
	r := Record{ID: id, SHA256: [sha256.Size]byte(sum), User: f.User, Description: f.Description}
	for to, from := range map[*time.Time]*time.Time{&r.Created: f.Created, &r.Expires: f.Expires, &r.Revoked: f.Revoked} {
		if from != nil {
			*to = from.UTC()
		}
	}
	return r, nil
}

func printable(s string) bool {
	for _, c := range s {
		if c < ' ' || c == 0x7f || c == '\uFFFD' {
			return false
		}
	}
	return true
}
