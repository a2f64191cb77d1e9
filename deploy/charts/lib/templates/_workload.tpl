{{/*
kinference.workload: the Deployment or StatefulSet of a service. A dict with
  root      the root context
  kind      Deployment or StatefulSet
  args      list of flags
  ports     dict of name to number, without the admin port
  env, mounts, volumes, claims    YAML lists
  replicas  number; default is that of the values
  recreate  true: never two at a time
  token     true: its Pods have a token of the Kubernetes API
  foreign   true: not one of our programs: its own image, command and probe
*/}}
{{- define "kinference.workload" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
{{- $replicas := $v.replicas -}}
{{- if hasKey . "replicas" }}{{ $replicas = .replicas }}{{ end -}}
{{- $scaled := or ($v.autoscaling).enabled (($v.autoscaling).keda).enabled -}}
{{- $tls := and $v.global.tls.enabled (not .foreign) -}}
apiVersion: apps/v1
kind: {{ .kind }}
metadata:
  {{- include "kinference.meta" $root | nindent 2 }}
spec:
  {{- if not $scaled }}
  replicas: {{ $replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "kinference.selector" $root | nindent 6 }}
  {{- if eq .kind "StatefulSet" }}
  serviceName: {{ include "kinference.fullname" $root }}
  podManagementPolicy: Parallel
  updateStrategy: { type: RollingUpdate }
  {{- with .claims }}
  volumeClaimTemplates:
    {{- . | nindent 4 }}
  {{- end }}
  {{- else if .recreate }}
  strategy: { type: Recreate }
  {{- else }}
  strategy: { type: RollingUpdate, rollingUpdate: { maxSurge: 1, maxUnavailable: 0 } }
  {{- end }}
  template:
    metadata:
      labels:
        {{- include "kinference.labels" $root | nindent 8 }}
        {{- with $v.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ $root.Chart.Name }}
        {{- if $v.global.linkerd.enabled }}
        linkerd.io/inject: enabled
        {{- end }}
        {{- with merge (deepCopy ($v.podAnnotations | default dict)) (include "kinference.opaque" . | fromYaml) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "kinference.account" $root }}
      # Only a service that asks the Kubernetes API has a token.
      automountServiceAccountToken: {{ .token | default false }}
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ add $v.drainSeconds $v.preStopSeconds 5 }}
      {{- with $v.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $v.global.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . }}
        {{- end }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        {{- with $v.global.runAsUser }}
        runAsUser: {{ int . }}
        runAsGroup: {{ int . }}
        fsGroup: {{ int . }}
        fsGroupChangePolicy: OnRootMismatch
        {{- end }}
        seccompProfile: { type: RuntimeDefault }
      containers:
        - name: {{ $root.Chart.Name }}
          image: {{ .image | default (include "kinference.image" $root) }}
          imagePullPolicy: {{ $v.global.image.pullPolicy }}
          {{- with .command }}
          command: [ {{ . }} ]
          {{- end }}
          args:
            {{- range .args }}
            - {{ . | quote }}
            {{- end }}
            {{- if not .foreign }}
            - "--admin-listen=:9990"
            - "--drain-timeout={{ $v.drainSeconds }}s"
            - "--log-level={{ $v.logLevel }}"
            {{- if $tls }}
            - "--tls-cert-file=/etc/kinference/tls/tls.crt"
            - "--tls-key-file=/etc/kinference/tls/tls.key"
            - "--tls-ca-file=/etc/kinference/tls/ca.crt"
            {{- if $v.global.tls.requireClientCert }}
            - "--tls-require-client-cert"
            {{- end }}
            {{- end }}
            {{- end }}
            {{- range $v.extraArgs }}
            - {{ . | quote }}
            {{- end }}
          {{- $env := list }}
          {{- with .env }}{{ $env = concat $env (fromYamlArray .) }}{{ end }}
          {{- $env = concat $env $v.env }}
          {{- if ($v.resources.limits).memory }}
          {{- /* The garbage collector works harder before the kernel ends the process. */}}
          {{- $env = append $env (dict "name" "GOMEMLIMIT" "valueFrom" (dict "resourceFieldRef" (dict "resource" "limits.memory"))) }}
          {{- end }}
          {{- with $env }}
          env:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            {{- range $name, $port := .ports }}
            - { name: {{ $name }}, containerPort: {{ $port }} }
            {{- end }}
            {{- if not .foreign }}
            - { name: admin, containerPort: 9990 }
            {{- end }}
          {{- with .probe }}
          {{- . | nindent 10 }}
          {{- else }}
          startupProbe: { httpGet: { path: /livez, port: admin }, periodSeconds: 1, failureThreshold: 60 }
          livenessProbe: { httpGet: { path: /livez, port: admin }, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6 }
          readinessProbe: { httpGet: { path: /readyz, port: admin }, periodSeconds: 2, timeoutSeconds: 2, failureThreshold: 2 }
          {{- end }}
          {{- if $v.preStopSeconds }}
          # Until nobody sends new requests here.
          lifecycle: { preStop: { sleep: { seconds: {{ $v.preStopSeconds }} } } }
          {{- end }}
          resources:
            {{- toYaml $v.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: { drop: [ ALL ] }
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            {{- if $tls }}
            - { name: tls, mountPath: /etc/kinference/tls, readOnly: true }
            {{- end }}
            {{- with .mounts | default "" | trim }}
            {{- . | nindent 12 }}
            {{- end }}
            {{- with $v.volumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - { name: tmp, emptyDir: { sizeLimit: 1Gi } }
        {{- if $tls }}
        - { name: tls, secret: { secretName: {{ include "kinference.tlsSecret" $root }} } }
        {{- end }}
        {{- with .volumes | default "" | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $v.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $v.topologySpread }}
      topologySpreadConstraints:
        {{- range . }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "kinference.selector" $root | nindent 14 }}
        {{- end }}
      {{- end }}
      {{- with $v.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $v.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $v.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}
