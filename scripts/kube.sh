#!/usr/bin/env bash
# Builds what the Kubernetes tests run, of the versions in tools/kube/go.mod and
# once for each, into ~/.cache/kinference: kube-VERSION (kube-apiserver,
# kube-controller-manager, kubectl), etcd-VERSION, kwok-VERSION and, of tools/helm,
# helm-VERSION. The first build takes a quarter of an hour of one core; it is meant
# to run beside something else.
set -euo pipefail
cd "$(dirname "$0")/../tools/kube"
export GOWORK=off CGO_ENABLED=0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kinference
mkdir -p "$cache"
exec 9>"$cache/.kube.lock"
flock 9 # another build is under way

# build PROGRAM PACKAGE [FLAGS] builds a program that is not there yet.
build() {
  [ -x "$cache/$1" ] && return
  mkdir -p "$(dirname "$cache/$1")"
  nice -n 15 go build -trimpath -ldflags "-s -w ${3:-}" -o "$cache/$1.new" "$2"
  mv "$cache/$1.new" "$cache/$1"
}
version() { go list -m -f '{{.Version}}' "$1"; }

kube=$(version k8s.io/kubernetes)
minor=${kube#v1.}
at=k8s.io/component-base/version
for name in kube-apiserver kube-controller-manager kubectl; do
  build "kube-$kube/$name" "k8s.io/kubernetes/cmd/$name" "-X $at.gitVersion=$kube -X $at.gitMajor=1 -X $at.gitMinor=${minor%%.*}"
done
build "etcd-$(version go.etcd.io/etcd/server/v3)/etcd" go.etcd.io/etcd/server/v3
build "kwok-$(version sigs.k8s.io/kwok)/kwok" sigs.k8s.io/kwok/cmd/kwok

cd ../helm
build "helm-$(version helm.sh/helm/v4)/helm" helm.sh/helm/v4/cmd/helm
