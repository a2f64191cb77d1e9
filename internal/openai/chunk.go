package openai

// Chunk is what the proxy needs to know of one stream event's data or of one
// whole answer. The zero Chunk is ready for Parse and may be used again.
type Chunk struct {
	obj, inner Object

	// Model is the model member with its place in the text.
	Model Value
	// Error is the error member if it is there and not null.
	Error Value
	// NullError says that there is an error member with the value null, which
	// one SDK takes for a failure.
	NullError bool
	// HasChoices says that the choices array has elements. A chunk without
	// carries usage only.
	HasChoices bool
	// HasUsage says that a usage object is there, and Usage what it holds.
	HasUsage bool
	Usage    Usage
	// LazyUsage makes Parse leave Usage alone and set UsageText, for ReadUsage.
	LazyUsage bool
	UsageText []byte // part of the text
	// UsageFrom and UsageTo are what to cut from the text to be rid of the usage
	// object, with one comma.
	UsageFrom, UsageTo int

	choices Value
}

// Parse looks into text. The error is a *SyntaxError.
func (c *Chunk) Parse(text []byte) error {
	c.Model, c.Error, c.choices = Value{}, Value{}, Value{}
	c.NullError, c.HasChoices, c.HasUsage = false, false, false
	c.Usage, c.UsageText = NoUsage, nil
	if err := c.obj.Parse(text, 0); err != nil {
		return err
	}
	for i := range c.obj.members {
		m := &c.obj.members[i]
		if m.escaped {
			continue // no engine escapes these names
		}
		switch string(text[m.name:m.nameEnd]) {
		case "model":
			c.Model = c.obj.At(i)
		case "error":
			if m.kind == Null {
				c.NullError = true
			} else {
				c.Error = c.obj.At(i)
			}
		case "choices":
			c.choices = c.obj.At(i)
		case "usage":
			if m.kind == Obj {
				c.HasUsage = true
				if v := c.obj.At(i); c.LazyUsage {
					c.UsageText = v.Raw
				} else {
					c.Usage = c.usage(v)
				}
				c.UsageFrom, c.UsageTo = m.name-1, m.end
				if i > 0 {
					c.UsageFrom = c.obj.members[i-1].end
				} else if len(c.obj.members) > 1 {
					c.UsageTo = c.obj.members[1].name - 1
				}
			}
		}
	}
	for range c.choices.Elements() {
		c.HasChoices = true
		break
	}
	return nil
}

// Object gives the parsed text, to apply changes to.
func (c *Chunk) Object() *Object { return &c.obj }

// ReadUsage reads the text of a usage object.
func (c *Chunk) ReadUsage(text []byte) Usage { return c.usage(Value{Raw: text, Kind: Obj}) }

// Index is the number of the first choice, 0 if it has none.
func (c *Chunk) Index() int {
	for choice := range c.choices.Elements() {
		if choice.Kind == Obj && c.inner.Parse(choice.Raw, 0) == nil {
			return max(0, count(c.inner.Get("index")))
		}
		break
	}
	return 0
}

// Content reports whether a choice carries something of the answer: text,
// reasoning, a refusal, a tool call or a finish reason, which ends an answer
// without any text. A chunk that just opens the message with its role has
// none.
func (c *Chunk) Content() bool {
	for choice := range c.choices.Elements() {
		if c.content(choice) {
			return true
		}
	}
	return false
}

func (c *Chunk) content(choice Value) bool {
	if choice.Kind != Obj || c.inner.Parse(choice.Raw, 0) != nil {
		return false
	}
	if c.inner.Get("finish_reason").Given() || filled(c.inner.Get("text")) {
		return true
	}
	delta := c.inner.Get("delta")
	if delta.Kind != Obj || c.inner.Parse(delta.Raw, 0) != nil {
		return false
	}
	for _, name := range [...]string{"content", "reasoning_content", "reasoning", "tool_calls", "refusal", "function_call", "audio"} {
		if filled(c.inner.Get(name)) {
			return true
		}
	}
	return false
}

// filled reports whether v is something other than null and emptiness.
func filled(v Value) bool {
	switch v.Kind {
	case String, Array, Obj:
		for _, b := range v.Raw[1 : len(v.Raw)-1] {
			if v.Kind == String || b > ' ' {
				return true
			}
		}
		return false
	}
	return v.Given()
}
