package resources

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

// Defaults that are not in the schemas, or hold without a Kubernetes API.
const (
	defaultPort          = 8000
	defaultEventsPort    = 5557
	defaultReplayPort    = 5558
	defaultMetrics       = "/metrics"
	defaultInterval      = 250 * time.Millisecond
	defaultFirstByte     = 20 * time.Second
	defaultIdle          = 60 * time.Second
	defaultProviderTotal = 10 * time.Minute
	defaultGatewayTotal  = 30 * time.Minute
	defaultBody          = 4 << 20
	defaultHeaders       = 64 << 10

	// maxUID bounds namespace.set.endpoint, as on the bus.
	maxUID = 253
	podUID = 36
)

// checkWorkerSet checks what the schema cannot say.
func (c *compiler) checkWorkerSet(o *object, s *v1alpha1.InferenceWorkerSetSpec) {
	checkModels(o, s.Models)
	if s.Selector != nil {
		c.checkSelector(o)
	}
	checkEndpoints(o, s)
	if t := s.Tokenizer; t != nil {
		if fault := tokenizerFault(t.Path); fault != "" {
			o.problem(severity(c.Elsewhere && !c.Strict), "spec.tokenizer.path", fmt.Sprintf("%q %s", abbreviate(t.Path), fault))
		}
	}
	if e := s.KVEvents; e != nil {
		published := func(w v1alpha1.WorkerEndpoint) bool { return w.KVEvents != "" }
		switch {
		case e.Port != 0 || s.Selector != nil:
			o.rankPorts("spec.kvEvents.replayPort", cmp.Or(e.Port, defaultEventsPort), cmp.Or(e.ReplayPort, defaultReplayPort), s)
		case !slices.ContainsFunc(s.Endpoints, published):
			o.warnf("spec.kvEvents", "has no effect: no endpoint has a kvEvents address, and no port is given for all of them")
		}
	}
}

// checkSelector is for everything whose workers are Pods.
func (c *compiler) checkSelector(o *object) {
	if n := len(o.GetNamespace()) + len(o.GetName()) + podUID + 2; n > maxUID {
		o.errorf("metadata.name", "is too long: with namespace and uid of a Pod it has %d bytes, more than %d", n, maxUID)
	}
	if c.Pods == nil {
		o.warnf("spec.selector", "needs the Kubernetes source: read from a folder, it selects no workers")
	}
}

// uniqueNames finds names that are given twice over several lists.
type uniqueNames struct {
	o    *object
	seen map[string]string
}

func (u uniqueNames) add(at string, name v1alpha1.ModelName, aliases []v1alpha1.ModelName) {
	one := func(field string, name v1alpha1.ModelName) {
		if where := u.seen[string(name)]; where != "" {
			u.o.errorf(field, "%q is a name in this resource already, as %s", abbreviate(name), where)
			return
		}
		u.seen[string(name)] = field
	}
	one(at+".name", name)
	for i, a := range aliases {
		one(index(at+".aliases", i), a)
	}
}

func checkModels(o *object, models []v1alpha1.WorkerModel) {
	names := uniqueNames{o, map[string]string{}}
	for i, m := range models {
		at := index("spec.models", i)
		names.add(at, m.Name, m.Aliases)
		for j, l := range m.LoRAs {
			names.add(index(at+".loras", j), l.Name, l.Aliases)
		}
	}
}

func checkEndpoints(o *object, s *v1alpha1.InferenceWorkerSetSpec) {
	urls := map[string]v1alpha1.EntryName{}
	for i, e := range s.Endpoints {
		at := index("spec.endpoints", i)
		if u, err := baseURL(e.Address, s.Port); err != nil {
			o.errorf(at+".address", "%q is not host:port or an http(s) URL: %v", redact(e.Address), err)
		} else if other, dup := urls[u]; dup {
			o.errorf(at+".address", "%q is the address of %q too: its load would count twice", e.Address, other)
		} else {
			urls[u] = e.Name
		}
		if n := len(o.GetNamespace()) + len(o.GetName()) + len(e.Name) + 2; n > maxUID {
			o.errorf(at+".name", "is too long: with namespace and name of the set it has %d bytes, more than %d", n, maxUID)
		}
		events, ok := o.zmq(at+".kvEvents", e.KVEvents)
		replay, too := o.zmq(at+".kvReplay", e.KVReplay)
		if ok && too && events.host != replay.host {
			replay.port = 0 // each has all ports for itself
		}
		if ok {
			o.rankPorts(at+".kvReplay", events.port, replay.port, s)
		}
	}
}

