package main

import (
	"context"
	"flag"
	"fmt"
	"io"

	"github.com/kinference/kinference/internal/bench/indexspeed"
	"github.com/kinference/kinference/internal/bench/report"
)

// The size that the goals are stated for.
const (
	indexBlocks  = 5_000_000
	indexWorkers = 512
)

func kvindexCommand(_ context.Context, fs *flag.FlagSet, args []string, out io.Writer) error {
	blocks := fs.Int("blocks", indexBlocks, "about how many blocks the index holds")
	workers := fs.Int("workers", indexWorkers, "number of workers")
	if err := fs.Parse(args); err != nil {
		return err
	}
	measureIndex(*blocks, *workers, out)
	return nil
}

// measureIndex measures and shows the index.
func measureIndex(blocks, workers int, out io.Writer) []indexspeed.Figure {
	figures := indexspeed.Measure(blocks, workers)
	fmt.Fprintf(out, "\nKV index, %d workers\n%s", workers, report.IndexTable(figures).Text(textStyle()))
	return figures
}
