package fake

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"slices"
	"strings"
	"time"
)

// checkSignature checks Signature Version 4 as AWS describes it, apart from the
// SDK that made it.
func checkSignature(r *http.Request, body []byte) (why string) {
	auth, ok := strings.CutPrefix(r.Header.Get("Authorization"), "AWS4-HMAC-SHA256 ")
	if !ok {
		return "Missing Authentication Token"
	}
	part := map[string]string{}
	for p := range strings.SplitSeq(auth, ",") {
		k, v, _ := strings.Cut(strings.TrimSpace(p), "=")
		part[k] = v
	}
	date := r.Header.Get("X-Amz-Date")
	at, err := time.Parse("20060102T150405Z", date)
	if err != nil || time.Since(at).Abs() > 5*time.Minute {
		return "Signature expired"
	}
	scope := date[:8] + "/" + Region + "/bedrock/aws4_request"
	if part["Credential"] != AccessKey+"/"+scope {
		return "Credential should be scoped to a valid region: " + part["Credential"]
	}
	signed := strings.Split(part["SignedHeaders"], ";")
	for _, name := range []string{"host", "x-amz-date"} {
		if !slices.Contains(signed, name) {
			return name + " is not signed"
		}
	}
	canonical := r.Method + "\n" + strings.ReplaceAll(r.URL.EscapedPath(), "%", "%25") + "\n" + r.URL.RawQuery + "\n"
	for _, name := range signed {
		value := strings.Join(strings.Fields(strings.Join(r.Header.Values(name), ",")), " ")
		if name == "host" {
			value = r.Host
		}
		canonical += name + ":" + value + "\n"
	}
	sum := func(b []byte) string { h := sha256.Sum256(b); return hex.EncodeToString(h[:]) }
	canonical += "\n" + part["SignedHeaders"] + "\n" + sum(body)
	key := []byte("AWS4" + SecretKey)
	for _, s := range []string{date[:8], Region, "bedrock", "aws4_request", "AWS4-HMAC-SHA256\n" + date + "\n" + scope + "\n" + sum([]byte(canonical))} {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(s))
		key = h.Sum(nil)
	}
	if hex.EncodeToString(key) != part["Signature"] {
		return "The request signature we calculated does not match"
	}
	return ""
}
