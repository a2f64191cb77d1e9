#!/usr/bin/env bash
# Writes what is generated from the types of api/v1alpha1 below the folder $1
# (default: this tree): deepcopy code, the CustomResourceDefinitions that the
# binaries carry, and those of the chart.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(cd "${1:-.}" && pwd)
charts=$out/deploy/charts/kinference-crds/templates
mkdir -p "$out/api/v1alpha1" "$out/api/crd" "$charts"
gen=$PWD/bin/controller-gen
cd api
GOWORK=off "$gen" object paths=./v1alpha1 output:object:dir="$out/api/v1alpha1"
GOWORK=off "$gen" crd:allowDangerousTypes=true paths=./v1alpha1 output:crd:dir="$out/api/crd"
# Whoever removes the chart keeps the resources.
for f in "$out"/api/crd/*.yaml; do
  sed 's|^  annotations:$|&\n    helm.sh/resource-policy: keep|' "$f" >"$charts/${f##*/kinference.buoyant.io_}"
done
