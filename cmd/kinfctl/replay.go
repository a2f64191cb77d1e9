package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kinference/kinference/internal/replay"
	"github.com/kinference/kinference/internal/resources"
	adminv1 "github.com/kinference/kinference/proto/gen/kinference/admin/v1"
)

func replayCommand() *cobra.Command {
	var decisions, usage string
	cmd := &cobra.Command{
		Use:   "replay --config DIR (--decisions FILE | --usage FILE)",
		Short: "Show how recorded decisions would change under other policies",
		Long: `Show how recorded decisions would change under the policies of a folder: how many, from where to where, and cost and predicted time to
first token before and after.

--decisions takes records as kinfctl decisions or explain -o json prints them, one after the other. They hold all that policies looked
at, so the same policies decide the same; what others look at beyond that is taken as the report says.

--usage takes usage events, as kinfctl usage export writes them: JSON lines, or one array. They hold neither loads nor headers: every
worker set is one endpoint that is ready and idle, and takes and costs what it did on average in the log; a provider costs its price.

Each request is taken by itself: what another decision would have changed for later requests is not followed.`,
		Example: `  kinfctl decisions --finished --recent 2048 -o json > decisions.jsonl
  kinfctl replay --config conf --decisions decisions.jsonl`,
		Args: cobra.NoArgs,
	}
	out, config := outputFlag(cmd), configFlag(cmd)
	cmd.Flags().StringVar(&decisions, "decisions", "", "file of records")
	cmd.Flags().StringVar(&usage, "usage", "", "file of usage events")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		path := decisions + usage
		if *config == "" || (decisions == "") == (usage == "") {
			return usageError{errors.New("give --config, and --decisions or --usage")}
		}
		catalog, err := loadConfig(cmd.ErrOrStderr(), *config)
		if err != nil {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return usageError{err}
		}
		defer f.Close()
		report := newReport()
		if usage != "" {
			err = report.events(replay.New(catalog), f)
		} else {
			err = report.records(catalog, f)
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		report.finish()
		return out.print(cmd.OutOrStdout(), report, report.print)
	}
	return cmd
}

// replayReport tells what would change.
type replayReport struct {
	Decisions int `json:"decisions"`
	// Changed of them would do something else, or go to another endpoint.
	Changed int `json:"changed"`
	// Unknown asked for models that no pool serves now, or were refused before any
	// decision; they are no part of the above.
	Unknown int `json:"unknown"`
	compared
	Changes []*change `json:"changes"`
	Lacks   []string  `json:"lacks"`

	byPlace map[[2]string]*change
	lacks   [replay.NumLacks]int
}

// compared sums up what is known both before and after; means in seconds, and sums of
// money.
type compared struct {
	Compared   int     `json:"compared"`
	TTFTBefore float64 `json:"predictedSecondsBefore"`
	TTFTAfter  float64 `json:"predictedSecondsAfter"`
	Priced     int     `json:"priced"`
	CostBefore float64 `json:"costBefore"`
	CostAfter  float64 `json:"costAfter"`
}

// change gathers decisions that change in the same way. From and To are worker
// sets, providers or what is done instead.
type change struct {
	From      string `json:"from"`
	To        string `json:"to"`
	Decisions int    `json:"decisions"`
	compared
}

// lackWords say how what is not recorded was made up for.
var lackWords = [replay.NumLacks]string{
	replay.OldFormat:   "records of an older version, which hold less: QoS and endpoint taken as usual, tags as unknown, loads as sampled, cost as equal",
	replay.Headers:     "headers, which rules read: taken as absent",
	replay.Claims:      "claims, which rules read: taken as absent",
	replay.Cut:         "tenants, tools or tags beyond the bounds of a record: taken as absent",
	replay.Memory:      "whether a threshold with an end of its own still held: taken as over",
	replay.Windows:     "means over a window that rules look at: that of 30 s taken for it",
	replay.Omitted:     "endpoints beyond the bounds of a record: left out",
	replay.Unseen:      "worker sets that the former policies sent nothing to: left out",
	replay.Unpredicted: "the prediction for a provider: taken as slower than any worker's",
	replay.Gone:        "worker sets and providers that the pool does not have now: left out",
	replay.Unranked:    "what the scheduling policy would have picked: the recorded order taken for it",
	replay.Approximate: "loads, single workers and predictions: all taken as ready, idle and as fast as on average in the log",
}

func newReport() *replayReport {
	return &replayReport{Changes: []*change{}, byPlace: map[[2]string]*change{}, Lacks: []string{}}
}

// records decides about each record anew.
func (r *replayReport) records(c *resources.Catalog, in io.Reader) error {
	p := replay.New(c)
	dec := json.NewDecoder(in)
	for n := 1; ; n++ {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return nil
		}
		d := &adminv1.Decision{}
		if err == nil {
			err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(raw, d)
		}
		if err != nil {
			return fmt.Errorf("record %d: %w", n, err)
		}
		r.add(p.Decision(d))
	}
}

