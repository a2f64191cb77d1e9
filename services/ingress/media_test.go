package ingress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/kinference/kinference/internal/openai"
)

// URLs from which media may be fetched: by default none; of listed domains those
// that every parser reads alike; of any host those whose addresses are public.
func TestMediaPolicy(t *testing.T) {
	lookup := func(_ context.Context, host string) ([]net.IPAddr, error) {
		switch {
		case strings.HasPrefix(host, "inside."):
			return []net.IPAddr{{IP: net.ParseIP("93.184.216.34")}, {IP: net.ParseIP("10.0.0.1")}}, nil
		case strings.HasPrefix(host, "mapped."):
			return []net.IPAddr{{IP: net.ParseIP("::ffff:169.254.169.254")}}, nil
		case strings.HasPrefix(host, "gone."):
			return nil, errors.New("no such host")
		}
		return []net.IPAddr{{IP: net.ParseIP("93.184.216.34")}, {IP: net.ParseIP("2606:2800:220:1::1")}}, nil
	}
	none, some, anywhere := newMedia(""), newMedia("pics.example.com, .cdn.example.org"), newMedia("*")
	anywhere.lookup = lookup
	for _, tt := range []struct {
		url        string
		some, wide bool
	}{
		{"https://pics.example.com/a.png", true, true},
		{"https://eu.pics.example.com:443/a.png?x=1#y", true, true},
		{"https://PICS.example.com.", true, true},
		{"https://cdn.example.org/a", true, true},
		{"https://other.example.com/a.png", false, true},
		{"https://evilpics.example.com.attacker.net/a", false, true},
		{"http://pics.example.com/a.png", false, false},
		{"file:///etc/passwd", false, false},
		{"ftp://pics.example.com/a", false, false},
		{"//pics.example.com/a", false, false},
		{"https://user@pics.example.com/a", false, false},
		{"https://pics.example.com@evil.net/a", false, false},
		{`https://evil.net\@pics.example.com/a`, false, false},
		{"https://pics.example.com:8443/a", false, false},
		{"https://pics.example.com/a b", false, false},
		{"https://pics.example.com/\r\nHost: x", false, false},
		{"https://127.0.0.1/a", false, false},
		{"https://2130706433/a", false, false},
		{"https://0x7f.1/a", false, false},
		{"https://0177.0.0.1/a", false, false},
		{"https://[::1]/a", false, false},
		{"https://169.254.169.254/latest/meta-data", false, false},
		{"https://localhost/a", false, false},
		{"https://metadata.google.internal/a", false, false},
		{"https://kubernetes.default.svc/a", false, false},
		{"https://redis/a", false, false},
		{"https://inside.example.net/a", false, false},
		{"https://mapped.example.net/a", false, false},
		{"https://gone.example.net/a", false, false},
		{"https://" + strings.Repeat("a.", 200) + "com/", false, false},
		{"https://pics.example.com/" + strings.Repeat("a", 9<<10), false, false},
	} {
		for name, c := range map[string]struct {
			m    *media
			want bool
		}{"none": {&none, false}, "some": {&some, tt.some}, "any": {&anywhere, tt.wide}} {
			if got := c.m.takes(t.Context(), tt.url); got != c.want {
				t.Errorf("%s: %.80q: got %v", name, tt.url, got)
			}
		}
	}
}

// Wherever a URL stands in a message it is found, however its text is escaped;
// text that only looks like one is none.
func TestMediaInMessages(t *testing.T) {
	for _, tt := range []struct {
		parts string
		taken bool
	}{
		{`{"type":"text","text":"see http://10.0.0.1/x, or \"image_url\": ok"}`, true},
		{`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA","detail":"auto"}}`, true},
		{`{"type":"image_url","image_url":{"url":"DATA:image/png;base64,AAAA"}}`, true},
		{`{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}},{"type":"text","text":"\u00e9"}`, true},
		{`{"type":"image_url","image_url":{"url":"https://pics.example.com/a"}}`, true},
		{`{"type":"image_url","image_url":{"url":"https://10.0.0.1/a"}}`, false},
		{`{"type":"image_url","image_url":{"url":"http://pics.example.com/a"}}`, false},
		{`{"type":"image_url","image_url":"http://10.0.0.1/a"}`, false},
		{`{"image_url":"http://10.0.0.1/a"}`, false},
		{`{"type":"video_url","video_url":{"url":"http:\/\/10.0.0.1\/a"}}`, false},
		{`{"type":"audio_url","audio_url":{"\u0075rl":"\u0068ttp://10.0.0.1/a"}}`, false},
		{`{"type":"image_url","\u0069mage_url":{"url":"http://10.0.0.1/a"}}`, false},
		{`{"type":"image_url","image_url":{"url":" file:///etc/passwd"}}`, false},
		{`{"type":"image_url","image_url":{"url":"//10.0.0.1/a"}}`, false},
		{`{"type":"file","file":{"file_url":"http://10.0.0.1/a"}}`, false},
		{`{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"http://10.0.0.1/a"}}`, false},
		{strings.TrimSuffix(strings.Repeat(`{"image_url":"https://pics.example.com/a"},`, maxMedia+1), ","), false},
	} {
		x := &exchange{server: &server{media: newMedia("pics.example.com")}, ctx: t.Context()}
		x.MaxDepth = openai.DefaultDepth
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":"x"},{"role":"user","content":[%s]}]}`, tt.parts)
		if e := x.req.Parse(openai.RouteChat, []byte(body), x.MaxDepth); e != nil {
			t.Fatal(e, tt.parts)
		}
		e := x.checkShape()
		if (e == nil) != tt.taken || e != nil && e.Code != "media_url_not_allowed" {
			t.Errorf("%.120s: got %v", tt.parts, e)
		}
	}
}
