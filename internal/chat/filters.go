package chat

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ardanlabs/jinja"
)

// The filters below stand in for the library's where those differ from Jinja's; rewrite puts them in.

// mapFilter is Jinja's map over a list, by attribute or by the name of a filter. The library's own gives the list back unchanged
// for the second form, which Llama 3's template uses.
func mapFilter(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 || !args[0].IsList() {
		return jinja.NewList(nil), nil
	}
	items := args[0].AsList().Items
	out := make([]jinja.Value, len(items))
	if attribute, ok := kwargs["attribute"]; ok {
		if !attribute.IsString() {
			return jinja.Value{}, fmt.Errorf("map: attribute is not a name")
		}
		for i, item := range items {
			out[i] = kwargs["default"] // undefined if there is none
			if item.IsDict() {
				if v, ok := item.AsDict().Get(attribute.AsString()); ok {
					out[i] = v
				}
			}
		}
		return jinja.NewList(out), nil
	}
	if len(args) != 2 || !args[1].IsString() {
		return jinja.Value{}, fmt.Errorf("map: arguments are not supported")
	}
	name := args[1].AsString()
	for i, item := range items {
		var err error
		switch name {
		case "tojson":
			out[i], err = tojson([]jinja.Value{item}, nil)
		case "trim":
			out[i], err = trim([]jinja.Value{item}, nil)
		case "string":
			out[i], err = asString([]jinja.Value{item}, nil)
		default:
			out[i], err = textFilter(name, item)
		}
		if err != nil {
			return jinja.Value{}, err
		}
	}
	return jinja.NewList(out), nil
}

// textFilter applies one of the filters of texts that templates map.
func textFilter(name string, v jinja.Value) (jinja.Value, error) {
	if !v.IsString() {
		return v, fmt.Errorf("map: %s of what is not text is not supported", name)
	}
	switch s := v.AsString(); name {
	case "lower":
		return jinja.NewString(strings.ToLower(s)), nil
	case "upper":
		return jinja.NewString(strings.ToUpper(s)), nil
	case "length":
		return jinja.NewInt(int64(utf8.RuneCountInString(s))), nil
	}
	return v, fmt.Errorf("map: filter %s is not supported", name)
}

// asString is Jinja's filter string and what {{ }} does: the library prints none as nothing and floats as Go does.
func asString(args []jinja.Value, _ map[string]jinja.Value) (jinja.Value, error) {
	if len(args) == 0 {
		return jinja.NewString(""), nil
	}
	switch v := args[0]; {
	case v.IsNone():
		return jinja.NewString("None"), nil
	case v.IsUndefined(), v.IsCallable():
		return jinja.NewString(""), nil
	case v.IsFloat():
		return jinja.NewString(string(appendFloat(nil, v.AsFloat()))), nil
	case v.IsString():
		return v, nil
	default:
		return jinja.NewString(v.String()), nil
	}
}

// trim is Jinja's filter trim, with the characters to take off as its argument.
func trim(args []jinja.Value, kwargs map[string]jinja.Value) (jinja.Value, error) {
	text, err := asString(args, nil)
	if err != nil {
		return text, err
	}
	chars, ok := kwargs["chars"]
	if len(args) > 1 {
		chars, ok = args[1], true
	}
	if ok && chars.IsString() {
		return jinja.NewString(strings.Trim(text.AsString(), chars.AsString())), nil
	}
	return jinja.NewString(strings.TrimFunc(text.AsString(), pythonSpace)), nil
}
