#!/usr/bin/env bash
# A simulated fleet with the control plane in front of it, until interrupted.
# Arguments go to `kinference serve`.
set -euo pipefail
cd "$(dirname "$0")/.."
conf=$(mktemp -d)
bin/fleetsim --workers 3 --print-config > "$conf/fleet.tmp" &
fleet=$!
trap 'kill "$fleet" 2>/dev/null || true; wait; rm -rf "$conf"' EXIT
until grep -qs InferencePool "$conf/fleet.tmp"; do
  kill -0 "$fleet" # it ended: so does this
  sleep 0.1
done
mv "$conf/fleet.tmp" "$conf/fleet.yaml"
cat <<'END'
Three simulated workers (no GPU) and Kinference in front of them; Ctrl-C ends both. From another terminal:

  curl -i http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \
    -d '{"model": "Qwen/Qwen3.6-27B", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": true}'
  bin/kinfctl explain REQUEST_ID    # of the answer's x-request-id, after the export line that follows

END
bin/kinference serve --config "$conf" --log-level warn "$@"
