package resources

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinference/kinference/api/v1alpha1"
)

var (
	label     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	decimal   = regexp.MustCompile(`^[0-9]{1,12}(\.[0-9]{1,9})?$`)
	currency  = regexp.MustCompile(`^[A-Z]{3}$`)
)

// Bounds of the lists, as the CRD schema will have them.
const (
	maxEndpoints    = 4096
	maxModels       = 256
	maxNames        = 256
	maxDestinations = 256
	maxName         = 256
	maxRanks        = 256
	maxUID          = 253 // namespace.set.endpoint, as on the bus
)

// checker collects whether an object has errors.
type checker struct {
	*object
	bad bool
}

func (c *checker) errorf(field, format string, args ...any) {
	c.bad = true
	c.object.errorf(field, format, args...)
}

// validate checks one object by itself, that is without its references, and
// returns whether it has no errors.
func (o *object) validate() bool {
	c := &checker{object: o}
	switch {
	case o.name == "":
		c.errorf("metadata.name", "is required")
	case len(o.name) > 253 || !subdomain.MatchString(o.name):
		c.errorf("metadata.name", "%q is not a name: lower-case letters, digits, dashes and dots", abbreviate(o.name))
	}
	if !label.MatchString(o.namespace) {
		c.errorf("metadata.namespace", "%q is not a namespace: lower-case letters, digits and dashes", abbreviate(o.namespace))
	}
	if o.set != nil {
		c.workerSet(&o.set.Spec)
	} else {
		c.pool(&o.pool.Spec)
	}
	return !c.bad
}

func (c *checker) workerSet(s *v1alpha1.InferenceWorkerSetSpec) {
	switch {
	case s.Selector == nil && len(s.Endpoints) == 0:
		c.errorf("spec", "one of selector and endpoints is required")
	case s.Selector != nil && len(s.Endpoints) > 0:
		c.errorf("spec.selector", "cannot be given together with endpoints")
	case s.Selector != nil:
		c.warnf("spec.selector", "needs the Kubernetes source: a set read from a folder has no workers unless it lists endpoints")
	}
	c.port("spec.port", s.Port)
	if s.DataParallel != nil {
		c.upTo("spec.dataParallel.ranks", s.DataParallel.Ranks, maxRanks)
	}
	c.endpoints(s)
	c.models(s.Models)
	if t := s.Tokenizer; t != nil {
		c.tokenizer(t.Path)
	}
	if e := s.KVEvents; e != nil {
		c.port("spec.kvEvents.port", e.Port)
		c.port("spec.kvEvents.replayPort", e.ReplayPort)
		if e.Removals != "" {
			c.oneOf("spec.kvEvents.removals", string(e.Removals), string(v1alpha1.RemovalsPerCopy), string(v1alpha1.RemovalsLastCopy))
		}
		published := func(w v1alpha1.WorkerEndpoint) bool { return w.KVEvents != "" }
		switch {
		case e.Port != 0 || s.Selector != nil:
			c.rankPorts("spec.kvEvents.replayPort", cmp.Or(e.Port, defaultEventsPort), cmp.Or(e.ReplayPort, defaultReplayPort), s)
		case !slices.ContainsFunc(s.Endpoints, published):
			c.warnf("spec.kvEvents", "has no effect: no endpoint has a kvEvents address, and no port is given for all of them")
		}
	}
	if m := s.Metrics; m != nil {
		if m.Path != "" && !strings.HasPrefix(m.Path, "/") {
			c.errorf("spec.metrics.path", "%q does not begin with /", abbreviate(m.Path))
		}
		// A sample counts for two seconds: with rarer ones workers would seem to come and go.
		c.duration("spec.metrics.interval", m.Interval, 50*time.Millisecond, time.Second)
	}
	if a := s.Accelerator; a != nil {
		c.upTo("spec.accelerator.count", a.Count, 1024)
		if a.HourlyPrice != "" && !decimal.MatchString(string(a.HourlyPrice)) {
			c.errorf("spec.accelerator.hourlyPrice", "%q is not a decimal number", abbreviate(a.HourlyPrice))
		}
		if a.Currency != "" && !currency.MatchString(string(a.Currency)) {
			c.errorf("spec.accelerator.currency", "%q is not a currency code such as USD", abbreviate(a.Currency))
		}
		if a.HourlyPrice != "" && a.Currency == "" {
			c.errorf("spec.accelerator.currency", "is required beside hourlyPrice")
		}
	}
}

