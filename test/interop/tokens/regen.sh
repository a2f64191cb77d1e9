#!/usr/bin/env bash
# Writes the goldens of internal/tokens and internal/chat anew with the reference implementations (Hugging Face's Rust tokenizers
# and their Jinja) and fails if any differs from the committed one; with -update it replaces the committed ones instead.
# Needs npm; takes half a minute.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
cache=${KINFERENCE_TOKENIZERS:-$HOME/.cache/kinference/tokenizers}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir "$out/tokens" "$out/chat"

"$root/scripts/fetch-tokenizers.sh"
(cd "$here" && npm install --silent --no-audit --no-fund --no-package-lock)
(cd "$root/test" && go run ./interop/tokens/dump) |
  node "$here/tokens.mjs" "$cache" "$root/internal/fleetsim/model" "$out/tokens"
node "$here/chat.mjs" "$cache" "$root/internal/fleetsim/model" "$root/internal/chat/testdata/cases.json" "$out/chat"

if [ "${1:-}" = -update ]; then
  cp "$out"/tokens/*.golden "$root/internal/tokens/testdata/"
  cp "$out"/chat/*.golden.json "$root/internal/chat/testdata/"
  exit
fi
for golden in "$out"/tokens/*; do diff -q "$golden" "$root/internal/tokens/testdata/$(basename "$golden")"; done
for golden in "$out"/chat/*; do diff -u "$golden" "$root/internal/chat/testdata/$(basename "$golden")"; done
