package ingress

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"
	"time"

	"github.com/kinference/kinference/internal/anthropic"
	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/internal/responses"
	"github.com/kinference/kinference/internal/rpc"
	"github.com/kinference/kinference/services/ingress/internal/meter"
)

// ServeHTTP answers all paths. There is no mux: it would redirect odd paths
// and answer unknown ones in its own form.
func (v *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// It holds for what the server reads after a refusal, too, so it is lifted
	// only when a whole body is here. Writers without deadlines are those of tests.
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Now().Add(v.BodyTimeout))
	if r.ProtoMajor < 2 { // the answer before on this connection may have left one
		_ = ctl.SetWriteDeadline(time.Time{})
	}
	client := v.newEdge(w, r)
	defer client.close()
	w = client
	a := v.admit(w, r)
	if a == nil {
		return
	}
	switch path := a.path; {
	case path == openai.RouteChat.Path():
		v.post(w, r, a, openai.RouteChat)
	case path == openai.RouteCompletions.Path():
		v.post(w, r, a, openai.RouteCompletions)
	case path == openai.RouteEmbeddings.Path():
		v.post(w, r, a, openai.RouteEmbeddings)
	case path == pathMessages || path == pathResponses:
		v.post(w, r, a, openai.RouteChat)
	case path == pathCount || path == pathTokenize:
		v.counts(w, r, a)
	case path == "/v1/models" || strings.HasPrefix(path, "/v1/models/"):
		w.Header().Set("X-Request-Id", v.requestID(r))
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			wrongMethod(w, "GET, HEAD")
			return
		}
		v.models(w, a, strings.TrimPrefix(strings.TrimPrefix(path, "/v1/models"), "/"))
	default:
		w.Header().Set("X-Request-Id", v.requestID(r))
		writeError(w, &openai.Error{Status: http.StatusNotFound, Type: openai.TypeInvalidRequest, Code: "unknown_url", Message: "There is nothing at this path."})
	}
}

func (v *server) post(w http.ResponseWriter, r *http.Request, a *admission, route openai.Route) {
	id := v.requestID(r)
	w.Header().Set("X-Request-Id", id)
	if r.Method != http.MethodPost {
		wrongMethod(w, "POST")
		return
	}
	// Until its last report is sent nobody else may use this id.
	if _, used := v.ids.LoadOrStore(id, nil); used {
		id = newID()
		w.Header().Set("X-Request-Id", id)
		v.ids.Store(id, nil)
	}
	x := &exchange{server: v, admission: a, w: w, r: r, id: id, unique: meter.NewID(), label: otherModel, place: new(rpc.Place)}
	x.req.Route = route
	switch a.path {
	case pathMessages:
		x.messages = &anthropic.Request{}
	case pathResponses:
		x.responses = &responses.Request{}
	}
	v.metrics.active.Add(v.ctx, 1)
	defer func() { // whatever happens, the router's ledger gets its end
		v.metrics.active.Add(v.ctx, -1)
		x.finishUsage()
		x.settle()
		if x.routed {
			x.compareCount()
			v.reports.Done(x.place, id, x.outcome(), x.reported(), func() { v.ids.Delete(id) })
		} else {
			v.ids.Delete(id)
		}
	}()
	x.serve()
	v.metrics.answered(v.ctx, x)
}

func wrongMethod(w http.ResponseWriter, allowed string) {
	w.Header().Set("Allow", allowed)
	writeError(w, &openai.Error{Status: http.StatusMethodNotAllowed, Type: openai.TypeInvalidRequest, Code: "method_not_allowed", Message: "This path takes " + allowed + " only."})
}

// requestID is the client's own id if it is a decent one, else a new one.
func (v *server) requestID(r *http.Request) string {
	id := r.Header.Get("X-Request-Id")
	if len(id) == 0 || len(id) > 128 {
		return newID()
	}
	for _, c := range []byte(id) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.' || c == ':') {
			return newID()
		}
	}
	return id
}

func newID() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	return "req-" + hex.EncodeToString(b[:])
}
