package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kinference/kinference/internal/bench/openloop"
	"github.com/kinference/kinference/internal/bench/stats"
	"github.com/kinference/kinference/internal/fleetsim/engine"
	"github.com/kinference/kinference/internal/plot"
	accountingv1 "github.com/kinference/kinference/proto/gen/kinference/accounting/v1"
)

func capacityCommand() *cobra.Command {
	var f usageFlags
	var ttft time.Duration
	var more int
	var scale map[string]string
	var svg, png string
	var simulate, chart bool
	cmd := &cobra.Command{
		Use:   "capacity [NAMESPACE/WORKERSET…]",
		Short: "Show what workers can bear, and what if",
		Long: `Show what worker sets can bear until the 90th percentile of the time to the first token is longer than wanted (the
knee), how much more of the same traffic fits, how many workers it needs, and who uses them. All of it is learned from
what was observed; accounting remembers the last hour and a half of its workers.

What if: --workers=-1 asks for one worker less, --scale team-a/chat=3 for three times the traffic of a tenant (the same
as two more tenants like it), and --scale '*=2' for twice that of all others. --simulate tries it on simulated workers too
that are as fast as the observed ones.`,
		Example: `  kinfctl capacity --chart
  kinfctl capacity --workers=-1 --scale team-a/chat=3 --simulate`,
	}
	o := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		filter, err := f.filter(time.Now())
		if err != nil {
			return err
		}
		request := &accountingv1.CapacityRequest{From: filter.GetFrom(), To: filter.GetTo(), WorkerSets: args, Ttft: durationpb.New(ttft), MoreWorkers: int32(more)}
		for tenant, text := range scale {
			factor, err := strconv.ParseFloat(text, 64)
			if err != nil || factor < 0 {
				return usageError{fmt.Errorf("scale %s=%s: want a number such as 2", tenant, text)}
			}
			request.Tenants = append(request.Tenants, &accountingv1.TenantFactor{Tenant: tenant, Factor: factor})
		}
		answer, err := f.client(cmd.Context()).Capacity(cmd.Context(), request)
		if err != nil {
			return fmt.Errorf("ask accounting: %w", err)
		}
		if (svg != "" || png != "") && len(answer.GetSets()) != 1 {
			return usageError{errors.New("--svg and --png draw one worker set: name it")}
		}
		for _, picture := range []struct {
			file string
			draw func(plot.Lines) []byte
		}{{svg, plot.Lines.SVG}, {png, plot.Lines.PNG}} {
			if picture.file == "" {
				continue
			}
			if err := os.WriteFile(picture.file, picture.draw(capacityChart(answer.GetSets()[0], ttft)), 0o644); err != nil { //nolint:gosec // a picture
				return fmt.Errorf("write chart: %w", err)
			}
		}
		return o.print(cmd.OutOrStdout(), answer, func(w io.Writer) error {
			for i, s := range answer.GetSets() {
				if i > 0 {
					fmt.Fprintln(w)
				}
				if err := capacityTable(w, s, ttft); err != nil {
					return err
				}
				if chart {
					fmt.Fprint(w, "\n", curveBars(s, ttft).Text(plot.Style{}), "\n", shareBars(s).Text(plot.Style{}))
				}
				if simulate {
					if err := simulated(w, s, scale, ttft); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	f.place(cmd)
	fs := cmd.Flags()
	fs.DurationVar(&f.since, "since", time.Hour, "how far back, if there is no --from")
	fs.StringVar(&f.from, "from", "", "from when on: 2026-11-30, or with time as 2026-11-30T08:00:00Z")
	fs.StringVar(&f.to, "to", "", "until when; empty: now")
	fs.DurationVar(&ttft, "ttft", 2*time.Second, "90th percentile of the time to the first token that is wanted")
	fs.IntVar(&more, "workers", 0, "what if there were so many workers more; below 0: fewer")
	fs.StringToStringVar(&scale, "scale", nil, "what if a tenant sent so many times as much: namespace/name=2, - for an open gateway, * for all others")
	fs.BoolVar(&chart, "chart", false, "draw how the time grows with the load, and who used the workers over time")
	fs.StringVar(&svg, "svg", "", "file that the curve is drawn to, as SVG")
	fs.StringVar(&png, "png", "", "file that the curve is drawn to, as PNG")
	fs.BoolVar(&simulate, "simulate", false, "try it on simulated workers")
	return cmd
}

func capacityTable(w io.Writer, s *accountingv1.SetCapacity, ttft time.Duration) error {
	headroom := "-"
	if s.GetRate() > 0 {
		headroom = fmt.Sprintf("%+.0f %%", 100*(s.GetKnee()/s.GetRate()-1))
	}
	needed := "none is enough"
	if n := s.GetWorkersNeeded(); n > 0 {
		needed = strconv.Itoa(int(n))
	}
	fmt.Fprintf(w, "%s: %d workers, bound by %s\n", s.GetWorkerSet(), s.GetWorkers(), s.GetBound())
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintf(t, "load\t%s requests/s\n", plot.Number(s.GetRate()))
	fmt.Fprintf(t, "knee (TTFT p90 %v)\t%s requests/s\n", ttft, plot.Number(s.GetKnee()))
	fmt.Fprintf(t, "headroom\t%s\n", headroom)
	fmt.Fprintf(t, "workers needed\t%s\n", needed)
	fmt.Fprintf(t, "TTFT p90\t%s observed, %s predicted\n", seconds(s.GetTtftObserved()), seconds(s.GetTtftPredicted()))
	if wall := s.GetWallSeconds(); wall > 0 {
		fmt.Fprintf(t, "time of workers\t%.0f s, idle %.1f %%, unexplained %.1f %%\n", wall, 100*s.GetIdleSeconds()/wall, 100*s.GetOtherSeconds()/wall)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "TENANT\tREQUESTS\tPREFILL S\tDECODE S\tOF WALL\tUNCACHED\tCACHED\tOUTPUT")
	for _, x := range s.GetTenants() {
		fmt.Fprintf(t, "%s\t%d\t%.1f\t%.1f\t%.1f %%\t%.0f\t%.0f\t%.0f\n", x.GetTenant(), x.GetRequests(), x.GetPrefillSeconds(), x.GetDecodeSeconds(),
			100*(x.GetPrefillSeconds()+x.GetDecodeSeconds())/max(s.GetWallSeconds(), 1e-9), x.GetUncachedTokens(), x.GetCachedTokens(), x.GetOutputTokens())
	}
	return t.Flush()
}

// seconds is a duration that may be without end.
func seconds(d *durationpb.Duration) string {
	if d == nil {
		return "-"
	}
	return plot.Number(d.AsDuration().Seconds()) + " s"
}

// capacityChart is the curve as lines.
func capacityChart(s *accountingv1.SetCapacity, ttft time.Duration) plot.Lines {
	l := plot.Lines{
		Title: "What " + s.GetWorkerSet() + " can bear", Subtitle: fmt.Sprintf("%d workers, now %s requests/s, knee %s", s.GetWorkers(), plot.Number(s.GetRate()), plot.Number(s.GetKnee())),
		X: plot.Axis{Label: "requests", Unit: "1/s"}, Y: plot.Axis{Label: "TTFT, 90th percentile", Unit: "s", Log: true},
	}
	var curve, wanted []plot.Point
	for _, p := range s.GetCurve() {
		wanted = append(wanted, plot.Point{X: p.GetRate(), Y: ttft.Seconds()})
		if p.GetTtftP90() != nil {
			curve = append(curve, plot.Point{X: p.GetRate(), Y: p.GetTtftP90().AsDuration().Seconds()})
		}
	}
	l.Series = []plot.Series{{Name: "predicted", Points: curve}, {Name: "wanted", Points: wanted, Dashed: true}}
	return l
}

// curveBars is the curve for a terminal: one bar for some of its points.
func curveBars(s *accountingv1.SetCapacity, ttft time.Duration) plot.Bars {
	b := plot.Bars{Title: "TTFT p90 by load", Subtitle: "wanted: " + ttft.String(), Groups: []string{""}, Y: plot.Axis{Unit: "s"}}
	for i, p := range s.GetCurve() {
		if i%4 != 3 || p.GetTtftP90() == nil {
			continue
		}
		name := plot.Number(p.GetRate()) + "/s"
		if p.GetRate() <= s.GetKnee() {
			name += " fits"
		}
		b.Series = append(b.Series, plot.BarSeries{Name: name, Values: []float64{min(p.GetTtftP90().AsDuration().Seconds(), 4*ttft.Seconds())}})
	}
	return b
}

// shareBars tells who used the workers, in up to six slices of the time.
func shareBars(s *accountingv1.SetCapacity) plot.Bars {
	const most = 6
	b := plot.Bars{Title: "Part of the busy time, oldest first", Y: plot.Axis{Unit: "%"}}
	for _, t := range s.GetTenants() {
		n := len(t.GetShares())
		if n == 0 || len(b.Series) == 8 {
			continue
		}
		series := plot.BarSeries{Name: t.GetTenant()}
		groups := min(n, most)
		for g := range groups {
			from, to := g*n/groups, (g+1)*n/groups
			series.Values = append(series.Values, 100*stats.Mean(t.GetShares()[from:to]))
		}
		for len(b.Groups) < groups {
			b.Groups = append(b.Groups, fmt.Sprintf("%d of %d", len(b.Groups)+1, groups))
		}
		b.Series = append(b.Series, series)
	}
	return b
}

// simulateSeconds is how long a simulated run lasts, in its own time.
const simulateSeconds = 900

// simulated tries the traffic on workers that are as fast as those observed.
func simulated(w io.Writer, s *accountingv1.SetCapacity, scale map[string]string, ttft time.Duration) error {
	v := s.GetSpeed()
	if v.GetKvToken() <= 0 || s.GetWorkers() == 0 {
		fmt.Fprintln(w, "\nNot simulated: too little is known of the workers' memory, or there are none.")
		return nil
	}
	// Blocks of 16 tokens. What a request holds whatever its length becomes state.
	const block = 16
	blocks := max(int(1/(v.GetKvToken()*block)), 64)
	profile := engine.Profile{
		Name: s.GetWorkerSet(), BlockSize: block, Blocks: blocks, StateBlocks: min(int(v.GetKvRequest()*float64(blocks)), blocks/4),
		MaxBatchedTokens: int(v.GetBatch()), MaxSeqs: 1024,
		W: v.GetStep() - v.GetLaunch(), Ovh: v.GetLaunch(), A: v.GetToken(), Q: v.GetAttention(), S: v.GetSequence(), K: v.GetContext(),
	}
	settings := openloop.Settings{Profile: profile, Workers: int(s.GetWorkers()), Seconds: simulateSeconds, Seed: 1}
	total := 0.0
	for _, t := range s.GetTenants() {
		total += float64(t.GetRequests()) * factorOf(scale, t.GetTenant())
	}
	for _, t := range s.GetTenants() {
		tenant := openloop.Tenant{
			Name: t.GetTenant(), Rate: s.GetRate() * float64(t.GetRequests()) * factorOf(scale, t.GetTenant()) / max(total, 1e-9),
			Prompt: t.GetUncachedTokens(), Output: t.GetOutputTokens(), Spread: .5,
		}
		if c := int(t.GetCachedTokens()) / block * block; c > 0 {
			tenant.Prefixes, tenant.PrefixTokens = max(int(v.GetPrefixes()), 1)*settings.Workers, c
		}
		settings.Tenants = append(settings.Tenants, tenant)
	}
	run, err := openloop.Run(settings)
	if err != nil {
		return fmt.Errorf("simulate: %w", err)
	}
	byTenant := map[string][]float64{}
	lost := 0
	for _, r := range run.Requests {
		if r.First == 0 {
			lost++
			continue
		}
		byTenant[r.Tenant] = append(byTenant[r.Tenant], r.First-r.Sent)
	}
	fmt.Fprintf(w, "\nSimulated: %d requests in %d s on %d workers, %d unanswered at the end\n", len(run.Requests), simulateSeconds, settings.Workers, lost)
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "TENANT\tREQUESTS\tTTFT P50\tTTFT P90\t")
	for _, x := range s.GetTenants() {
		list := byTenant[x.GetTenant()]
		p90 := quantile(list, .9)
		verdict := "fits"
		if !(p90 <= ttft.Seconds()) {
			verdict = "too slow"
		}
		fmt.Fprintf(t, "%s\t%d\t%s s\t%s s\t%s\n", x.GetTenant(), len(list), plot.Number(quantile(list, .5)), plot.Number(p90), verdict)
	}
	return t.Flush()
}

func quantile(list []float64, q float64) float64 {
	slices.Sort(list)
	return stats.Quantile(list, q)
}

// factorOf is what a tenant's traffic is multiplied by.
func factorOf(scale map[string]string, tenant string) float64 {
	text := cmp.Or(scale[tenant], scale["*"], "1")
	f, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil { // was checked
		return 1
	}
	return f
}
