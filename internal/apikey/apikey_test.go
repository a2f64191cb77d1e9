package apikey_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kinference/kinference/internal/apikey"
)

func TestNew(t *testing.T) {
	key, id := apikey.New()
	got, ok := apikey.Parse(key)
	if !ok || got != id || len(key) != apikey.Len || !strings.HasPrefix(key, "kin_"+id+"_") {
		t.Errorf("Parse(%q) = %q, %v; want id %q", key, got, ok, id)
	}
	if other, otherID := apikey.New(); other == key || otherID == id {
		t.Error("two keys are the same")
	}
}

// A key with any byte changed, cut or added is known to be none by itself.
func TestParseRefuses(t *testing.T) {
	key, _ := apikey.New()
	for i := range len(key) {
		for _, c := range []byte{'0', 'z', '_', ' ', 0, 0xff} {
			if key[i] == c {
				continue
			}
			if bad := key[:i] + string([]byte{c}) + key[i+1:]; parses(bad) {
				t.Errorf("byte %d changed to %q: still a key", i, c)
			}
		}
		if parses(key[:i]) {
			t.Errorf("the first %d bytes are a key", i)
		}
	}
	if parses(key+"0") || parses(" "+key) || parses("") {
		t.Error("a longer text is a key")
	}
}

func parses(key string) bool { _, ok := apikey.Parse(key); return ok }

func TestRecord(t *testing.T) {
	key, id := apikey.New()
	at := time.Date(2027, 1, 31, 12, 0, 0, 0, time.UTC)
	want := apikey.Record{ID: id, SHA256: apikey.Hash(key), User: "alice", Description: "laptop", Created: at, Expires: at.Add(time.Hour), Revoked: at.Add(time.Minute)}
	got, err := apikey.Decode(id, want.Encode())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("record (-want +got):\n%s", diff)
	}
	plain := apikey.Record{ID: id, SHA256: apikey.Hash(key)}
	if got, err := apikey.Decode(id, plain.Encode()); err != nil || got != plain {
		t.Errorf("Decode = %+v, %v", got, err)
	}
}

func TestDecodeRefuses(t *testing.T) {
	key, id := apikey.New()
	sum := `"sha256":"` + strings.Repeat("ab", 32) + `"`
	for name, c := range map[string]struct{ id, text string }{
		"the key itself":  {id, key},
		"as JSON":         {id, `{"sha256":"` + key + `"}`},
		"no hash":         {id, `{}`},
		"short hash":      {id, `{"sha256":"abcd"}`},
		"other member":    {id, `{` + sum + `,"key":"` + key + `"}`},
		"two values":      {id, `{` + sum + `}{}`},
		"id with a slash": {"a/b", `{` + sum + `}`},
		"control":         {id, `{` + sum + `,"user":"a\nb"}`},
		"long":            {id, `{` + sum + `,"user":"` + strings.Repeat("u", 300) + `"}`},
		"longer":          {id, `{` + sum + `,"user":"` + strings.Repeat("u", 5000) + `"}`},
	} {
		_, err := apikey.Decode(c.id, []byte(c.text))
		if err == nil {
			t.Errorf("%s: no error", name)
		} else if strings.Contains(err.Error(), key) {
			t.Errorf("%s: the error shows the key", name)
		}
	}
}

func FuzzParse(f *testing.F) {
	key, _ := apikey.New()
	f.Add(key)
	f.Add(key[:len(key)-1] + "x")
	f.Add("kin__" + strings.Repeat("_", 70))
	f.Fuzz(func(t *testing.T, text string) {
		id, ok := apikey.Parse(text)
		if ok != (id != "") {
			t.Fatalf("Parse = %q, %v", id, ok)
		}
		if ok && (!apikey.ValidID(id) || len(text) != apikey.Len || !strings.HasPrefix(text, apikey.Prefix+id+"_")) {
			t.Fatalf("%q is a key", text)
		}
	})
}

func FuzzDecode(f *testing.F) {
	key, id := apikey.New()
	r := apikey.Record{ID: id, SHA256: apikey.Hash(key), User: "alice", Expires: time.Unix(2e9, 0)}
	f.Add(r.Encode())
	f.Add([]byte(`{"sha256":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := apikey.Decode(id, data)
		if err != nil {
			return
		}
		if again, err := apikey.Decode(id, r.Encode()); err != nil || !again.Expires.Equal(r.Expires.Truncate(time.Second)) || again.SHA256 != r.SHA256 || again.User != r.User {
			t.Fatalf("%+v, then %+v (%v)", r, again, err)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	key, _ := apikey.New()
	b.ReportAllocs()
	for b.Loop() {
		apikey.Parse(key)
	}
}
