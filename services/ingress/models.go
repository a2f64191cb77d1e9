package ingress

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// modelObject is OpenAI's model object with the members that vLLM adds.
type modelObject struct {
	ID          string  `json:"id"`
	Object      string  `json:"object"`
	Created     int64   `json:"created"`
	OwnedBy     string  `json:"owned_by"`
	Root        string  `json:"root"`
	Parent      *string `json:"parent"` // of a LoRA adapter
	MaxModelLen *int    `json:"max_model_len"`
	// Ready is a member of ours: whether a request would find somebody now. A model
	// that is not ready is listed, since it comes back.
	Ready bool `json:"ready"`
}

// models answers GET /v1/models and, with a name, GET /v1/models/{name}. Names
// may hold slashes.
func (v *server) models(w http.ResponseWriter, a *admission, name string) {
	if name != "" {
		m := a.named(name)
		if m == nil {
			writeError(w, openai.ModelNotFound(name))
			return
		}
		if speaksMessages(w) {
			v.modelPage(w, nil, m, nil)
			return
		}
		writeJSON(w, v.modelObject(m))
		return
	}
	if e, ok := w.(*edge); ok && e.anthropic {
		v.modelPage(w, e.r.URL.Query(), nil, a.offered())
		return
	}
	list := struct {
		Object string        `json:"object"`
		Data   []modelObject `json:"data"`
	}{"list", make([]modelObject, 0, len(a.offered()))}
	for _, m := range a.offered() {
		list.Data = append(list.Data, v.modelObject(m))
	}
	writeJSON(w, list)
}

func (v *server) modelObject(m *catalog.Model) modelObject {
	o := modelObject{ID: m.Name, Object: "model", Created: v.started, OwnedBy: "kinference", Root: m.Root, Ready: m.Ready}
	if o.Root == "" {
		o.Root = m.Name
	}
	if m.Adapter {
		o.Parent = &m.Root
	}
	if m.MaxModelLen > 0 {
		o.MaxModelLen = &m.MaxModelLen
	}
	return o
}

func writeJSON(w http.ResponseWriter, value any) {
	body, err := json.Marshal(value)
	if err != nil { // cannot be: the types above always marshal
		writeError(w, openai.Server(http.StatusInternalServerError, "", "The answer could not be made."))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body)
}
