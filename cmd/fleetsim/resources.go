package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/kinference/kinference/internal/fleetsim"
)

// resources are an InferenceWorkerSet of the fleet and an InferencePool of that
// set, in YAML. Names are quoted: they are the operator's.
func (o *options) resources(fleet []*fleetsim.Worker) []byte {
	var b bytes.Buffer
	c := fleet[0].Config()
	class, _, _ := strings.Cut(c.Profile.Name, "-")
	fmt.Fprintf(&b, `# Made by fleetsim --print-config.
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferenceWorkerSet
metadata: { name: sim }
spec:
  endpoints:
`)
	for _, w := range fleet {
		fmt.Fprintf(&b, "    - { name: %s, address: %q", w.Name(), w.Addr())
		if a := w.EventsAddr(0); a != "" {
			fmt.Fprintf(&b, ", kvEvents: %q", a)
		}
		if a := w.ReplayAddr(0); a != "" {
			fmt.Fprintf(&b, ", kvReplay: %q", a)
		}
		b.WriteString(" }\n")
	}
	fmt.Fprintf(&b, "  dataParallel: { ranks: %d }\n  models:\n    - name: %q\n", c.Ranks, c.Model)
	if len(c.Aliases) > 0 {
		fmt.Fprintf(&b, "      aliases: [ %s ]\n", quoted(c.Aliases))
	}
	if len(c.LoRAs) > 0 {
		b.WriteString("      loras:\n")
		for _, name := range c.LoRAs {
			fmt.Fprintf(&b, "        - name: %q\n", name)
		}
	}
	fmt.Fprintf(&b, "      maxModelLen: %d\n", c.Profile.MaxLen())
	fmt.Fprintf(&b, "  tokenizer: { path: %q }\n", o.modelDir)
	if c.EventsPort != fleetsim.Off {
		removals := "PerCopy"
		if c.LastCopyRemovals {
			removals = "LastCopy"
		}
		fmt.Fprintf(&b, "  kvEvents: { topic: %q, removals: %s }\n", c.Topic, removals)
	}
	fmt.Fprintf(&b, `  accelerator: { class: %s }
---
apiVersion: kinference.buoyant.io/v1alpha1
kind: InferencePool
metadata: { name: sim }
spec:
  destinations:
    - { kind: InferenceWorkerSet, name: sim }
`, class)
	return b.Bytes()
}

func quoted(names []string) string {
	var q []string
	for _, n := range names {
		q = append(q, strconv.Quote(n))
	}
	return strings.Join(q, ", ")
}