func (c *checker) endpoints(s *v1alpha1.InferenceWorkerSetSpec) {
	c.atMost("spec.endpoints", len(s.Endpoints), maxEndpoints)
	names, urls := map[string]bool{}, map[string]string{}
	for i, e := range s.Endpoints {
		at := fmt.Sprintf("spec.endpoints[%d]", i)
		switch {
		case e.Name == "":
			c.errorf(at+".name", "is required")
		case !label.MatchString(string(e.Name)):
			c.errorf(at+".name", "%q is not a name: lower-case letters, digits and dashes", abbreviate(e.Name))
		case names[string(e.Name)]:
			c.errorf(at+".name", "%q is given twice", e.Name)
		}
		names[string(e.Name)] = true
		if e.Address == "" {
			c.errorf(at+".address", "is required")
		} else if u, err := baseURL(e.Address, s.Port); err != nil {
			c.errorf(at+".address", "%q is not host:port or an http(s) URL: %v", redact(e.Address), err)
		} else if other, dup := urls[u]; dup {
			c.errorf(at+".address", "%q is the address of %q too: its load would count twice", e.Address, other)
		} else {
			urls[u] = string(e.Name)
		}
		if n := len(c.namespace) + len(c.name) + len(e.Name) + 2; n > maxUID {
			c.errorf(at+".name", "is too long: with namespace and name of the set it has %d bytes, more than %d", n, maxUID)
		}
		events, ok := c.zmq(at+".kvEvents", string(e.KVEvents))
		replay, too := c.zmq(at+".kvReplay", string(e.KVReplay))
		if ok && too && events.host != replay.host {
			replay.port = 0 // each has all ports for itself
		}
		if ok {
			c.rankPorts(at+".kvReplay", events.port, replay.port, s)
		}
		if e.KVReplay != "" && e.KVEvents == "" {
			c.errorf(at+".kvReplay", "is of no use without kvEvents")
		}
	}
}

func (c *checker) models(models []v1alpha1.WorkerModel) {
	if len(models) == 0 {
		c.errorf("spec.models", "is required: at least one model")
	}
	c.atMost("spec.models", len(models), maxModels)
	seen := map[string]string{}
	name := func(field, value string) {
		switch {
		case value == "":
			c.errorf(field, "is required")
		case len(value) > maxName || strings.TrimSpace(value) != value || strings.ContainsFunc(value, func(r rune) bool { return r < ' ' }):
			c.errorf(field, "%q is not a model name", abbreviate(value))
		case seen[value] != "":
			c.errorf(field, "%q is a name in this set already, as %s", value, seen[value])
		default:
			seen[value] = field
		}
	}
	for i, m := range models {
		at := fmt.Sprintf("spec.models[%d]", i)
		name(at+".name", string(m.Name))
		if m.MaxModelLen < 0 {
			c.errorf(at+".maxModelLen", "is negative")
		}
		c.atMost(at+".aliases", len(m.Aliases), maxNames)
		for j, a := range m.Aliases {
			name(fmt.Sprintf("%s.aliases[%d]", at, j), string(a))
		}
		c.atMost(at+".loras", len(m.LoRAs), maxNames)
		for j, l := range m.LoRAs {
			in := fmt.Sprintf("%s.loras[%d]", at, j)
			name(in+".name", string(l.Name))
			c.atMost(in+".aliases", len(l.Aliases), maxNames)
			for k, a := range l.Aliases {
				name(fmt.Sprintf("%s.aliases[%d]", in, k), string(a))
			}
		}
	}
}

