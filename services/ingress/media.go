package ingress

import (
	"bytes"
	"context"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/proxy"
)

const (
	// lookupTime bounds the look-up of a media URL's host.
	lookupTime = time.Second
	// maxMedia bounds the URLs of one request.
	maxMedia = 64
)

// mediaURL is the only form of URL that is passed on: nothing that one parser
// could read in another way than the next.
var mediaURL = regexp.MustCompile(`^https://([A-Za-z0-9.-]{1,253})(?::443)?(?:[/?#][!-\[\]-~]*)?$`)

// named is a host with a name of letters at its end, which no form of an address
// has.
var named = regexp.MustCompile(`^(?:[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\.)+[a-z](?:[a-z0-9-]*[a-z0-9])?$`)

// inside are domains that only names inside a network have.
var inside = []string{"localhost", "local", "internal", "svc", "lan", "home.arpa", "intranet", "corp"}

// media is the policy for pictures, sound and video by URL, which engines would
// fetch from where they are. The zero value takes none.
type media struct {
	any     bool
	domains []string
	lookup  func(ctx context.Context, host string) ([]net.IPAddr, error)
}

// newMedia reads the setting media-url-domains.
func newMedia(list string) media {
	m := media{lookup: net.DefaultResolver.LookupIPAddr}
	for d := range strings.SplitSeq(list, ",") {
		switch d = strings.ToLower(strings.TrimSpace(d)); d {
		case "":
		case "*":
			m.any = true
		default:
			m.domains = append(m.domains, strings.TrimPrefix(d, "."))
		}
	}
	return m
}

// urls reports whether any URL is taken.
func (m *media) urls() bool { return m.any || len(m.domains) > 0 }

// takes reports whether a URL may be passed on. Hosts of listed domains may be
// wherever the operator has them; of others all addresses must be public ones.
func (m *media) takes(ctx context.Context, url string) bool {
	if len(url) > 8<<10 {
		return false
	}
	parts := mediaURL.FindStringSubmatch(url)
	if parts == nil {
		return false
	}
	host := strings.TrimSuffix(strings.ToLower(parts[1]), ".")
	if !named.MatchString(host) {
		return false
	}
	under := func(d string) bool { return host == d || strings.HasSuffix(host, "."+d) }
	switch {
	case slices.ContainsFunc(m.domains, under):
		return true
	case !m.any || slices.ContainsFunc(inside, under):
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	addrs, err := m.lookup(ctx, host)
	return err == nil && len(addrs) > 0 && !slices.ContainsFunc(addrs, func(a net.IPAddr) bool { return !proxy.Public(a.IP) })
}

var (
	urlKey     = []byte(`_url"`)
	escapedKey = []byte(`\u`)
)

// checkMedia refuses a chat whose messages have media by URLs that are not to be
// passed on. Data URLs are no URLs in this sense.
func (x *exchange) checkMedia() *openai.Error {
	raw := x.req.Messages
	if !bytes.Contains(raw, urlKey) && !bytes.Contains(raw, escapedKey) { // nearly always
		return nil
	}
	urls := 0
	var message, part openai.Object
	i := -1
	for m := range x.req.Body.Get("messages").Elements() {
		i++
		if m.Kind != openai.Obj || message.Parse(m.Raw, x.MaxDepth+8) != nil {
			continue
		}
		j := -1
		for p := range message.Get("content").Elements() {
			j++
			if p.Kind != openai.Obj || part.Parse(p.Raw, x.MaxDepth+8) != nil {
				continue
			}
			for k := range part.Len() {
				for _, url := range addresses(part.Name(k), part.At(k)) {
					if urls++; urls > maxMedia || !x.media.takes(x.ctx, url) {
						return openai.Invalid("messages["+strconv.Itoa(i)+"].content["+strconv.Itoa(j)+"]", "media_url_not_allowed",
							"Media from this URL is not taken here: send it as a data URL.")
					}
				}
			}
		}
	}
	return nil
}

// texts are members of content parts that are read and not fetched. All others may
// be URLs: an engine may know more kinds of media than we do.
var texts = []string{"type", "text", "refusal", "thinking", "reasoning", "reasoning_content", "signature", "id", "name", "filename", "file_id", "uuid", "detail", "format"}

// addresses are the URLs in a member of a content part: it may be one, or an object
// that has some.
func addresses(name string, v openai.Value) (out []string) {
	if slices.Contains(texts, name) {
		return nil
	}
	if text, ok := v.Text(); ok {
		if isAddress(text) {
			out = append(out, text)
		}
		return out
	}
	if v.Kind != openai.Obj {
		return nil
	}
	var o openai.Object
	if o.Parse(v.Raw, openai.DefaultDepth) != nil {
		return []string{"unreadable:"} // too deep for a media part
	}
	for i := range o.Len() {
		if text, ok := o.At(i).Text(); ok && !slices.Contains(texts, o.Name(i)) && isAddress(text) {
			out = append(out, text)
		}
	}
	return out
}

// isAddress reports whether a text names a place: it has a scheme other than
// data. A lenient parser's view counts, not a strict one's. Names, formats and
// base64 have no colon.
func isAddress(text string) bool {
	text = strings.TrimLeft(text, "\x00\t\n\v\f\r ")
	scheme, _, ok := strings.Cut(text, ":")
	return (ok || strings.HasPrefix(text, "//")) && !strings.EqualFold(scheme, "data")
}
