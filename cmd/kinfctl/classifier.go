package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kinference/kinference/internal/classify"
	"github.com/kinference/kinference/internal/classify/evaluate"
)

func classifierCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "classifier", Short: "Measure the classifier on labelled files, or calibrate it on your own outcomes"}
	cmd.AddCommand(evaluateCommand(), calibrateCommand())
	return cmd
}

func evaluateCommand() *cobra.Command {
	var heldOut bool
	var misses int
	var calibration string
	cmd := &cobra.Command{
		Use:   "evaluate FILE.jsonl...",
		Short: "Print precision, recall, F2, false alarms, areas under curves and CPU time on labelled files",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			set := classify.Settings{CacheBytes: -1}
			if calibration != "" {
				c, err := classify.ReadCalibration(calibration)
				if err != nil {
					return err
				}
				set.Complexity = c
			}
			c, err := classify.New(set)
			if err != nil {
				return err
			}
			run := evaluate.Settings{}
			if heldOut {
				run.Keep = evaluate.HeldOutRow
			}
			if misses > 0 {
				run.Misses, run.MissesTo = misses, cmd.ErrOrStderr()
			}
			var rows []evaluate.Row
			bad := 0
			for _, path := range args {
				r, n, err := evaluate.Read(path)
				if err != nil {
					return err
				}
				rows, bad = append(rows, r...), bad+n
			}
			if len(rows) == 0 {
				return fmt.Errorf("no labelled rows, %d unreadable lines", bad)
			}
			report, err := evaluate.Run(cmd.Context(), c, rows, run)
			if err != nil {
				return err
			}
			report.Bad = bad
			report.Write(cmd.OutOrStdout())
			return nil
		},
	}
	cmd.Flags().BoolVar(&heldOut, "held-out", false, "only rows that the trainer has not seen")
	cmd.Flags().IntVar(&misses, "misses", 0, "print so many misses and false findings of each kind, with text of the files, to standard error")
	cmd.Flags().StringVar(&calibration, "calibration", "", "file that calibrate wrote; empty: the embedded calibration")
	return cmd
}

// outcome is one line of an outcome log: a prompt, or the raw score that was
// kept instead of it, and whether the small model's answer was good enough.
type outcome struct {
	Prompt *string  `json:"prompt"`
	Raw    *float64 `json:"raw"`
	Failed *bool    `json:"failed"`
}

// maxOutcome bounds one line of an outcome log.
const maxOutcome = 16 << 20

func calibrateCommand() *cobra.Command {
	var out string
	var low, high float64
	cmd := &cobra.Command{
		Use:   "calibrate OUTCOMES.jsonl",
		Short: "Write a calibration of complexity from outcomes",
		Long: `Write a calibration of complexity from outcomes.

Each line of the file is {"prompt": "...", "failed": true}, or, where prompts must
not be kept, {"raw": 1.23, "failed": true} with the raw score. At least 50 usable
lines are needed. Give the result to the classifier as --calibration-file.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := os.Open(args[0])
			if err != nil {
				return fmt.Errorf("read outcomes: %w", err)
			}
			defer f.Close()
			list, bad, err := readOutcomes(f)
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "%d outcomes, %d unusable lines\n", len(list), bad)
			if len(list) < 50 {
				return fmt.Errorf("%d usable outcomes: want at least 50", len(list))
			}
			c := evaluate.Calibrate(list)
			if low > 0 {
				c.Low = float32(low)
			}
			if high > 0 {
				c.High = float32(high)
			}
			if err := c.Validate(); err != nil {
				return err
			}
			raw, err := json.MarshalIndent(c, "", "  ")
			if err != nil {
				return err
			}
			raw = append(raw, '\n')
			if out == "" {
				_, err = cmd.OutOrStdout().Write(raw)
				return err
			}
			if err := os.WriteFile(out, raw, 0o644); err != nil {
				return fmt.Errorf("write calibration: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&out, "output", "o", "", "file to write; empty: standard output")
	cmd.Flags().Float64Var(&low, "low", 0, "probability of failure below which a prompt is low; 0: 0.6 of the mean")
	cmd.Flags().Float64Var(&high, "high", 0, "probability of failure from which on a prompt is high; 0: 1.5 of the mean")
	return cmd
}

func readOutcomes(r io.Reader) (list []evaluate.Outcome, bad int, err error) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxOutcome)
	for s.Scan() {
		var o outcome
		if json.Unmarshal(s.Bytes(), &o) != nil || o.Failed == nil || o.Prompt == nil && o.Raw == nil {
			bad++
			continue
		}
		x := evaluate.Outcome{Failed: *o.Failed}
		if o.Raw != nil {
			x.Raw = *o.Raw
		} else {
			raw, _, err := classify.RawScores(*o.Prompt)
			if err != nil {
				return nil, bad, err
			}
			x.Raw = float64(raw)
		}
		list = append(list, x)
	}
	if err := s.Err(); err != nil {
		return nil, bad, fmt.Errorf("read outcomes: %w", err)
	}
	return list, bad, nil
}
