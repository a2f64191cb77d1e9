{{/*
kinference.objects: what goes with a workload. A dict with
  root      the root context
  kind      of the workload
  ports     dict of name to number of the Service; empty: no Service
  headless  true: each Pod has a name
  direct    true: clients see the addresses of the Pods, and choose one
  rules     YAML list of ingress rules of the NetworkPolicy
  foreign   true: not one of our programs: it has no certificate and no metrics of ours
  noEgress  true: its Pods open no connection but those of egress
  egress    YAML list of egress rules
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
  {{- with merge (deepCopy ($v.service.annotations | default dict)) (include "kinference.opaque" . | fromYaml) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .headless }}
  clusterIP: None
  # A Pod that is not ready says so itself.
  publishNotReadyAddresses: true
  {{- else if .direct }}
  clusterIP: None
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
{{- if and $v.global.tls.enabled $v.global.tls.certManager.issuer (not $v.global.tls.secret) (not .foreign) }}
{{- $name := include "kinference.fullname" $root }}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  secretName: {{ include "kinference.tlsSecret" $root }}
  issuerRef: { group: cert-manager.io, kind: {{ $v.global.tls.certManager.kind }}, name: {{ $v.global.tls.certManager.issuer }} }
  commonName: {{ $name }}
  dnsNames:
    {{- range list $name (printf "%s.%s" $name $root.Release.Namespace) (printf "%s.%s.svc" $name $root.Release.Namespace) (printf "%s.%s.svc.cluster.local" $name $root.Release.Namespace) }}
    - {{ . }}
    - {{ printf "*.%s" . | quote }}
    {{- end }}
    # For kubectl port-forward.
    - localhost
  usages: [ server auth, client auth ]
  duration: {{ $v.global.tls.certManager.duration }}
  privateKey: { algorithm: ECDSA, size: 256, rotationPolicy: Always }
{{- end }}
{{- $keda := (($v.autoscaling).keda).enabled }}
{{- if $keda }}
---
# It makes a HorizontalPodAutoscaler itself.
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  scaleTargetRef: { apiVersion: apps/v1, kind: {{ .kind }}, name: {{ include "kinference.fullname" $root }} }
  minReplicaCount: {{ $v.autoscaling.minReplicas }}
  maxReplicaCount: {{ $v.autoscaling.maxReplicas }}
  # What it cannot measure changes nothing.
  fallback: { failureThreshold: 3, replicas: {{ $v.autoscaling.minReplicas }}, behavior: currentReplicasIfHigher }
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: { scaleDown: { stabilizationWindowSeconds: 300, policies: [ { type: Pods, value: 1, periodSeconds: 60 } ] } }
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ required "autoscaling.keda.prometheus is needed" $v.autoscaling.keda.prometheus }}
        query: {{ tpl $v.autoscaling.keda.query $root | quote }}
        threshold: {{ $v.autoscaling.keda.threshold | quote }}
    - type: cpu
      metricType: Utilization
      metadata: { value: {{ $v.autoscaling.cpu | quote }} }
    {{- with $v.autoscaling.keda.triggers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- if and ($v.autoscaling).enabled (not $keda) }}
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
{{- if and $v.global.podMonitor.enabled (not .foreign) }}
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
  {{- $egress := concat (.egress | default "" | fromYamlArray) $v.networkPolicy.egress }}
  {{- if $v.global.linkerd.enabled }}
  {{- $egress = append $egress (dict "to" (list (dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" "linkerd"))))) }}
  {{- end }}
  egress:
    {{- toYaml $egress | nindent 4 }}
  {{- end }}
  ingress:
    {{- if not .foreign }}
    {{- with $v.global.networkPolicy.scraper }}
    - ports: {{ include "kinference.ports" (list $root 9990) }}
      from:
        {{- toYaml . | nindent 8 }}
    {{- end }}
    {{- end }}
    {{- with .rules | default "" | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $v.networkPolicy.rules }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* kinference.opaque: how a Linkerd mesh knows a server that speaks no HTTP. */}}
{{- define "kinference.opaque" -}}
{{- if and .foreign .root.Values.global.linkerd.enabled }}
config.linkerd.io/opaque-ports: {{ .ports.client | quote }}
{{- end }}
{{- end }}

{{/*
kinference.ports (list ROOT PORT...): the ports of a rule of a NetworkPolicy. In a
Linkerd mesh what comes for any port comes to that of the proxy.
*/}}
{{- define "kinference.ports" -}}
{{- $ports := rest . -}}
{{- if (first .).Values.global.linkerd.enabled }}{{ $ports = append $ports 4143 }}{{ end -}}
[ {{ range $i, $port := $ports }}{{ if $i }}, {{ end }}{ port: {{ $port }} }{{ end }} ]
{{- end }}

{{/* kinference.from (list ROOT PORT SERVICE...): a rule that lets services of this release in. */}}
{{- define "kinference.from" -}}
{{- $root := index . 0 -}}
- ports: {{ include "kinference.ports" (slice . 0 2) }}
  from:
    {{- range slice . 2 }}
    - podSelector:
        matchLabels: { app.kubernetes.io/name: {{ . }}, app.kubernetes.io/instance: {{ $root.Release.Name }} }
    {{- end }}
{{- end }}
