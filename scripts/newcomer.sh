#!/usr/bin/env bash
# Times a newcomer's path (docs/quickstart.md) on a fresh clone: to the first token with
# one command, and to the first refusal by a policy with three. COLD=1 builds with an
# empty Go build cache. Writes rows to out/newcomer.json.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tmp=$(mktemp -d)
make=
trap '[ -z "$make" ] || kill -INT -- "-$make" 2>/dev/null || true; wait; rm -rf "$tmp"' EXIT
git clone -q "$root" "$tmp/kinference"
cd "$tmp/kinference"
scenario=warm
if [ -n "${COLD:-}" ]; then
  scenario=cold
  export GOCACHE=$tmp/cache
fi
seconds() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }'; }
start=$(date +%s.%N)
set -m
LISTEN=127.0.0.1:${PORT:-18080} make dev > out.txt 2>&1 &
make=$!
set +m
# again waits for the next look, and ends it all if `make dev` has ended.
again() {
  kill -0 "$make" 2>/dev/null || { cat out.txt; echo "make dev has ended" >&2; exit 1; }
  sleep 0.05
}
until grep -q '^data: ' out.txt; do again; done
first=$(seconds "$start")
until grep -q 'a first policy' out.txt; do again; done
cp deploy/examples/policies/first.yaml out/dev/
long=$(printf 'word %.0s' $(seq 2000))
until [ "$(curl -sS -o answer.json -w '%{http_code}' "http://127.0.0.1:${PORT:-18080}/v1/chat/completions" -H 'content-type: application/json' \
  -d "{\"model\": \"Qwen/Qwen3.6-27B\", \"messages\": [{\"role\": \"user\", \"content\": \"$long\"}], \"max_tokens\": 1}")" = 403 ]; do again; done
refused=$(seconds "$start")
grep -q 'prompts over 512 tokens' answer.json
mkdir -p "$root/out"
cat > "$root/out/newcomer.json" <<END
[
  {"suite": "newcomer", "scenario": "$scenario", "policy": "kinference", "metric": "first_token", "value": $first, "unit": "s"},
  {"suite": "newcomer", "scenario": "$scenario", "policy": "kinference", "metric": "first_refusal", "value": $refused, "unit": "s"}
]
END
echo "$scenario: first token after $first s (make dev), first refusal by a policy after $refused s (make dev, cp, curl)"
cat answer.json