// events decides about each usage event anew, once per id.
func (r *replayReport) events(p *replay.Replayer, in io.Reader) error {
	var all []replay.Usage
	seen := map[string]bool{}
	take := func(u replay.Usage) {
		if u.ID != "" && seen[u.ID] {
			return
		}
		seen[u.ID] = true
		all = append(all, u)
		p.Learn(&u)
	}
	dec := json.NewDecoder(in)
	for n := 1; ; n++ {
		var raw json.RawMessage
		err := dec.Decode(&raw)
		if errors.Is(err, io.EOF) {
			break
		}
		var list []replay.Usage
		if err == nil && bytes.HasPrefix(bytes.TrimSpace(raw), []byte("[")) {
			err = json.Unmarshal(raw, &list)
		} else if err == nil {
			list = make([]replay.Usage, 1)
			err = json.Unmarshal(raw, &list[0])
		}
		if err != nil {
			return fmt.Errorf("event %d: %w", n, err)
		}
		for _, u := range list {
			take(u)
		}
	}
	for i := range all {
		r.add(p.Event(&all[i]))
	}
	return nil
}

func (r *replayReport) add(x replay.Result, known bool) {
	if !known {
		r.Unknown++
		return
	}
	r.Decisions++
	for l, lacks := range x.Lacks {
		if lacks {
			r.lacks[l]++
		}
	}
	r.compared.add(&x)
	if !x.Changed {
		return
	}
	r.Changed++
	key := [2]string{x.Before.Where(), x.After.Where()}
	c := r.byPlace[key]
	if c == nil {
		c = &change{From: key[0], To: key[1]}
		r.byPlace[key] = c
	}
	c.Decisions++
	c.add(&x)
}

func (c *compared) add(x *replay.Result) {
	if x.Before.TTFT != replay.Unknown && x.After.TTFT != replay.Unknown {
		c.Compared++
		c.TTFTBefore += x.Before.TTFT.Seconds()
		c.TTFTAfter += x.After.TTFT.Seconds()
	}
	if x.Before.Cost > 0 && x.After.Cost > 0 { // 0: the backend has no price
		c.Priced++
		c.CostBefore += x.Before.Cost
		c.CostAfter += x.After.Cost
	}
}

// mean turns sums of times into means.
func (c *compared) mean() {
	if c.Compared > 0 {
		c.TTFTBefore /= float64(c.Compared)
		c.TTFTAfter /= float64(c.Compared)
	}
}

// finish sorts and words what was gathered.
func (r *replayReport) finish() {
	r.Changes = slices.AppendSeq(r.Changes, maps.Values(r.byPlace))
	slices.SortFunc(r.Changes, func(a, b *change) int {
		return cmp.Or(b.Decisions-a.Decisions, strings.Compare(a.From, b.From), strings.Compare(a.To, b.To))
	})
	for _, c := range r.Changes {
		c.mean()
	}
	r.mean()
	for l, n := range r.lacks {
		if n > 0 {
			r.Lacks = append(r.Lacks, fmt.Sprintf("%s, in %d decisions", lackWords[l], n))
		}
	}
}

func (r *replayReport) print(w io.Writer) error {
	fmt.Fprintf(w, "decisions  %d\nchanged    %d", r.Decisions, r.Changed)
	if r.Decisions > 0 {
		fmt.Fprintf(w, " (%.1f %%)", 100*float64(r.Changed)/float64(r.Decisions))
	}
	fmt.Fprintln(w)
	if r.Unknown > 0 {
		fmt.Fprintf(w, "left out   %d: no pool serves their model, or they were refused before\n", r.Unknown)
	}
	fmt.Fprintf(w, "predicted  %s\ncost       %s\n\n", r.ttft(), r.cost())
	if len(r.Changes) > 0 {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "from\tto\tdecisions\tpredicted ttft\tcost")
		for _, c := range r.Changes {
			fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\n", c.From, c.To, c.Decisions, c.ttft(), c.cost())
		}
		if err := t.Flush(); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	if len(r.Lacks) == 0 {
		_, err := fmt.Fprintln(w, "the records hold all that these policies look at")
		return err
	}
	_, err := fmt.Fprintf(w, "not in the records:\n  %s\n", strings.Join(r.Lacks, "\n  "))
	return err
}

const notBoth = "not known on both sides"

func (c *compared) ttft() string {
	if c.Compared == 0 {
		return notBoth
	}
	d := func(s float64) string {
		return time.Duration(s * float64(time.Second)).Round(time.Millisecond).String()
	}
	return fmt.Sprintf("%s, then %s (mean of %d)", d(c.TTFTBefore), d(c.TTFTAfter), c.Compared)
}

func (c *compared) cost() string {
	if c.Priced == 0 {
		return notBoth
	}
	return fmt.Sprintf("%.3g, then %.3g (sum of %d)", c.CostBefore, c.CostAfter, c.Priced)
}
