package classifier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/daemon"
	"github.com/kinference/kinference/internal/resources"
	"github.com/kinference/kinference/internal/rpc"
	classifierv1 "github.com/kinference/kinference/proto/gen/kinference/classifier/v1"
	"github.com/kinference/kinference/proto/gen/kinference/classifier/v1/classifierv1connect"
)

// Bounds of one call.
const (
	maxBatch = 256
	// retryAfter is the delay that a refused caller is told: reading a long prompt takes some milliseconds.
	retryAfter = 50 * time.Millisecond
)

// server answers calls. It is safe for concurrent use.
type server struct {
	c       *classify.Classifier
	m       *metrics
	slots   chan struct{}
	timeout time.Duration
	custom  atomic.Pointer[map[string]*classify.Custom] // by namespace
}

var _ classifierv1connect.ClassifierServiceHandler = (*server)(nil)

// use takes the custom tags of a load of the resources. A namespace whose tags
// cannot be compiled keeps those that it had.
func (s *server) use(ctx context.Context, c *resources.Catalog) {
	if c == nil {
		return
	}
	tags := map[string][]v1alpha1.CustomTag{}
	for _, p := range c.Policies {
		ns := strings.SplitN(p.ID(), "/", 2)[0]
		tags[ns] = append(tags[ns], p.CustomTags()...)
	}
	s.define(ctx, tags)
}

// define takes custom tags by namespace.
func (s *server) define(ctx context.Context, tags map[string][]v1alpha1.CustomTag) {
	next := map[string]*classify.Custom{}
	old := s.custom.Load()
	for ns, list := range tags {
		if len(list) == 0 {
			continue
		}
		compiled, err := classify.CompileCustom(list)
		if err != nil {
			daemon.Logger(ctx).Error("custom tags are broken", "namespace", ns, "err", err)
			if old == nil || (*old)[ns] == nil {
				continue
			}
			compiled = (*old)[ns]
		}
		next[ns] = compiled
	}
	s.custom.Store(&next)
}

// enter takes a slot, or refuses.
func (s *server) enter() error {
	select {
	case s.slots <- struct{}{}:
		return nil
	default:
		s.m.refuse()
		return rpc.Error(connect.CodeResourceExhausted, "the classifier is busy", retryAfter)
	}
}

func (s *server) leave() { <-s.slots }

// Classify tags one prompt.
func (s *server) Classify(ctx context.Context, req *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	return s.classify(ctx, req)
}

// ClassifyBatch tags several prompts, on one slot.
func (s *server) ClassifyBatch(ctx context.Context, req *classifierv1.ClassifyBatchRequest) (*classifierv1.ClassifyBatchResponse, error) {
	if len(req.Requests) > maxBatch {
		return nil, rpc.Error(connect.CodeInvalidArgument, fmt.Sprintf("a batch has at most %d prompts", maxBatch), 0)
	}
	if err := s.enter(); err != nil {
		return nil, err
	}
	defer s.leave()
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	out := &classifierv1.ClassifyBatchResponse{}
	for _, r := range req.Requests {
		a, err := s.classify(ctx, r)
		if err != nil {
			return nil, err
		}
		out.Responses = append(out.Responses, a)
	}
	return out, nil
}

func (s *server) classify(ctx context.Context, req *classifierv1.ClassifyRequest) (*classifierv1.ClassifyResponse, error) {
	custom, err := s.options(req.Options)
	if err != nil {
		return nil, err
	}
	in := classify.Input{Profile: req.Options.GetProfile(), Custom: custom, Parts: make([]classify.Part, len(req.Parts))}
	for i, p := range req.Parts {
		in.Parts[i] = part(p)
	}
	start := time.Now()
	res := s.c.Classify(ctx, in)
	s.m.done(&res, time.Since(start))
	return response(&res, req.Options.GetOmitReasons()), nil
}

// options checks what a caller asks for. An unknown namespace has no custom tags.
func (s *server) options(o *classifierv1.Options) (*classify.Custom, error) {
	if p := o.GetProfile(); p != "" && p != classify.ProfileDefault && p != classify.ProfileStrict {
		return nil, rpc.Error(connect.CodeInvalidArgument, "unknown profile: want default or strict", 0)
	}
	m := s.custom.Load()
	if m == nil {
		return nil, nil
	}
	return (*m)[o.GetNamespace()], nil
}

// idle is how long a stream may be silent.
const idle = 10 * time.Second

