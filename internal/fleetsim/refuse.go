package fleetsim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/vllm"
)

// maxBody bounds a request body. vLLM has no bound.
const maxBody = 64 << 20

// wording is how a version of vLLM refuses requests.
type wording vllm.Version

// modern is whether answers are those of 0.32, which the differential test in
// test/interop/vllm compares with.
func (v wording) modern() bool { return vllm.Version(v).AtLeast(vllm.V0_32) }

func fail(e vllm.Error) *vllm.Error { return &e }

// invalid is what the validation of the body complains about: the kind and
// message of a fault at loc, a member's path.
func (v wording) invalid(loc, kind, message string) *vllm.Error {
	if !v.modern() {
		return fail(vllm.InvalidBody(fmt.Sprintf("[{'type': '%s', 'loc': ('body', '%s'), 'msg': '%s'}]", kind, loc, message)))
	}
	at := "body"
	if loc != "" {
		at += "." + loc
	}
	e := vllm.InvalidBody(fmt.Sprintf("1 validation error:\n  {'type': '%s', 'loc': '%s', 'msg': '%s'}", kind, at, message))
	e.Param = &at
	return &e
}

// missing is the complaint about an absent member.
func (v wording) missing(member string) *vllm.Error {
	return v.invalid(member, "missing", "Field required")
}

// rule is a fault that vLLM's own checks of a body find, before the model or
// any tokens matter.
func (v wording) rule(param, message string) *vllm.Error {
	if !v.modern() {
		return fail(vllm.InvalidBody("Value error, " + message))
	}
	return v.value(param, message)
}

// value is a fault of a parameter's value. The value, if one is given, is told
// again, as is the parameter.
func (v wording) value(param, message string, value ...any) *vllm.Error {
	if v.modern() {
		message += " (parameter=" + param
		for _, x := range value {
			message += fmt.Sprintf(", value=%v", x)
		}
		message += ")"
	}
	return fail(vllm.BadRequest(param, message))
}

// body reads a JSON body into dst, with vLLM's answers to what is wrong with
// it.
func (v wording) body(w http.ResponseWriter, r *http.Request, dst any) *vllm.Error {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/json" {
		message := "Unsupported Media Type: Only 'application/json' is allowed"
		if v.modern() {
			message = "1 validation error:\n  " + message
		}
		return fail(vllm.InvalidBody(message))
	}
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		var large *http.MaxBytesError
		if errors.As(err, &large) {
			return fail(vllm.Error{Message: "Request body too large", Type: "Request Entity Too Large", Code: http.StatusRequestEntityTooLarge})
		}
		return fail(vllm.InvalidBody("There was an error parsing the body"))
	}
	switch data = bytes.TrimSpace(data); {
	case len(data) == 0, string(data) == "null":
		return v.missing("")
	}
	if err := json.Unmarshal(data, dst); err != nil {
		return v.mend(data, dst, err)
	}
	return nil
}

// mend tries again after err, with what vLLM's validation converts: numbers and
// truth values in texts, whole numbers that are written as fractions.
func (v wording) mend(data []byte, dst any, err error) *vllm.Error {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return v.invalid(strconv.FormatInt(syntax.Offset, 10), "json_invalid", "JSON decode error")
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(data, &members) != nil {
		return v.invalid("", "model_attributes_type", "Input should be a valid dictionary or object to extract fields from")
	}
	if salt, ok := members["cache_salt"]; ok && !bytes.HasPrefix(salt, []byte{'"'}) && string(salt) != "null" {
		return v.rule("cache_salt", emptySalt)
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		raw := string(members[name])
		if raw == "null" {
			continue
		}
		var ok bool
		kind := scalars[name]
		switch kind {
		case "integer":
			raw, ok = whole(raw)
		case "number":
			raw = strings.Trim(raw, `"`)
			_, err := strconv.ParseFloat(raw, 64)
			ok = err == nil
		case "boolean":
			raw, ok = truth(raw)
		case "string":
			ok = strings.HasPrefix(raw, `"`)
		default:
			continue
		}
		if !ok {
			return v.invalid(name, kind+"_type", "Input should be a valid "+kind)
		}
		members[name] = json.RawMessage(raw)
	}
	mended, err := json.Marshal(members)
	if err == nil {
		err = json.Unmarshal(mended, dst)
	}
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong):
		// The chat members are embedded: no member of the body has that name.
		return v.invalid(strings.TrimPrefix(wrong.Field, "chatFields."), wrong.Type.String()+"_type", "Input has the wrong type")
	case err != nil:
		return fail(vllm.InvalidBody("There was an error parsing the body"))
	}
	return nil
}

// scalars are the members of generation requests that hold no lists or objects.
var scalars = map[string]string{
	"model": "string", "request_id": "string", "reasoning_effort": "string", "user": "string", "chat_template": "string",
	"n": "integer", "max_tokens": "integer", "max_completion_tokens": "integer", "min_tokens": "integer", "seed": "integer", "priority": "integer",
	"temperature": "number", "top_p": "number",
	"stream": "boolean", "echo": "boolean", "ignore_eos": "boolean", "include_stop_str_in_output": "boolean", "return_token_ids": "boolean",
	"add_generation_prompt": "boolean", "continue_final_message": "boolean", "add_special_tokens": "boolean", "return_token_strs": "boolean",
}

// whole reads an integer as Python's validation does: 2, 2.0 and "2".
func whole(raw string) (string, bool) {
	f, err := strconv.ParseFloat(strings.Trim(raw, `"`), 64)
	if err != nil || f != float64(int64(f)) {
		return raw, false
	}
	return strconv.FormatInt(int64(f), 10), true
}

// truth reads a truth value likewise.
func truth(raw string) (string, bool) {
	switch strings.ToLower(strings.Trim(raw, `"`)) {
	case "true", "t", "yes", "y", "on", "1":
		return "true", true
	case "false", "f", "no", "n", "off", "0":
		return "false", true
	}
	return raw, false
}