// tokenizerFault says what is wrong with a tokenizer's folder, so that a typing
// error shows at load and not as a gateway without cache hits.
func tokenizerFault(path string) string {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return fmt.Sprintf("cannot be read here: %v", cause(err))
	case !info.IsDir():
		return "is not a folder"
	}
	if _, err := os.Stat(filepath.Join(path, "tokenizer.json")); err != nil {
		return "has no tokenizer.json"
	}
	return ""
}

// socket is a ZMQ address of rank 0.
type socket struct {
	host string
	port int32
}

// zmq checks an address; ok is false where there is none, or a wrong one.
func (o *object) zmq(field string, address v1alpha1.SocketAddress) (s socket, ok bool) {
	if address == "" {
		return s, false
	}
	rest := strings.TrimPrefix(string(address), "tcp://")
	if err := hostPort(rest); err != nil {
		o.errorf(field, "%q: %v", abbreviate(address), err)
		return s, false
	}
	host, port, _ := net.SplitHostPort(rest)
	n, _ := strconv.Atoi(port)
	return socket{host, int32(n)}, true
}

// rankPorts checks that the sockets of every rank have ports of their own: rank
// r is at port + r. replay is 0 for none.
func (o *object) rankPorts(field string, events, replay int32, s *v1alpha1.InferenceWorkerSetSpec) {
	ranks := ranksOf(s)
	switch {
	case max(events, replay)+ranks-1 > 65535:
		o.errorf(field, "there are no ports for %d ranks from %d on", ranks, max(events, replay))
	case replay > 0 && max(events-replay, replay-events) < ranks:
		o.errorf(field, "the ports of %d ranks from %d and %d on overlap: rank r is at port + r", ranks, events, replay)
	}
}

func ranksOf(s *v1alpha1.InferenceWorkerSetSpec) int32 {
	if s.DataParallel == nil {
		return 1
	}
	return max(1, s.DataParallel.Ranks)
}

func (c *compiler) compileSet(o *object) *WorkerSet {
	spec := &o.Object.(*v1alpha1.InferenceWorkerSet).Spec
	return c.compileWorkers(o.id(), o.GetLabels(), spec, spec.Port)
}

// compileWorkers makes a worker set with the name id. Behind each of the ports of
// a Pod is a worker.
func (c *compiler) compileWorkers(id string, labels map[string]string, spec *v1alpha1.InferenceWorkerSetSpec, ports ...int32) *WorkerSet {
	s := &WorkerSet{
		Name: id, Labels: labels, Ranks: int(ranksOf(spec)), Accelerators: 1, MaxBatchedTokens: int(spec.MaxBatchedTokens),
		MetricsPath: defaultMetrics, MetricsInterval: defaultInterval,
	}
	if a := spec.Accelerator; a != nil {
		s.Class, s.Accelerators = strings.ToLower(a.Class), max(1, int(a.Count))
		s.HourlyPrice, s.Currency = a.HourlyPrice, a.Currency
	}
	if t := spec.Tokenizer; t != nil {
		s.TokenizerPath, s.PassTokenIDs = t.Path, t.PassTokenIDs
	}
	if m := spec.Metrics; m != nil {
		s.MetricsPath = cmp.Or(m.Path, s.MetricsPath)
		s.MetricsInterval = m.Interval.Or(s.MetricsInterval)
	}
	if e := spec.KVEvents; e != nil {
		s.KVTopic, s.RemovalsLastCopy = e.Topic, e.Removals == v1alpha1.RemovalsLastCopy
	}
	namespace, name, _ := strings.Cut(id, "/")
	prefix := namespace + "." + name + "."
	for _, e := range spec.Endpoints {
		s.Workers = append(s.Workers, compileEndpoint(prefix, e, spec))
	}
	if spec.Selector != nil {
		s.Selector = map[string]string{}
		for k, v := range spec.Selector.MatchLabels {
			s.Selector[k] = string(v)
		}
		if c.Pods != nil {
			for _, pod := range c.Pods(namespace, s.Selector) {
				s.Workers = append(s.Workers, compilePod(prefix, pod, spec, ports)...)
			}
		}
	}
	for i := range s.Workers {
		w := &s.Workers[i]
		for rank := range s.Ranks {
			w.Ranks = append(w.Ranks, w.UID+"/"+strconv.Itoa(rank))
		}
	}
	models := spec.Models
	if models == nil && c.Served != nil {
		models = c.servedBy(s.Workers)
	}
	for _, m := range models {
		profile := func(names []string, lora string) {
			s.Profiles = append(s.Profiles, &Profile{
				ID: s.Name + "/" + names[0], Set: s, UpstreamModel: names[0], Root: string(m.Name), LoRA: lora,
				Names: names, MaxModelLen: int(m.MaxModelLen),
			})
		}
		profile(allNames(m.Name, m.Aliases), "")
		for _, l := range m.LoRAs {
			profile(allNames(l.Name, l.Aliases), string(l.Name))
		}
	}
	return s
}

