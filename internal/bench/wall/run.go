package wall

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/kinference/kinference/internal/bench/load"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/bench/virtual"
	"github.com/kinference/kinference/internal/bench/workload"
	"github.com/kinference/kinference/internal/chat"
	"github.com/kinference/kinference/internal/fleetsim/model"
	"github.com/kinference/kinference/internal/schedule"
	"github.com/kinference/kinference/internal/tokens"
)

// Text turns workloads' tokens to text and back, exactly: all tokens are whole
// words of the simulated model's vocabulary.
type Text struct {
	Vocab     []uint32 // of the words
	tokenizer *tokens.Tokenizer
	// Tokens that the chat template adds: to a chat of one user message, for a
	// system message before it, and for each further turn.
	user, system, turn int
}

// NewText loads the simulated model and measures its template.
func NewText() (*Text, error) {
	dir, err := model.Dir()
	if err != nil {
		return nil, err
	}
	t := new(Text)
	if t.tokenizer, err = tokens.Load(dir); err != nil {
		return nil, err
	}
	template, err := chat.Load(dir)
	if err != nil {
		return nil, err
	}
	for _, w := range model.Words() {
		if ids := t.tokenizer.Encode(nil, " "+w, false); len(ids) == 1 {
			t.Vocab = append(t.Vocab, ids[0])
		}
	}
	if len(t.Vocab) < 100 {
		return nil, fmt.Errorf("the vocabulary has %d whole words", len(t.Vocab))
	}
	word := t.String(t.Vocab[:1])
	count := func(roles ...string) int {
		var messages []load.Message
		for _, r := range roles {
			messages = append(messages, load.Message{Role: r, Content: word})
		}
		data, e := json.Marshal(messages)
		if e != nil {
			panic(e) // strings always encode
		}
		text, e := template.Render(chat.Request{Messages: data, AddGenerationPrompt: true})
		if e != nil {
			err = e
		}
		return len(t.tokenizer.Encode(nil, text, false)) - len(roles)
	}
	t.user = count("user")
	t.system = count("system", "user") - t.user
	t.turn = count("user", "assistant", "user") - t.user
	return t, err
}

// String is the text of tokens.
func (t *Text) String(ids []uint32) string { return t.tokenizer.Decode(ids) }

// Scenario shortens a scenario's texts by what the template adds, so that the
// prompts that workers see have the scenario's lengths.
func (t *Text) Scenario(sc workload.Scenario) workload.Scenario {
	sc.FirstTokens -= t.user
	if sc.PrefixTokens > 0 {
		sc.FirstTokens -= t.system
	}
	sc.TurnTokens -= t.turn
	return sc
}

// added is how many tokens the template adds to a request's prompt.
func (t *Text) added(sc workload.Scenario, r *workload.Request) int {
	n := t.user + r.Turn*t.turn
	if sc.PrefixTokens > 0 {
		n += t.system
	}
	return n
}

// Messages is a request as a chat. The shared prefix is the system message.
func (t *Text) Messages(sc workload.Scenario, r *workload.Request) []load.Message {
	var out []load.Message
	for i, part := range r.Parts {
		role := "user"
		if i%2 == 1 {
			role = "assistant"
		}
		if i == 0 && sc.PrefixTokens > 0 {
			out = append(out, load.Message{Role: "system", Content: t.String(part[:sc.PrefixTokens])})
			part = part[sc.PrefixTokens:]
		}
		out = append(out, load.Message{Role: role, Content: t.String(part)})
	}
	return out
}

// Route chooses the server for a request that goes out on a client's n-th
// connection.
type Route func(connection int) (url string)

// Gateway sends everything to one address.
func Gateway(url string) Route { return func(int) string { return url } }

// ServicePerRequest is a Kubernetes Service in front of clients that open a
// connection per request: kube-proxy picks a worker at random for each.
func ServicePerRequest(urls []string, seed uint64) (Route, error) {
	return service("random", urls, seed)
}

// ServicePerConnection is a Kubernetes Service in front of clients that keep
// their connections: kube-proxy picks at random once per connection.
func ServicePerConnection(urls []string, seed uint64) (Route, error) {
	return service("connection", urls, seed)
}

// service lets the scheduler's policy draw, so that a run in virtual time with
// the same seed draws the same workers. No request passes through a router.
func service(policy string, urls []string, seed uint64) (Route, error) {
	s, err := schedule.New(schedule.Settings{Policy: policy, Seed: seed})
	if err != nil {
		return nil, err
	}
	candidates := make([]schedule.Candidate, len(urls))
	for i := range candidates {
		candidates[i].Worker = virtual.WorkerName(i)
	}
	return func(connection int) string {
		d := s.Decide(time.Now(), schedule.Request{Connection: virtual.ConnectionName(seed, connection)}, candidates)
		return urls[d.Order[0]]
	}, nil
}

// Run sends one scenario in closed loop and returns what the clients saw, in
// simulated seconds. Failed requests are samples too; the error is of a run
// that could not go on, or whose prompts had other lengths than planned.
func Run(ctx context.Context, text *Text, sc workload.Scenario, seed uint64, scale float64, route Route) (stats.Run, error) {
	return RunTenants(ctx, text, sc, seed, scale, route, nil)
}

