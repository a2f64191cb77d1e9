#!/usr/bin/env bash
# Installs what the tests need and runs them all. On a machine that has it all
# this adds seconds; a fresh one also builds the tools and the race build.
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - start)); }

scripts/deps.sh
scripts/kube.sh & # beside what follows: the first build is long
kube=$!
export KINFERENCE_INTEROP=1 # a peer that is missing fails its test instead of skipping it

say "tools"
scripts/tools.sh

say "proto: lint, breaking changes; generated code is current"
bin/buf lint
bin/buf breaking --against proto/baseline.binpb
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
bin/buf generate -o "$out"
diff -r "$out/proto/gen" proto/gen
scripts/api.sh "$out"
(cd "$out" && find api deploy -type f) | while read -r f; do diff "$out/$f" "$f"; done

say "format and vet"
unformatted=$(gofmt -l $(git ls-files '*.go' | grep -v '^proto/gen/'))
[ -z "$unformatted" ] || { echo "gofmt: $unformatted"; exit 1; }
go vet work

say "modules build on their own"
for dir in $(go list -m -f '{{.Dir}}'); do
  (cd "$dir" && GOWORK=off go mod tidy -diff >/dev/null) || { echo "$dir: run make tidy"; exit 1; }
done

say "kube-apiserver"
wait "$kube"

say "tests with the race detector"
go test -race -timeout 20m work
