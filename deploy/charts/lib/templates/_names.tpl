{{/* Names, labels and addresses. */}}

{{/* kinference.of (list ROOT SERVICE): the name of a service's objects in this release. */}}
{{- define "kinference.of" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s" (trunc 40 $root.Release.Name | trimSuffix "-") (index . 1) -}}
{{- end }}

{{- define "kinference.fullname" -}}
{{- include "kinference.of" (list . .Chart.Name) -}}
{{- end }}

{{- define "kinference.account" -}}
{{- .Values.serviceAccount.name | default (include "kinference.fullname" .) -}}
{{- end }}

{{/* kinference.selector: what a service's Pods are selected by; it never changes. */}}
{{- define "kinference.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kinference.labels" -}}
{{ include "kinference.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Values.global.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kinference
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kinference.image" -}}
{{- $tag := .Values.image.tag | default .Values.global.image.tag | default .Chart.AppVersion -}}
{{- with .Values.global.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}:{{ $tag }}
{{- end }}

{{/* kinference.meta ROOT: name, namespace and labels of an object. */}}
{{- define "kinference.meta" -}}
name: {{ include "kinference.fullname" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "kinference.labels" . | nindent 2 }}
{{- end }}

{{/* kinference.natsEnv (list ROOT VARIABLE): the URL of NATS, from the values or a Secret. */}}
{{- define "kinference.natsEnv" -}}
{{- $root := index . 0 -}}
{{- $nats := $root.Values.global.nats -}}
- name: {{ index . 1 }}
{{- if $nats.embedded }}
  value: nats://{{ include "kinference.of" (list $root "nats") }}:4222
{{- else if $nats.urlSecret.name }}
  valueFrom: { secretKeyRef: { name: {{ $nats.urlSecret.name }}, key: {{ $nats.urlSecret.key }} } }
{{- else }}
  value: {{ required "global.nats.url or global.nats.urlSecret.name is needed" $nats.url | quote }}
{{- end }}
{{- $prefix := trimSuffix "_URL" (index . 1) }}
{{- if $nats.caSecret }}
- name: {{ $prefix }}_CA_FILE
  value: /etc/kinference/nats-ca/ca.crt
{{- end }}
{{- if $nats.clientSecret }}
- name: {{ $prefix }}_CERT_FILE
  value: /etc/kinference/nats-client/tls.crt
- name: {{ $prefix }}_KEY_FILE
  value: /etc/kinference/nats-client/tls.key
{{- end }}
{{- if $nats.credsSecret.name }}
- name: {{ $prefix }}_CREDS_FILE
  value: /etc/kinference/nats-creds/{{ $nats.credsSecret.key }}
{{- end }}
{{- end }}

{{/* kinference.url (list ROOT SERVICE PORT): the URL at which other services reach one. */}}
{{- define "kinference.url" -}}
{{- $root := index . 0 -}}
{{ ternary "https" "http" $root.Values.global.tls.enabled }}://{{ include "kinference.of" (list $root (index . 1)) }}:{{ index . 2 }}
{{- end }}

{{/* kinference.tlsSecret ROOT: the Secret with a service's certificate. */}}
{{- define "kinference.tlsSecret" -}}
{{- .Values.global.tls.secret | default (printf "%s-tls" (include "kinference.fullname" .)) -}}
{{- end }}

{{- define "kinference.natsVolumes" -}}
{{- with .Values.global.nats.caSecret }}
- name: nats-ca
  secret: { secretName: {{ . }}, items: [ { key: ca.crt, path: ca.crt } ] }
{{- end }}
{{- with .Values.global.nats.clientSecret }}
- { name: nats-client, secret: { secretName: {{ . }} } }
{{- end }}
{{- with .Values.global.nats.credsSecret.name }}
- { name: nats-creds, secret: { secretName: {{ . }} } }
{{- end }}
{{- end }}

{{- define "kinference.natsMounts" -}}
{{- if .Values.global.nats.caSecret }}
- { name: nats-ca, mountPath: /etc/kinference/nats-ca, readOnly: true }
{{- end }}
{{- if .Values.global.nats.clientSecret }}
- { name: nats-client, mountPath: /etc/kinference/nats-client, readOnly: true }
{{- end }}
{{- if .Values.global.nats.credsSecret.name }}
- { name: nats-creds, mountPath: /etc/kinference/nats-creds, readOnly: true }
{{- end }}
{{- end }}

{{/* kinference.claim (list NAME SIZE STORAGECLASS): a volume of each Pod of a StatefulSet. */}}
{{- define "kinference.claim" -}}
- metadata: { name: {{ index . 0 }} }
  spec:
    accessModes: [ ReadWriteOnce ]
    {{- with index . 2 }}
    storageClassName: {{ . }}
    {{- end }}
    resources: { requests: { storage: {{ index . 1 }} } }
{{- end }}