// ClassifyStream tags one prompt that comes in pieces. It holds a slot only
// while it reads.
func (s *server) ClassifyStream(ctx context.Context, stream *connect.BidiStream[classifierv1.ClassifyStreamRequest, classifierv1.ClassifyStreamResponse]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silent := time.AfterFunc(idle, cancel)
	defer silent.Stop()
	var st *classify.Stream
	omit, told := false, false
	var spent time.Duration
	work := func(f func()) error {
		if err := s.enter(); err != nil {
			return err
		}
		defer s.leave()
		start := time.Now()
		f()
		spent += time.Since(start)
		return nil
	}
	for {
		req, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		silent.Reset(idle)
		if st == nil {
			custom, err := s.options(req.Options)
			if err != nil {
				return err
			}
			st, omit = s.c.NewStream(req.Options.GetProfile(), custom), req.Options.GetOmitReasons()
		}
		if req.Part == nil {
			continue
		}
		if err := work(func() { st.Add(ctx, part(req.Part), req.Continues) }); err != nil {
			return err
		}
		if st.Found() && !told {
			told = true
			early := &classifierv1.ClassifyResponse{Tags: []*classifierv1.Tag{{Name: "pii-detected", State: classifierv1.State_STATE_TRUE, Score: 1}}}
			if err := stream.Send(&classifierv1.ClassifyStreamResponse{Response: early}); err != nil {
				return err
			}
		}
	}
	if st == nil {
		st = s.c.NewStream("", nil)
	}
	var res classify.Result
	if err := work(func() { res = st.Result(ctx) }); err != nil {
		return err
	}
	s.m.done(&res, spent)
	return stream.Send(&classifierv1.ClassifyStreamResponse{Response: response(&res, omit), Final: true})
}

func part(p *classifierv1.Part) classify.Part {
	out := classify.Part{Text: string(p.GetText()), Message: int(p.GetMessage()), Media: classify.MediaUnknown}
	switch p.GetRole() {
	case classifierv1.Role_ROLE_SYSTEM:
		out.Role = classify.RoleSystem
	case classifierv1.Role_ROLE_USER:
		out.Role = classify.RoleUser
	case classifierv1.Role_ROLE_ASSISTANT:
		out.Role = classify.RoleAssistant
	case classifierv1.Role_ROLE_TOOL_RESULT:
		out.Role = classify.RoleToolResult
	case classifierv1.Role_ROLE_TOOL_ARGUMENTS:
		out.Role = classify.RoleToolArguments
	case classifierv1.Role_ROLE_DOCUMENT:
		out.Role = classify.RoleDocument
	case classifierv1.Role_ROLE_METADATA:
		out.Role = classify.RoleMetadata
	}
	switch p.GetMedia() {
	case classifierv1.Media_MEDIA_UNSPECIFIED, classifierv1.Media_MEDIA_TEXT:
		out.Media = classify.MediaText
	case classifierv1.Media_MEDIA_IMAGE:
		out.Media = classify.MediaImage
	case classifierv1.Media_MEDIA_AUDIO:
		out.Media = classify.MediaAudio
	case classifierv1.Media_MEDIA_VIDEO:
		out.Media = classify.MediaVideo
	case classifierv1.Media_MEDIA_FILE:
		out.Media = classify.MediaFile
	case classifierv1.Media_MEDIA_TOKENS:
		out.Media = classify.MediaTokens
	}
	return out
}

var states = [...]classifierv1.State{classify.Unknown: classifierv1.State_STATE_UNKNOWN, classify.False: classifierv1.State_STATE_FALSE, classify.True: classifierv1.State_STATE_TRUE}

func response(r *classify.Result, omit bool) *classifierv1.ClassifyResponse {
	out := &classifierv1.ClassifyResponse{Complexity: r.Complexity, Bytes: uint64(r.Bytes), CachedBytes: uint64(r.CachedBytes),
		Versions: &classifierv1.Versions{Detectors: r.Versions.Detectors, Weights: r.Versions.Weights, Custom: r.Versions.Custom}}
	for i := range r.Tags {
		t := &r.Tags[i]
		x := &classifierv1.Tag{Name: t.Name, State: states[t.State], Score: t.Score, Unknown: slices.Clone(t.Causes), ReasonsCut: t.ReasonsCut}
		if !omit {
			for _, y := range t.Reasons {
				x.Reasons = append(x.Reasons, &classifierv1.Reason{Kind: y.Kind, Part: uint32(y.Part), Offset: uint64(y.Offset), Length: uint64(y.Length), Rule: y.Rule, Score: y.Score, Encoding: y.Encoding})
			}
		}
		out.Tags = append(out.Tags, x)
	}
	for i := range r.Coverage {
		c := &r.Coverage[i]
		out.Coverage = append(out.Coverage, &classifierv1.Coverage{Detector: c.Detector, Bytes: uint64(c.Bytes), Of: uint64(c.Of), Complete: c.Complete(), Causes: c.Causes})
	}
	return out
}