// tokenizer checks that the folder exists, so that a typing error shows at
// load and not as a gateway without cache hits.
func (c *checker) tokenizer(path string) {
	const field = "spec.tokenizer.path"
	if path == "" {
		c.errorf(field, "is required")
		return
	}
	info, err := os.Stat(path)
	switch {
	case err != nil:
		c.errorf(field, "%q: %v", abbreviate(path), cause(err))
	case !info.IsDir():
		c.errorf(field, "%q is not a folder", abbreviate(path))
	default:
		if _, err := os.Stat(filepath.Join(path, "tokenizer.json")); err != nil {
			c.errorf(field, "%q has no tokenizer.json", abbreviate(path))
		}
	}
}

func (c *checker) pool(s *v1alpha1.InferencePoolSpec) {
	switch {
	case s.Selector == nil && len(s.Destinations) == 0:
		c.errorf("spec", "one of destinations and selector is required")
	case s.Selector != nil && len(s.Destinations) > 0:
		c.errorf("spec.selector", "cannot be given together with destinations")
	case s.Selector != nil:
		c.warnf("spec.selector", "needs the Kubernetes source: the pool has no workers")
	}
	c.atMost("spec.destinations", len(s.Destinations), maxDestinations)
	seen := map[string]bool{}
	for i, d := range s.Destinations {
		at := fmt.Sprintf("spec.destinations[%d]", i)
		if d.Name == "" {
			c.errorf(at+".name", "is required")
		}
		id := groupOf(d) + " " + d.Kind + " " + string(d.Name)
		switch groupOf(d) + " " + d.Kind {
		case v1alpha1.Group + " " + v1alpha1.KindInferenceWorkerSet, v1alpha1.Group + " InferenceProvider", gaieGroup + " InferencePool":
			if seen[id] {
				c.errorf(at, "%s %q is given twice", d.Kind, d.Name)
			}
		default:
			c.errorf(at+".kind", "unknown kind %q of group %s: want InferenceWorkerSet, InferenceProvider or, of group %s, InferencePool",
				abbreviate(d.Kind), abbreviate(groupOf(d)), gaieGroup)
		}
		seen[id] = true
		if d.Weight != nil {
			c.upTo(at+".weight", *d.Weight, 1_000_000)
			c.warnf(at+".weight", "weights are not supported yet: the predicted time to first token decides")
		}
	}
	c.objectives(s.Objectives)
}

// gaieGroup is the group of the Gateway API inference extension.
const gaieGroup = "inference.networking.k8s.io"

func groupOf(d v1alpha1.Destination) string {
	if d.Group == "" {
		return v1alpha1.Group
	}
	return d.Group
}

func (c *checker) objectives(list []v1alpha1.Objective) {
	c.atMost("spec.objectives", len(list), 64)
	seen := map[string]bool{}
	for i, o := range list {
		at := fmt.Sprintf("spec.objectives[%d]", i)
		if o.Name == "" {
			c.errorf(at+".name", "is required")
		} else if seen[string(o.Name)] {
			c.errorf(at+".name", "%q is given twice", abbreviate(o.Name))
		}
		seen[string(o.Name)] = true
		c.oneOf(at+".indicator", string(o.Indicator), string(v1alpha1.IndicatorTTFT), string(v1alpha1.IndicatorITL),
			string(v1alpha1.IndicatorTPOT), string(v1alpha1.IndicatorEndToEnd), string(v1alpha1.IndicatorAvailability))
		if o.Indicator != v1alpha1.IndicatorAvailability && o.Threshold == "" {
			c.errorf(at+".threshold", "is required")
		}
		c.duration(at+".threshold", o.Threshold, time.Millisecond, 24*time.Hour)
		if o.Window == "" {
			c.errorf(at+".window", "is required")
		}
		if _, err := o.Window.Parse(); err != nil && o.Window != "" {
			c.errorf(at+".window", "%v", err)
		}
		if v, err := strconv.ParseFloat(o.Target, 64); !decimal.MatchString(string(o.Target)) || err != nil || v <= 0 || v > 100 {
			c.errorf(at+".target", "%q is not a percentage above 0 and up to 100", abbreviate(o.Target))
		}
	}
	if len(list) > 0 {
		c.warnf("spec.objectives", "objectives are not evaluated yet")
	}
}

