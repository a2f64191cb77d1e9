package classify

// kind of a finding.
type kind uint8

const (
	kindEmail kind = iota
	kindPhone
	kindCard
	kindIBAN
	kindNationalID
	kindPassport
	kindLicence
	kindAccount
	kindMedical
	kindIP
	kindWallet
	kindBirthDate
	kindAddress
	kindPerson
	kindSecret
	kindInjection
	kinds
	kindCustom = kinds
)

var kindNames = [kinds + 1]string{"email", "phone", "card", "iban", "national-id", "passport", "licence", "account", "medical", "ip", "wallet",
	"birth-date", "address", "person", "secret", "injection", "custom"}

// piiKinds are the kinds that have a tag pii-….
const piiKinds = kindSecret

// hit is a finding in a part.
type hit struct {
	kind       kind
	enc        encoding
	score      float32
	start, end int // bytes of the part
	rule       string
	custom     int // index of the custom tag
}

// The profiles.
const (
	ProfileDefault = "default"
	ProfileStrict  = "strict"
)

// profile says from which score on a finding of a kind makes pii-detected (or
// secret-detected, injection) true.
type profile struct{ threshold [kinds]float32 }

// tagThreshold is that of a kind's own tag, in every profile.
const tagThreshold = 0.5

var profiles = map[string]*profile{
	ProfileDefault: newProfile(0.5, map[kind]float32{kindPerson: 0.75, kindAddress: 0.6, kindIP: 0.6}),
	ProfileStrict:  newProfile(0.35, map[kind]float32{kindPerson: 0.5, kindAddress: 0.45, kindInjection: 0.4}),
}

func newProfile(all float32, but map[kind]float32) *profile {
	p := new(profile)
	for k := range p.threshold {
		p.threshold[k] = all
	}
	for k, t := range but {
		p.threshold[k] = t
	}
	return p
}

// Causes of what is unknown.
const (
	causeMedia     = "media"        // a part is not text
	causeTokens    = "tokens"       // token ids without text
	causeOversize  = "oversize"     // beyond the limit of bytes
	causeDeadline  = "deadline"     // the caller's time was over
	causePanic     = "panic"        // a detector failed
	causeUTF8      = "undecodable"  // bytes that are no UTF-8
	causeOpaque    = "opaque"       // long base64 without text in it
	causeDepth     = "decode_depth" // hidden in more layers than are undone
	causeBlobs     = "decode_limit" // more hidden pieces than are decoded
	causeInflated  = "inflate_limit"
	causeLanguage  = "language" // a script in which names are not looked for
	causeParts     = "part_limit"
	causeFindings  = "finding_limit"
	causeUnsure    = "unsure" // the head abstains
	causeNoText    = "no_text"
	causeNotAsked  = "not_looked_for"
	causeRuleLimit = "rule_limit"
)
