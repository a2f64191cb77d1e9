package anthropic

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/openai"
)

// content reads a string or a list of blocks.
func (p *parser) content(level int, path string, v openai.Value) []block {
	switch v.Kind {
	case openai.String:
		return []block{{text: v}}
	case openai.Array:
	default:
		p.fail(path, "Input should be a string or a list of content blocks")
		return nil
	}
	var out []block
	i := 0
	for e := range v.Elements() {
		b := p.block(level, path+"."+strconv.Itoa(i), e)
		if p.err != nil {
			return nil
		}
		out = append(out, b)
		i++
	}
	return out
}

func (p *parser) block(level int, path string, v openai.Value) (b block) {
	o, ok := p.object(level, path, v)
	if !ok {
		return b
	}
	switch kind := p.text(o, path, "type"); kind {
	case "text":
		b.text = p.need(o, path, "text")
	case "image":
		b.kind = imageBlock
		p.image(&b, level+1, path, o.Get("source"))
		p.r.Pictures++
	case "thinking":
		b.kind = thinkingBlock
		b.text = p.need(o, path, "thinking")
	case "redacted_thinking":
		b.kind = redactedBlock
		b.text = p.need(o, path, "data")
	case "tool_use":
		b.kind = useBlock
		b.id, b.name = p.text(o, path, "id"), p.text(o, path, "name")
		if b.input = o.Get("input"); b.input.Kind != openai.Obj {
			p.fail(path+".input", "Input should be an object")
		}
	case "tool_result":
		b.kind = resultBlock
		b.id = p.text(o, path, "tool_use_id")
		if content := o.Get("content"); content.Given() {
			b.content = p.result(level+1, path+".content", content)
		}
	case "tool_reference":
		b.kind = referenceBlock
		b.text = p.need(o, path, "tool_name")
	case "document":
		p.document(&b, level+1, path, o)
	case "":
		p.fail(path+".type", "Input should not be empty")
	default:
		p.fail(path, "content blocks of type "+strconv.Quote(clip(kind))+" are not supported here")
	}
	return b
}

// result reads what a tool answered.
func (p *parser) result(level int, path string, v openai.Value) []block {
	if level >= len(p.levels)-1 {
		p.fail(path, "a tool_result cannot hold a tool_result")
		return nil
	}
	blocks := p.content(level, path, v)
	for i, b := range blocks {
		if b.kind != textBlock && b.kind != imageBlock && b.kind != referenceBlock {
			p.fail(path+"."+strconv.Itoa(i), "a tool_result holds text and images only")
		}
	}
	return blocks
}

// media are the kinds of pictures that the API takes.
var media = []string{"image/jpeg", "image/png", "image/gif", "image/webp"}

func (p *parser) image(b *block, level int, path string, v openai.Value) {
	path += ".source"
	o, ok := p.object(level, path, v)
	if !ok {
		return
	}
	switch kind := p.text(o, path, "type"); kind {
	case "base64":
		if b.media = p.text(o, path, "media_type"); p.err == nil && !slices.Contains(media, b.media) {
			p.fail(path+".media_type", "Input should be one of "+strings.Join(media, ", "))
		}
		if b.data = p.need(o, path, "data"); p.err == nil && !isBase64(b.data.Raw[1:len(b.data.Raw)-1]) {
			p.fail(path+".data", "Input should be base64")
		}
	case "url":
		if b.data = p.need(o, path, "url"); p.set.ImageURLs {
			if url, _ := b.data.Text(); !strings.HasPrefix(url, "https://") {
				p.fail(path+".url", "only https URLs are taken")
			}
			return
		}
		p.fail(path, "images by URL are not taken here: send the image as base64")
	default:
		p.fail(path+".type", "images must be sent as base64")
	}
}

// isBase64 tells whether the text of a JSON string is base64; slashes may be
// escaped.
func isBase64(in []byte) bool {
	for i, c := range in {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '+', c == '/', c == '=':
		case c == '\\' && i+1 < len(in) && in[i+1] == '/':
		default:
			return false
		}
	}
	return len(in) > 0
}

// document takes plain text as if it were a text block; the engine reads no
// other documents.
func (p *parser) document(b *block, level int, path string, o *openai.Object) {
	source, ok := p.object(level, path+".source", o.Get("source"))
	if !ok {
		return
	}
	if kind := p.text(source, path+".source", "type"); kind != "text" {
		p.fail(path+".source.type", "only documents of plain text (type text) are supported here")
		return
	}
	b.text = p.need(source, path+".source", "data")
}
