#!/usr/bin/env bash
# A simulated fleet with the control plane in front of it, until interrupted: sends a
# first request itself, and says what to try next. Arguments go to `kinference serve`.
# CONF is the folder of resources (out/dev, which is emptied); LISTEN the address of the endpoint.
set -euo pipefail
cd "$(dirname "$0")/.."
conf=${CONF:-out/dev}
listen=${LISTEN:-127.0.0.1:8080}
[ -n "${CONF:-}" ] || rm -rf "$conf" # what is in a folder of yours stays
mkdir -p "$conf"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
bin/fleetsim --workers 3 --print-config > "$conf/fleet.tmp" &
pids+=($!)
until grep -qs InferencePool "$conf/fleet.tmp"; do
  kill -0 "${pids[0]}" # it ended: so does this
  sleep 0.1
done
mv "$conf/fleet.tmp" "$conf/fleet.yaml"
bin/kinference serve --config "$conf" --listen "$listen" --log-level warn "$@" &
pids+=($!)
ask() {
  curl -sSN -m 30 "http://$listen/v1/chat/completions" -H 'content-type: application/json' \
    -d '{"model": "Qwen/Qwen3.6-27B", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": true}'
}
until curl -fsS -o /dev/null -m 1 "http://$listen/v1/models" 2>/dev/null; do
  kill -0 "${pids[1]}"
  sleep 0.1
done
printf '\nThree simulated workers (no GPU) and Kinference in front of them. A first request:\n\n'
ask | sed -n '1,6p'
cat <<END

It serves until Ctrl-C, from the resources in $conf. From another terminal:

  curl -i http://$listen/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "Qwen/Qwen3.6-27B", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": true}'
  bin/kinfctl explain REQUEST_ID                        # of its x-request-id, after the export line above
  cp deploy/examples/policies/first.yaml $conf/      # a first policy: prompts of up to 512 tokens

END
wait "${pids[1]}"
