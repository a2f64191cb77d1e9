#!/usr/bin/env bash
# A simulated fleet with the control plane in front of it, until interrupted.
set -euo pipefail
cd "$(dirname "$0")/.."
conf=$(mktemp -d)
pids=()
trap 'for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done; wait; rm -rf "$conf"' EXIT
bin/fleetsim --workers 3 --time-scale 1 --print-config > "$conf/fleet.yaml.tmp" &
pids+=($!)
until grep -q kvReplay "$conf/fleet.yaml.tmp" 2>/dev/null; do kill -0 "${pids[0]}"; read -rt 0.1 <> <(:) || true; done
mv "$conf/fleet.yaml.tmp" "$conf/fleet.yaml"
bin/kinference serve --config "$conf" "$@"
