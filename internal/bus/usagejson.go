package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"

	usagev1 "github.com/kinference/kinference/proto/gen/kinference/usage/v1"
)

// UsageType is the type of the CloudEvent of a usage event.
const UsageType = "kinference.usage.v1"

// UsageSource is the source of the CloudEvents of one ingress.
func UsageSource(ingress string) string { return "/kinference/ingress/" + ingress }

// ErrNoUsage says that a message is no usage event.
var ErrNoUsage = errors.New("not a usage event")

// EncodeUsage appends a usage event as a CloudEvent 1.0 in JSON. It writes what
// the JSON mapping of Protocol Buffers prescribes, by hand because ingress does
// it for every request. It never fails: text that is not UTF-8 is mended.
func EncodeUsage(dst []byte, u *usagev1.Usage) []byte {
	o := object{dst: dst}
	o.open()
	o.text("specversion", "1.0")
	o.text("type", UsageType)
	o.text("id", u.GetId())
	o.text("source", UsageSource(u.GetIngress()))
	if t := u.GetTenants(); len(t) > 0 {
		o.text("subject", t[0])
	}
	if t := u.GetEnded(); t != nil {
		o.time("time", t.AsTime())
	}
	o.text("datacontenttype", "application/json")
	o.name("data")
	o.usage(u)
	o.close()
	return o.dst
}

func (o *object) usage(u *usagev1.Usage) {
	o.open()
	o.text("id", u.GetId())
	o.text("requestId", u.GetRequestId())
	o.text("ingress", u.GetIngress())
	if t := u.GetReceived(); t != nil {
		o.time("received", t.AsTime())
	}
	if t := u.GetEnded(); t != nil {
		o.time("ended", t.AsTime())
	}
	o.list("tenants", u.GetTenants())
	o.text("user", u.GetUser())
	o.text("keyId", u.GetKeyId())
	o.text("costCenter", u.GetCostCenter())
	o.text("qos", u.GetQos())
	o.text("route", u.GetRoute())
	o.flag("stream", u.GetStream())
	o.text("model", u.GetModel())
	o.text("servedModel", u.GetServedModel())
	o.text("pool", u.GetPool())
	o.text("workerSet", u.GetWorkerSet())
	o.text("provider", u.GetProvider())
	o.text("worker", u.GetWorker())
	o.text("rule", u.GetRule())
	o.list("tags", u.GetTags())
	o.number("attempts", u.GetAttempts())
	o.number("status", u.GetStatus())
	if x := u.GetOutcome(); x != 0 {
		o.text("outcome", x.String())
	}
	o.flag("recovered", u.GetRecovered())
	if t := u.GetTokens(); t != nil {
		o.name("tokens")
		o.open()
		o.count("input", t.Input)
		o.count("cachedInput", t.CachedInput)
		o.count("output", t.Output)
		o.count("reasoning", t.Reasoning)
		o.flag("inputEstimated", t.GetInputEstimated())
		o.flag("cachedInputEstimated", t.GetCachedInputEstimated())
		o.flag("outputEstimated", t.GetOutputEstimated())
		o.flag("reasoningEstimated", t.GetReasoningEstimated())
		o.close()
	}
	o.seconds("ttft", u.Ttft)
	o.seconds("itlMean", u.ItlMean)
	o.seconds("itlMax", u.ItlMax)
	o.seconds("tpot", u.Tpot)
	o.seconds("queue", u.Queue)
	o.seconds("e2e", u.E2E)
	if c := u.GetCost(); c != nil {
		o.name("cost")
		o.open()
		o.text("currency", c.GetCurrency())
		o.text("total", c.GetTotal())
		o.text("input", c.GetInput())
		o.text("cachedInput", c.GetCachedInput())
		o.text("output", c.GetOutput())
		o.text("gpu", c.GetGpu())
		o.text("priceVersion", c.GetPriceVersion())
		o.text("inputPrice", c.GetInputPrice())
		o.text("cachedInputPrice", c.GetCachedInputPrice())
		o.text("outputPrice", c.GetOutputPrice())
		o.text("hourlyPrice", c.GetHourlyPrice())
		o.close()
	}
	o.flag("overload", u.GetOverload())
	o.seconds("gpuPrefill", u.GpuPrefill)
	o.seconds("gpuDecode", u.GpuDecode)
	o.flag("hedge", u.GetHedge())
	o.close()
}

// object appends the members of JSON objects; those with zero values are left
// out.
type object struct{ dst []byte }

func (o *object) open()  { o.dst = append(o.dst, '{') }
func (o *object) close() { o.dst = append(o.dst, '}') }

func (o *object) name(name string) {
	if c := o.dst[len(o.dst)-1]; c != '{' && c != '[' {
		o.dst = append(o.dst, ',')
	}
	o.dst = append(append(append(o.dst, '"'), name...), '"', ':')
}

func (o *object) text(name, value string) {
	if value != "" {
		o.name(name)
		o.dst = appendText(o.dst, value)
	}
}

func (o *object) list(name string, values []string) {
	if len(values) == 0 {
		return
	}
	o.name(name)
	separator := byte('[')
	for _, v := range values {
		o.dst = appendText(append(o.dst, separator), v)
		separator = ','
	}
	o.dst = append(o.dst, ']')
}

func (o *object) flag(name string, value bool) {
	if value {
		o.name(name)
		o.dst = append(o.dst, "true"...)
	}
}

func (o *object) number(name string, value uint32) {
	if value != 0 {
		o.count(name, &value)
	}
}

func (o *object) count(name string, value *uint32) {
	if value != nil {
		o.name(name)
		o.dst = strconv.AppendUint(o.dst, uint64(*value), 10)
	}
}

func (o *object) seconds(name string, value *float64) {
	if value != nil && !math.IsNaN(*value) && !math.IsInf(*value, 0) {
		o.name(name)
		o.dst = strconv.AppendFloat(o.dst, *value, 'g', -1, 64)
	}
}

func (o *object) time(name string, t time.Time) {
	o.name(name)
	o.dst = append(o.dst, '"')
	o.dst = t.UTC().AppendFormat(o.dst, time.RFC3339Nano)
	o.dst = append(o.dst, '"')
}

func appendText(dst []byte, s string) []byte {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\ufffd")
	}
	dst = append(dst, '"')
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < 0x20 || c == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, '"')
}

// DecodeUsage reads what EncodeUsage wrote, now or in a later version that has
// more fields. The error is ErrNoUsage, with the reason.
func DecodeUsage(data []byte) (*usagev1.Usage, error) {
	var e struct {
		SpecVersion string          `json:"specversion"`
		Type        string          `json:"type"`
		ID          string          `json:"id"`
		Data        json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("%w: the envelope is no JSON object", ErrNoUsage)
	}
	if e.SpecVersion != "1.0" || e.Type != UsageType {
		return nil, fmt.Errorf("%w: CloudEvent %.16q of type %.64q", ErrNoUsage, e.SpecVersion, e.Type)
	}
	u := new(usagev1.Usage)
	// The cause could quote what the client sent.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(e.Data, u); err != nil {
		return nil, fmt.Errorf("%w: the data has another form", ErrNoUsage)
	}
	if u.GetId() == "" || u.GetId() != e.ID || len(u.GetId()) > 64 || u.GetEnded() == nil || !u.GetEnded().IsValid() {
		return nil, fmt.Errorf("%w: id or time is missing or differs", ErrNoUsage)
	}
	return u, nil
}
