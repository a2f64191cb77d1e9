#!/usr/bin/env bash
# Puts the pinned tools into bin/, from a cache folder keyed by their go.sum:
# buf takes minutes to build.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p bin
for module in tools tools/buf; do
  key=$(sha256sum <"$module/go.sum" | cut -c1-16)-$(go env GOVERSION)
  cache=${KINFERENCE_CACHE:-$HOME/.cache/kinference}/$module/$key
  if [ ! -e "$cache/done" ]; then
    mkdir -p "$cache/bin"
    GOBIN=$cache/bin GOWORK=off go -C "$module" install tool
    touch "$cache/done"
  fi
  cp -u "$cache"/bin/* bin/
done
