#!/usr/bin/env bash
# Checks our parts against other implementations: the Rust tokenizers and the
# JavaScript template engine (goldens are made anew and compared), libzmq, and
# the official clients of OpenAI's and Anthropic's APIs.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/deps.sh
export KINFERENCE_INTEROP=1
test/interop/tokens/regen.sh
go test -count=1 ./test/interop/... ./internal/tokens ./internal/chat
go test -count=1 -run TestServeInFrontOfExistingWorkers ./test/acceptance
