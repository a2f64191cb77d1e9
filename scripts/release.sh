#!/usr/bin/env bash
# Builds a release into out/release: images, charts, kinfctl for four platforms, what
# each was built of, and SHA256SUMS of all. The same commit gives the same files.
# Usage: scripts/release.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?usage: scripts/release.sh VERSION}
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
out=$PWD/out/release
rm -rf "$out"
mkdir -p "$out"
go run ./cmd/images --out "$out" --version "$version"
for platform in linux/amd64 linux/arm64 darwin/arm64 windows/amd64; do
  name=kinfctl-${platform/\//-}
  [ "${platform%/*}" = windows ] && name=$name.exe
  CGO_ENABLED=0 GOOS=${platform%/*} GOARCH=${platform#*/} go build -trimpath -buildvcs=false -ldflags "-s -w -buildid= -X github.com/kinference/kinference/deploy/charts.Version=$version" -o "$out/$name" ./cmd/kinfctl
done
go run ./cmd/images charts --out "$out" --version "$version"
(cd "$out" && rm -f SHA256SUMS && sha256sum -- * >SHA256SUMS)
wc -l <"$out/SHA256SUMS"