func (c *checker) port(field string, v int32) { c.upTo(field, v, 65535) }

func (c *checker) upTo(field string, v, most int32) {
	if v < 0 || v > most {
		c.errorf(field, "%d is not between 0 and %d", v, most)
	}
}

func (c *checker) atMost(field string, n, most int) {
	if n > most {
		c.errorf(field, "has %d entries, more than %d", n, most)
	}
}

func (c *checker) oneOf(field, v string, allowed ...string) {
	if !slices.Contains(allowed, v) {
		c.errorf(field, "%q is not one of %s", abbreviate(v), strings.Join(allowed, ", "))
	}
}

func (c *checker) duration(field string, d v1alpha1.Duration, lo, hi time.Duration) {
	if d == "" {
		return
	}
	if v, err := d.Parse(); err != nil {
		c.errorf(field, "%v", err)
	} else if v < lo || v > hi {
		c.errorf(field, "%s is not between %v and %v", d, lo, hi)
	}
}

// socket is a ZMQ address of rank 0.
type socket struct {
	host string
	port int32
}

// zmq checks an address; ok is false where there is none, or a wrong one.
func (c *checker) zmq(field, address string) (s socket, ok bool) {
	if address == "" {
		return s, false
	}
	rest, ok := strings.CutPrefix(address, "tcp://")
	if !ok {
		c.errorf(field, "%q is not an address such as tcp://host:5557", abbreviate(address))
		return s, false
	}
	if err := hostPort(rest); err != nil {
		c.errorf(field, "%q: %v", abbreviate(address), err)
		return s, false
	}
	host, port, _ := net.SplitHostPort(rest)
	n, _ := strconv.Atoi(port)
	return socket{host, int32(n)}, true
}

// rankPorts checks that the sockets of every rank have ports of their own: rank
// r is at port + r. replay is 0 for none.
func (c *checker) rankPorts(field string, events, replay int32, s *v1alpha1.InferenceWorkerSetSpec) {
	if s.DataParallel == nil || s.DataParallel.Ranks < 2 || s.DataParallel.Ranks > maxRanks {
		return
	}
	ranks := s.DataParallel.Ranks
	switch {
	case max(events, replay)+ranks-1 > 65535:
		c.errorf(field, "there are no ports for %d ranks from %d on", ranks, max(events, replay))
	case replay > 0 && max(events-replay, replay-events) < ranks:
		c.errorf(field, "the ports of %d ranks from %d and %d on overlap: rank r is at port + r", ranks, events, replay)
	}
}

// redact hides what stands before an @: it may be a password.
func redact(address string) string {
	if i := strings.LastIndex(address, "@"); i >= 0 {
		address = "..." + address[i:]
	}
	return abbreviate(address)
}

func hostPort(s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return fmt.Errorf("want host:port")
	}
	if host == "" || strings.ContainsAny(host, "/ *@") {
		return fmt.Errorf("host is missing or malformed")
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return fmt.Errorf("port %q is not between 1 and 65535", abbreviate(port))
	}
	return nil
}

// baseURL turns an endpoint's address into the base URL of its HTTP server.
func baseURL(address string, port int32) (string, error) {
	if port == 0 {
		port = defaultPort
	}
	if !strings.Contains(address, "://") {
		if _, _, err := net.SplitHostPort(address); err != nil {
			address = net.JoinHostPort(strings.Trim(address, "[]"), strconv.Itoa(int(port)))
		}
		if err := hostPort(address); err != nil {
			return "", err
		}
		return "http://" + address, nil
	}
	u, err := url.Parse(address)
	switch {
	case err != nil:
		return "", fmt.Errorf("malformed URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("scheme %q", u.Scheme)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", fmt.Errorf("user, query and fragment are not allowed")
	case u.Hostname() == "":
		return "", fmt.Errorf("host is missing")
	}
	if u.Port() != "" {
		if err := hostPort(u.Host); err != nil {
			return "", err
		}
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}
