package prompt

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/openai"
	"github.com/kinference/kinference/services/ingress/internal/catalog"
)

// maxIDs bounds a worker's answer in bytes: a million tokens, or the images of
// a multi-modal prompt, which we then do without.
const maxIDs = 8 << 20

// maxFaults is how often in a row workers may fail to tell, or be too slow,
// until they are not asked for a while. One long prompt is not their fault.
const maxFaults = 3

// asker knows what the workers of one profile can be asked. What they lack, or
// failed to tell again and again, is tried again after a while.
type asker struct {
	mu     sync.Mutex
	next   int                // worker whose turn it is
	pause  map[Mode]time.Time // not before
	faults map[Mode]int       // in a row
}

// ask gets the token ids of r from a worker in one of some ways. The mode is
// Approximate when nobody could tell.
func (a *asker) ask(ctx context.Context, set *Settings, r *openai.Request, p *catalog.Profile, ways []Mode) ([]uint32, Mode) {
	for _, mode := range ways {
		a.mu.Lock()
		paused := time.Now().Before(a.pause[mode])
		worker := p.Workers[a.next%len(p.Workers)]
		a.next++
		a.mu.Unlock()
		if paused {
			continue
		}
		ids, status, err := query(ctx, set.Transport, mode, worker.URL, r, p)
		lacks := lacking(status)
		switch {
		case err == nil:
			a.told(mode)
			return ids, mode
		case status >= 400 && status < 500 && !lacks:
			// The request is at fault; the worker that gets it will say so.
			return nil, Approximate
		case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
			return nil, Approximate // the client left, which says nothing of the worker
		}
		if a.failed(mode, lacks, set.Retry) {
			set.Log.Info("worker does not tell token ids", "profile", p.ID, "mode", string(mode), "status", status, "err", err, "retry_in", set.Retry.String())
		}
		if ctx.Err() != nil {
			break // no time left to ask another way
		}
	}
	return nil, Approximate
}

func (a *asker) told(mode Mode) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.faults, mode)
}

// failed notes that a worker did not tell; it reports whether that makes us
// stop asking for a while.
func (a *asker) failed(mode Mode, lacks bool, retry time.Duration) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pause == nil {
		a.pause, a.faults = map[Mode]time.Time{}, map[Mode]int{}
	}
	if a.faults[mode]++; !lacks && a.faults[mode] < maxFaults {
		return false
	}
	delete(a.faults, mode)
	a.pause[mode] = time.Now().Add(retry)
	return true
}

// lacking tells from its status that a worker has no such route, or none for us:
// vLLM answers its render route 403 unless it runs with --enable-scale-out, and
// its key guards /v1 but not /tokenize.
func lacking(status int) bool {
	switch status {
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusUnauthorized, http.StatusForbidden:
		return true
	}
	return false
}

// query asks one worker. status is 0 when there was no answer.
func query(ctx context.Context, t http.RoundTripper, mode Mode, worker string, r *openai.Request, p *catalog.Profile) (ids []uint32, status int, err error) {
	path, body := r.Route.Path()+"/render", []byte(nil)
	model := openai.AppendString(nil, p.UpstreamModel)
	if mode == Tokenize {
		path = "/tokenize"
		body, err = tokenizeBody(r, model)
	} else {
		body, err = r.Body.Apply(nil, openai.Set(model, "model"), openai.Remove("kv_transfer_params"))
	}
	if err != nil {
		return nil, 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, worker+path, bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := t.RoundTrip(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxIDs+1))
	switch {
	case err != nil:
		return nil, resp.StatusCode, err
	case resp.StatusCode != http.StatusOK:
		return nil, resp.StatusCode, fmt.Errorf("status %d", resp.StatusCode)
	case len(answer) > maxIDs:
		return nil, resp.StatusCode, fmt.Errorf("answer over %d bytes", maxIDs)
	}
	ids, err = parseIDs(answer)
	return ids, resp.StatusCode, err
}

// tokenizeBody makes the body of /tokenize. It knows less than the chat
// endpoint: the reasoning effort goes in through the template's variables.
func tokenizeBody(r *openai.Request, model []byte) ([]byte, error) {
	var o openai.Object
	if err := o.Parse([]byte("{}"), 0); err != nil {
		return nil, err
	}
	if r.Route != openai.RouteChat {
		return o.Apply(nil, openai.Set(model, "model"), openai.Set(openai.AppendString(nil, r.Prompt), "prompt"), openai.Set(strconv.AppendBool(nil, r.AddSpecial), "add_special_tokens"))
	}
	changes := []openai.Change{
		openai.Set(model, "model"), openai.Set(r.Messages, "messages"), openai.Set(strconv.AppendBool(nil, r.AddSpecial), "add_special_tokens"),
		openai.Set(strconv.AppendBool(nil, r.AddGenerationPrompt), "add_generation_prompt"),
		openai.Set(strconv.AppendBool(nil, r.ContinueFinalMessage), "continue_final_message"),
	}
	if r.Tools != nil {
		changes = append(changes, openai.Set(r.Tools, "tools"))
	}
	if r.TemplateKwargs != nil {
		changes = append(changes, openai.Set(r.TemplateKwargs, "chat_template_kwargs"))
	}
	if r.ReasoningEffort != "" {
		changes = append(changes, openai.Set(openai.AppendString(nil, r.ReasoningEffort), "chat_template_kwargs", "reasoning_effort"))
	}
	return o.Apply(nil, changes...)
}

// parseIDs reads the answers of all three endpoints: {"tokens": […]},
// {"token_ids": […]} and a list of the latter, one for each prompt.
func parseIDs(answer []byte) ([]uint32, error) {
	type rendered struct {
		Tokens   []uint32 `json:"tokens"`
		TokenIDs []uint32 `json:"token_ids"`
	}
	var one rendered
	if trimmed := bytes.TrimLeft(answer, " \t\r\n"); len(trimmed) > 0 && trimmed[0] == '[' {
		var list []rendered
		if err := json.Unmarshal(answer, &list); err != nil {
			return nil, err
		}
		if len(list) > 0 {
			one = list[0]
		}
	} else if err := json.Unmarshal(answer, &one); err != nil {
		return nil, err
	}
	switch {
	case one.TokenIDs != nil:
		return one.TokenIDs, nil
	case one.Tokens != nil:
		return one.Tokens, nil
	}
	return nil, fmt.Errorf("answer without token ids")
}
