#!/usr/bin/env bash
# Runs every fuzz target for the given time each, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
for file in $(git ls-files '*_test.go'); do
  for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
    echo "== $(dirname "$file") $target"
    go test -run '^$' -fuzz "^$target\$" -fuzztime "${1:-60s}" "./$(dirname "$file")"
  done
done
