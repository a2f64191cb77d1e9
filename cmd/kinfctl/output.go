package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"
)

// output is how a command prints: table, json or yaml.
type output string

var outputs = []string{"table", "json", "yaml"}

func (o *output) String() string { return string(*o) }

// Type implements pflag.Value.
func (*output) Type() string { return "string" }

// Set implements pflag.Value.
func (o *output) Set(s string) error {
	if !slices.Contains(outputs, s) {
		return fmt.Errorf("want %s", strings.Join(outputs, ", "))
	}
	*o = output(s)
	return nil
}

func outputFlag(cmd *cobra.Command) *output {
	o := output("table")
	cmd.Flags().VarP(&o, "output", "o", "table, json or yaml")
	complete(cmd, "output", outputs...)
	return &o
}

func configFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("config", "", "folder or file of resources")
}

func complete(cmd *cobra.Command, flag string, words ...string) {
	// It fails for flags that are not there and for those that have one already.
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}

// print writes a value: by table when that is wanted, else all of it. A message
// is one line of JSON, so that several make a file for kinfctl replay.
func (o output) print(w io.Writer, v any, table func(io.Writer) error) error {
	if o == "table" {
		return table(w)
	}
	var raw []byte
	var err error
	m, message := v.(proto.Message)
	if message {
		raw, err = protojson.Marshal(m)
	} else {
		raw, err = json.Marshal(v)
	}
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	var out bytes.Buffer
	switch {
	case o == "yaml":
		raw, err = yaml.JSONToYAML(raw)
		out.Write(raw)
	case message:
		// protojson sets blanks as it likes.
		err = json.Compact(&out, raw)
		out.WriteByte('\n')
	default:
		err = json.Indent(&out, raw, "", "  ")
		out.WriteByte('\n')
	}
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	_, err = out.WriteTo(w)
	return err
}
