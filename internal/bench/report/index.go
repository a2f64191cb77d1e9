package report

import (
	"github.com/kinference/kinference/internal/bench/indexspeed"
	"github.com/kinference/kinference/internal/plot"
)

// Index turns figures of the KV index to rows of the suite "kvindex".
func Index(figures []indexspeed.Figure) []Row {
	var rows []Row
	for _, f := range figures {
		rows = append(rows, Row{"kvindex", "conversations", "table", f.Name, round(f.Value), f.Unit})
	}
	return rows
}

// IndexTable shows figures of the KV index, one a row.
func IndexTable(figures []indexspeed.Figure) plot.Table {
	t := plot.Table{Left: 1, Header: []string{"figure", "value", "unit"}}
	for _, f := range figures {
		t.Rows = append(t.Rows, []string{f.Name, plot.Number(f.Value), f.Unit})
	}
	return t
}
