#!/usr/bin/env bash
# Installs the official clients that the tests of this folder drive: those for Node.js here, those for Python in an
# environment below $KINFERENCE_CACHE or ~/.cache/kinference, whose interpreter it prints. Idempotent and quiet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ ! node_modules -nt package-lock.json ]; then
  npm ci --silent --no-audit --no-fund >&2
  touch node_modules
fi
for python in ${KINFERENCE_PYTHON:-python3.11 python3.12 python3.13 python3}; do
  "$python" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && break
done
dir=${KINFERENCE_CACHE:-$HOME/.cache/kinference}/clients-$(sha256sum requirements.txt | cut -c1-8)-$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
if [ ! -e "$dir/.complete" ]; then
  rm -rf "$dir"
  "$python" -m venv "$dir"
  "$dir/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: -r requirements.txt >&2
  touch "$dir/.complete"
fi
echo "$dir/bin/python"