// RunTenants is Run where path is what goes before the API's path for each
// tenant, 0 being those who make the load (see WriteTenants); nil: nothing.
func RunTenants(ctx context.Context, text *Text, sc workload.Scenario, seed uint64, scale float64, route Route, path func(tenant int) string) (stats.Run, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if path == nil {
		path = func(int) string { return "" }
	}
	r := &runner{text: text, sc: text.Scenario(sc), scale: scale, route: route, path: path, client: load.NewClient(), start: time.Now()}
	defer r.client.Close()
	gen := workload.New(r.sc, seed, text.Vocab)
	r.loop = gen.Loop()
	var wg sync.WaitGroup
	for stream := range r.sc.Streams {
		wg.Go(func() {
			if err := r.stream(ctx, stream); err != nil {
				cancel(err)
			}
		})
	}
	loaded, over := context.WithCancel(ctx)
	defer over()
	var light sync.WaitGroup
	light.Go(func() { r.light(loaded, ctx, gen.VictimRequests(), cancel) })
	wg.Wait()
	over()
	light.Wait()
	return r.out, context.Cause(ctx)
}

// maxLight bounds the light tenants' requests in flight: a host that cannot keep
// up must not drown in them.
const maxLight = 256

// light sends what the light tenants send, until the load is over; what is under
// way then is waited for. Of an error it tells fail, which ends loaded and ctx.
func (r *runner) light(loaded, ctx context.Context, arrivals *workload.Arrivals, fail func(error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxLight)
	for {
		at, req, ok := arrivals.Next()
		if !ok {
			return
		}
		wait := time.NewTimer(time.Duration(at/r.scale*float64(time.Second)) - time.Since(r.start))
		select {
		case <-wait.C:
		case <-loaded.Done():
			wait.Stop()
			return
		}
		select {
		case slots <- struct{}{}:
		case <-loaded.Done():
			return
		}
		url, connection := r.connect()
		r.mu.Lock()
		req.Measured = r.measured
		r.mu.Unlock()
		wg.Go(func() {
			defer func() { <-slots }()
			s, got, err := r.send(ctx, url, req)
			if err != nil {
				fail(err)
				return
			}
			r.done(-1, connection, s, got)
		})
	}
}

type runner struct {
	text   *Text
	sc     workload.Scenario
	scale  float64
	client *load.Client
	start  time.Time

	mu          sync.Mutex
	loop        *workload.Loop
	route       Route
	path        func(tenant int) string
	measured    bool   // past the warm-up
	connections []bool // in use
	out         stats.Run
}

// stream is one client: it sends its next request as soon as it has an answer.
func (r *runner) stream(ctx context.Context, stream int) error {
	first := time.NewTimer(time.Duration(r.loop.Start(stream) / r.scale * float64(time.Second)))
	defer first.Stop()
	select {
	case <-first.C:
	case <-ctx.Done():
		return nil
	}
	for ctx.Err() == nil {
		req, url, connection, ok := r.next(stream)
		if !ok {
			return nil
		}
		s, got, err := r.send(ctx, url, req)
		if err != nil || ctx.Err() != nil {
			return err
		}
		r.done(stream, connection, s, got)
	}
	return nil
}

// send sends a request and returns what its client saw. The error is of a prompt
// with another length than planned.
func (r *runner) send(ctx context.Context, url string, req *workload.Request) (stats.Sample, load.Response, error) {
	body := load.Chat(Model, r.text.Messages(r.sc, req), len(req.Output))
	sent := time.Since(r.start)
	got := r.client.Do(ctx, load.Request{URL: url + r.path(req.Tenant) + "/v1/chat/completions", Body: body, Text: r.sc.Turns > 1})
	s := stats.Sample{
		Index: req.Index, Turn: req.Turn, Tenant: req.Tenant, Measured: req.Measured, Worker: -1, Matched: -1, Possible: -1, Failed: got.Err != nil,
		Sent: sent.Seconds() * r.scale, TTFT: got.TTFT.Seconds() * r.scale, E2E: got.E2E.Seconds() * r.scale,
		Prompt: got.Prompt, Cached: got.Cached, Output: got.Output,
	}
	if want := len(req.Prompt) + r.text.added(r.sc, req); got.Err == nil && got.Prompt != want {
		return s, got, fmt.Errorf("the worker counts %d tokens in a prompt of %d", got.Prompt, want)
	}
	return s, got, nil
}

func (r *runner) next(stream int) (req *workload.Request, url string, connection int, ok bool) {
	r.mu.Lock()
	req, ok = r.loop.Next(stream)
	r.measured = r.measured || ok && req.Measured
	r.mu.Unlock()
	if !ok {
		return nil, "", 0, false
	}
	url, connection = r.connect()
	return req, url, connection, true
}

// connect takes the client's first idle connection, or a new one.
func (r *runner) connect() (url string, connection int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for connection < len(r.connections) && r.connections[connection] {
		connection++
	}
	if connection == len(r.connections) {
		r.connections = append(r.connections, false)
	}
	r.connections[connection] = true
	return r.route(connection), connection
}

func (r *runner) done(stream, connection int, s stats.Sample, got load.Response) {
	answer := r.text.tokenizer.Encode(nil, got.Text, false)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connections[connection] = false
	r.out.Samples = append(r.out.Samples, s)
	r.out.Failure(got.Err)
	if r.sc.Turns > 1 {
		r.loop.Answered(stream, answer)
	}
}
