package openai

import (
	"errors"
	"math"
	"strconv"
)

// Change sets or removes one member of an object.
type Change struct {
	Path  []string // names from the outermost object inwards, at least one
	Value []byte   // JSON text; nil removes the member
}

// Set makes a Change that sets the member at path.
func Set(value []byte, path ...string) Change { return Change{Path: path, Value: value} }

// Remove makes a Change that removes the member at path, if it is there.
func Remove(path ...string) Change { return Change{Path: path} }

// Apply appends the object's text to dst with the changes made and everything
// else byte for byte as it was. A new member goes to the end. Objects on the
// way are made where they are absent or null; it is an error if one is
// something else. Where two changes have the same path the later one holds.
func (o *Object) Apply(dst []byte, changes ...Change) ([]byte, error) {
	if len(changes) == 0 {
		return append(dst, o.raw...), nil
	}
	type edit struct {
		remove bool
		value  []byte // nil: as it was
	}
	edits := make([]edit, len(o.members))
	type fresh struct {
		name  string
		value []byte
	}
	var added []fresh
	for n, c := range changes {
		name := c.Path[0]
		if first := firstOf(changes, name); first < n {
			continue // done together with the first one
		}
		i := o.find(name)
		var old Value
		if i >= 0 {
			old = o.At(i)
		}
		value, remove, err := merge(old, name, changes)
		switch {
		case err != nil:
			return nil, err
		case i >= 0:
			edits[i] = edit{remove, value}
		case !remove:
			added = append(added, fresh{name, value})
		}
	}

	open := 0
	for o.raw[open] != '{' {
		open++
	}
	rest := open + 1 // what follows the last member
	dst = append(dst, o.raw[:rest]...)
	wrote := false
	for i, m := range o.members {
		nameStart := m.name - 1
		if !edits[i].remove {
			gap := rest // white space, and the comma of the member before
			if wrote || i == 0 {
				dst = append(dst, o.raw[gap:nameStart]...)
			}
			dst = append(dst, o.raw[nameStart:m.start]...)
			if edits[i].value != nil {
				dst = append(dst, edits[i].value...)
			} else {
				dst = append(dst, o.raw[m.start:m.end]...)
			}
			wrote = true
		}
		rest = m.end
	}
	for _, f := range added {
		if wrote {
			dst = append(dst, ',')
		}
		dst = AppendString(dst, f.name)
		dst = append(dst, ':')
		dst = append(dst, f.value...)
		wrote = true
	}
	return append(dst, o.raw[rest:]...), nil
}

func firstOf(changes []Change, name string) int {
	for i, c := range changes {
		if c.Path[0] == name {
			return i
		}
	}
	return -1
}

// merge applies all changes that begin with name to that member's old value.
func merge(old Value, name string, changes []Change) (value []byte, remove bool, err error) {
	remove = old.Kind == Absent
	var inner []Change
	for _, c := range changes {
		if c.Path[0] != name {
			continue
		}
		if len(c.Path) > 1 {
			inner = append(inner, Change{c.Path[1:], c.Value})
			continue
		}
		inner = inner[:0] // the whole member is replaced
		value, remove = c.Value, c.Value == nil
		old = Value{}
		if !remove {
			old = Value{Raw: value, Kind: kindOf(value[0])}
		}
	}
	if len(inner) == 0 {
		return value, remove, nil
	}
	if !old.Given() {
		if !anySet(inner) {
			return value, remove, nil
		}
		old = Value{Raw: []byte("{}"), Kind: Obj}
	}
	if old.Kind != Obj {
		return nil, false, errors.New(strconv.Quote(name) + " is not an object")
	}
	var o Object
	if err := o.Parse(old.Raw, math.MaxInt); err != nil {
		return nil, false, err
	}
	value, err = o.Apply(nil, inner...)
	return value, false, err
}

func anySet(changes []Change) bool {
	for _, c := range changes {
		if c.Value != nil {
			return true
		}
	}
	return false
}

// AppendString appends s as a JSON string.
func AppendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for i, r := range s { // ranging replaces invalid UTF-8 by U+FFFD
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, '\\', 'n')
		case r < 0x20 || r == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		case r < 0x80:
			dst = append(dst, s[i])
		default:
			dst = append(dst, string(r)...)
		}
	}
	return append(dst, '"')
}