func compileEndpoint(prefix string, e v1alpha1.WorkerEndpoint, spec *v1alpha1.InferenceWorkerSetSpec) Worker {
	w := Worker{
		UID: prefix + string(e.Name), Name: string(e.Name),
		KVEvents: string(e.KVEvents), KVReplay: string(e.KVReplay),
	}
	w.URL, _ = baseURL(e.Address, spec.Port) // checked before
	// Only a port that is written says that every endpoint publishes there.
	if k := spec.KVEvents; k != nil && k.Port != 0 && w.KVEvents == "" {
		if u, err := url.Parse(w.URL); err == nil {
			w.sockets(u.Hostname(), k)
		}
	}
	return w
}

func compilePod(prefix string, pod Pod, spec *v1alpha1.InferenceWorkerSetSpec, ports []int32) []Worker {
	var out []Worker
	for _, port := range ports {
		port = cmp.Or(port, defaultPort)
		w := Worker{
			UID: prefix + pod.UID, Name: pod.Name, Labels: pod.Labels, NotReady: pod.NotReady,
			URL: "http://" + net.JoinHostPort(pod.Address, strconv.Itoa(int(port))),
		}
		if len(ports) > 1 {
			w.UID += "-" + strconv.Itoa(int(port))
		}
		if spec.KVEvents != nil {
			w.sockets(pod.Address, spec.KVEvents)
		}
		out = append(out, w)
	}
	return out
}

func (w *Worker) sockets(host string, k *v1alpha1.KVEvents) {
	at := func(port int32) string { return "tcp://" + net.JoinHostPort(host, strconv.Itoa(int(port))) }
	w.KVEvents, w.KVReplay = at(cmp.Or(k.Port, defaultEventsPort)), at(cmp.Or(k.ReplayPort, defaultReplayPort))
}

func hostPort(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return errors.New("want host:port")
	}
	if host == "" || strings.ContainsAny(host, "/ *@") {
		return errors.New("host is missing or malformed")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("port %q is not between 1 and 65535", abbreviate(port))
	}
	return nil
}

// baseURL turns an endpoint's address into the base URL of its HTTP server.
func baseURL(address string, port int32) (string, error) {
	if !strings.Contains(address, "://") {
		if _, _, err := net.SplitHostPort(address); err != nil {
			address = net.JoinHostPort(strings.Trim(address, "[]"), strconv.Itoa(int(cmp.Or(port, defaultPort))))
		}
		if err := hostPort(address); err != nil {
			return "", err
		}
		return "http://" + address, nil
	}
	u, err := url.Parse(address)
	switch {
	case err != nil:
		return "", errors.New("malformed URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("scheme %q", u.Scheme)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", errors.New("user, query and fragment are not allowed")
	case u.Hostname() == "":
		return "", errors.New("host is missing")
	}
	if u.Port() != "" {
		if err := hostPort(u.Host); err != nil {
			return "", err
		}
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}
