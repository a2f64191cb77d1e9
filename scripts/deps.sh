#!/usr/bin/env bash
# Installs what the tests use besides Go: a C compiler (race detector), libzmq
# and Node.js (independent peers), etcd (for the Kubernetes API, which kube.sh
# builds), Redis, PostgreSQL, Prometheus and the real tokenizers. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
command -v make >/dev/null || missing+=(make)
[ -e /usr/include/zmq.h ] || missing+=(libzmq3-dev)
command -v npm >/dev/null || missing+=(nodejs npm)
command -v redis-server >/dev/null || missing+=(redis-server)
command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing+=(postgresql)
command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "please install: ${missing[*]}" >&2
    exit 1
  fi
  # Tests start their own servers: packages shall not start theirs.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f "$policy"' EXIT
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
scripts/fetch-tokenizers.sh
cd test/interop/openai
if [ ! node_modules -nt package-lock.json ]; then
  npm ci --silent --no-audit --no-fund
  touch node_modules
fi
../clients/setup.sh >/dev/null
