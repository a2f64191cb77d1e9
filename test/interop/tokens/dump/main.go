// Command dump writes the tokenizer corpus as JSON lines, for the golden writer in the folder above, which is not in Go.
package main

import (
	"bufio"
	"encoding/json"
	"log"
	"os"

	"github.com/kinference/kinference/internal/tokens/corpus"
)

func main() {
	w := bufio.NewWriter(os.Stdout)
	enc := json.NewEncoder(w)
	for _, text := range corpus.Texts() {
		if err := enc.Encode(text); err != nil {
			log.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		log.Fatal(err)
	}
}
