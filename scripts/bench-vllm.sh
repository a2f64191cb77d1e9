#!/usr/bin/env bash
# Measures the router's policies on real vLLM engines with GuideLLM and rewrites docs/benchmarks/vllm.md. On two quiet
# cores it takes about a quarter of an hour, once the environments are made. ROUNDS (3) is how often each policy runs.
set -euo pipefail
cd "$(dirname "$0")/.."
KINFERENCE_VLLM=${KINFERENCE_VLLM:-$(test/interop/vllm/env.sh vllm)}
KINFERENCE_VLLM_MODELS=${KINFERENCE_VLLM_MODELS:-$(test/interop/vllm/env.sh models)}
KINFERENCE_GUIDELLM=${KINFERENCE_GUIDELLM:-$(test/interop/vllm/env.sh guidellm)}
KINFERENCE_VLLM_PIDS=$(mktemp)
export KINFERENCE_VLLM KINFERENCE_VLLM_MODELS KINFERENCE_GUIDELLM KINFERENCE_VLLM_PIDS

# A test that is killed leaves its engines behind.
finish() {
  local group
  while read -r group; do
    if pgrep -g "$group" -f -i vllm >/dev/null; then kill -KILL -- "-$group" || true; fi
  done <"$KINFERENCE_VLLM_PIDS"
  rm -f "$KINFERENCE_VLLM_PIDS"
}
trap finish EXIT
trap 'exit 130' INT TERM

mkdir -p out bin
go test -c -o bin/bench-vllm.test ./test/interop/vllm/guidellm
# No build runs beside the engines from here on.
(cd test/interop/vllm/guidellm && "$OLDPWD/bin/bench-vllm.test" -test.run '^TestBench$' -test.v -test.timeout 90m \
  -rounds "${ROUNDS:-3}" -others 1 -docs "$OLDPWD/docs/benchmarks" -out "$OLDPWD/out")
