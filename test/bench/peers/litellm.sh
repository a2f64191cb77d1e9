#!/usr/bin/env bash
# Serves the model $MODEL of the OpenAI-compatible upstream $UPSTREAM at $LISTEN through LiteLLM's proxy, for
# `kinbench overhead --peer litellm=test/bench/peers/litellm.sh`. Installs it once, below $KINFERENCE_CACHE or
# ~/.cache/kinference. One process, no database, no callbacks: the least that it can do for a request.
set -euo pipefail
version=1.108.7
cache=${KINFERENCE_CACHE:-$HOME/.cache/kinference}/litellm-$version
if [ ! -e "$cache/.complete" ]; then
  rm -rf "$cache"
  python3 -m venv "$cache"
  "$cache/bin/pip" install --quiet --disable-pip-version-check "litellm[proxy]==$version"
  touch "$cache/.complete"
fi
config=$(mktemp -t litellm-XXXXXX.yaml) # kinbench removes $TMPDIR
cat >"$config" <<END
model_list:
  - model_name: "$MODEL"
    litellm_params: { model: "openai/$MODEL", api_base: "http://$UPSTREAM/v1", api_key: none, timeout: 60, stream_timeout: 60 }
litellm_settings: { num_retries: 0, request_timeout: 60 }
END
# It asks for no key, as the gateway beside it does in this benchmark.
export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_LOG=ERROR LITELLM_TELEMETRY=False LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true
"$cache/bin/litellm" --config "$config" --host "${LISTEN%:*}" --port "${LISTEN##*:}" --num_workers 1 --telemetry False
