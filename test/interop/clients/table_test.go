package clients

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// rows are the features in the order of the table.
var rows = []string{
	"chat", "stream", "tools", "tools, stream", "parallel tools", "parallel tools, stream", "JSON schema", "logprobs", "n", "stop", "vision", "usage", "errors", "retries", "abort",
	"thinking", "count_tokens", "responses", "responses, stream", "responses, tools", "embeddings", "models",
}

// table is what held, by client and feature.
type table struct {
	clients []string
	cells   map[[2]string]bool
}

func newTable() *table { return &table{cells: map[[2]string]bool{}} }

func (b *table) set(client, feature string, holds bool) {
	if !slices.Contains(b.clients, client) {
		b.clients = append(b.clients, client)
	}
	b.cells[[2]string{client, feature}] = holds
}

// String is the page of the documentation.
func (b *table) String() string {
	var s strings.Builder
	s.WriteString(`# Clients

Official clients, and LangChain on top of them, that drive the whole control plane in front of a vLLM-like engine. Each ✓ is the
test ` + "`TestClients/<client>/<feature>`" + ` of [test/interop/clients](../test/interop/clients), which writes this page; versions are pinned
there, those for Python and Node.js with the hashes of their files. – is what the client or its API does not have.

| feature |`)
	for _, c := range b.clients {
		s.WriteString(" " + c + " |")
	}
	s.WriteString("\n|---|" + strings.Repeat("---|", len(b.clients)) + "\n")
	for _, row := range rows {
		s.WriteString("| " + row + " |")
		for _, c := range b.clients {
			mark := ""
			if holds, ok := b.cells[[2]string{c, row}]; ok && holds {
				mark = "✓"
			} else if ok {
				mark = "✗"
			} else if absent(c, row) {
				mark = "–"
			}
			s.WriteString(" " + mark + " |")
		}
		s.WriteString("\n")
	}
	s.WriteString(`
What the features mean: **tools** is a call, its result and the answer to that, with ids that only some engines make; **parallel tools**
come interleaved from the engine; **usage** is that of whole answers and of streams, cached tokens apart; **errors** are an unknown model,
a request that the engine refuses and a prompt that is too long, as the client's own exceptions; **retries** are the client's own after
503; **abort** leaves a stream, and the engine stops; **thinking** comes back with the next turn where the API has it (Anthropic);
**count_tokens** is the count that the same request is charged; **responses** is OpenAI's Responses API, without what needs a store.
`)
	return s.String()
}

// absent reports whether a client's API does not have a feature.
func absent(client, feature string) bool {
	if strings.HasPrefix(client, "LangChain") && (feature == "models" || feature == "thinking" && !strings.Contains(client, "anthropic")) {
		return true
	}
	if strings.Contains(client, "anthropic") {
		return feature == "n" || feature == "logprobs" || strings.HasPrefix(feature, "responses") || feature == "embeddings"
	}
	return feature == "count_tokens"
}

func (b *table) write(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (b *table) compare(t *testing.T, path string) {
	t.Helper()
	page, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != b.String() {
		t.Errorf("%s is not what the tests say; write it with -update", path)
	}
}

func digest(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:8]
}

var _ fmt.Stringer = (*table)(nil)
