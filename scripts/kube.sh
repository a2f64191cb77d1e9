#!/usr/bin/env bash
# Builds kube-apiserver and kubectl of the version in tools/kube/go.mod, once for
# each version, into ~/.cache/kinference/kube-VERSION. The first build takes 13
# minutes of one core; it is meant to run beside something else.
set -euo pipefail
cd "$(dirname "$0")/../tools/kube"
export GOWORK=off CGO_ENABLED=0
version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
out=${XDG_CACHE_HOME:-$HOME/.cache}/kinference/kube-$version
mkdir -p "$out"
exec 9>"$out/.lock"
flock 9 # another build is under way
minor=${version#v1.}
flags="-s -w -X k8s.io/component-base/version.gitVersion=$version"
flags+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
for name in kube-apiserver kubectl; do
  [ -x "$out/$name" ] && continue
  nice -n 15 go build -trimpath -ldflags "$flags" -o "$out/$name.new" "k8s.io/kubernetes/cmd/$name"
  mv "$out/$name.new" "$out/$name"
done
