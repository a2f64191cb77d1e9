#!/usr/bin/env bash
# Measures the classifier on labelled files: those given, or the part of the labelled folder that the trainer has not seen.
# With PRESIDIO=1, Presidio reads the same texts: its packages are installed into out/presidio once.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p bin out
CGO_ENABLED=0 go build -o bin/ ./cmd/kinfctl
if [ $# -eq 0 ]; then
  data=${CLASSIFIER_DATA:-../shared/data/classifier}
  set -- "$data/pii_dev.jsonl" "$data/complexity_dev.jsonl" "$data/injection_dev.jsonl"
  bin/kinfctl classifier evaluate --held-out "$@" | tee out/classifier.md
else
  bin/kinfctl classifier evaluate "$@" | tee out/classifier.md
fi
if [ "${PRESIDIO:-}" = 1 ]; then
  if [ ! -x out/presidio/bin/python ]; then
    python3 -m venv out/presidio
    out/presidio/bin/pip install --quiet -r test/interop/presidio/requirements.txt
  fi
  out/presidio/bin/python test/interop/presidio/compare.py "$@" | tee -a out/classifier.md
fi
