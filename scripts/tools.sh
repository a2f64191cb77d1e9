#!/usr/bin/env bash
# Puts the pinned tools into bin/, from a cache folder keyed by their go.sum:
# buf takes minutes to build.
set -euo pipefail
cd "$(dirname "$0")/.."
key=$(cat tools/go.sum tools/buf/go.sum | sha256sum | cut -c1-16)-$(go env GOVERSION)
cache=${KINFERENCE_CACHE:-$HOME/.cache/kinference}/tools/$key
if [ ! -x "$cache/buf" ]; then
  mkdir -p "$cache"
  GOBIN=$cache GOWORK=off go -C tools install tool
  GOBIN=$cache GOWORK=off go -C tools/buf install tool
fi
mkdir -p bin
cp -u "$cache"/* bin/
