{{/*
kinference.objects: what goes with a workload. A dict with
  root      the root context
  kind      of the workload
  ports     dict of name to number of the Service; empty: no Service
  headless  true: each Pod has a name
  rules     YAML list of ingress rules of the NetworkPolicy
  noEgress  true: its Pods open no connection at all
*/}}
{{- define "kinference.objects" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- if $v.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "kinference.account" $root }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "kinference.labels" $root | nindent 4 }}
  {{- with $v.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- if .ports }}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
  {{- with $v.service.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .headless }}
  clusterIP: None
  # A Pod that is not ready says so itself.
  publishNotReadyAddresses: true
  {{- else }}
  type: {{ $v.service.type | default "ClusterIP" }}
  {{- end }}
  selector:
    {{- include "kinference.selector" $root | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - { name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }} }
    {{- end }}
{{- end }}
{{- if $v.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  maxUnavailable: {{ $v.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "kinference.selector" $root | nindent 6 }}
{{- end }}
{{- if ($v.autoscaling).enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: {{ .kind }}, name: {{ include "kinference.fullname" $root }} }
  minReplicas: {{ $v.autoscaling.minReplicas }}
  maxReplicas: {{ $v.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource: { name: cpu, target: { type: Utilization, averageUtilization: {{ $v.autoscaling.cpu }} } }
    {{- with $v.autoscaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  # Up at once, down slowly: streams last minutes.
  behavior: { scaleDown: { stabilizationWindowSeconds: 300, policies: [ { type: Pods, value: 1, periodSeconds: 60 } ] } }
{{- end }}
{{- if $v.global.podMonitor.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
    {{- with $v.global.podMonitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "kinference.selector" $root | nindent 6 }}
  podMetricsEndpoints:
    - { port: admin, path: /metrics, interval: {{ $v.global.podMonitor.interval }} }
{{- end }}
{{- if $v.global.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "kinference.selector" $root | nindent 6 }}
  policyTypes: [ Ingress{{ if .noEgress }}, Egress{{ end }} ]
  {{- if .noEgress }}
  egress: []
  {{- end }}
  ingress:
    - ports: [ { port: 9990 } ]
      from:
        {{- toYaml $v.global.networkPolicy.scraper | nindent 8 }}
    {{- with .rules | default "" | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $v.networkPolicy.rules }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* kinference.from (list ROOT PORT SERVICE...): a rule that lets services of this release in. */}}
{{- define "kinference.from" -}}
{{- $root := index . 0 -}}
- ports: [ { port: {{ index . 1 }} } ]
  from:
    {{- range slice . 2 }}
    - podSelector:
        matchLabels: { app.kubernetes.io/name: {{ . }}, app.kubernetes.io/instance: {{ $root.Release.Name }} }
    {{- end }}
{{- end }}
