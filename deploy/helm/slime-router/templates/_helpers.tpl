{{- define "slime-router.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "slime-router.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "slime-router.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "slime-router.selectorLabels" -}}
app.kubernetes.io/name: {{ include "slime-router.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slime-router.labels" -}}
{{ include "slime-router.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "slime-router.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "slime-router.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "slime-router.discoveryNamespace" -}}
{{- default .Release.Namespace .Values.discovery.namespace -}}
{{- end -}}

{{- define "slime-router.plugins" -}}
{{- $plugins := .Values.plugins -}}
{{- if and .Values.persistence.enabled (not (has "state" $plugins)) -}}
{{- $plugins = prepend $plugins "state" -}}
{{- end -}}
{{- join ", " $plugins -}}
{{- end -}}

{{/* A value in the router's file of flags. YAML's numbers are floats here; a whole one is written as such. */}}
{{- define "slime-router.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}

{{- define "slime-router.flag" -}}
{{- if kindIs "slice" .value -}}
{{- $items := list -}}
{{- range .value -}}{{- $items = append $items (include "slime-router.scalar" .) -}}{{- end -}}
{{ .name }} = [{{ join ", " $items }}]
{{- else -}}
{{ .name }} = {{ include "slime-router.scalar" .value }}
{{- end -}}
{{- end -}}

{{- define "slime-router.selector" -}}
{{- $words := list -}}
{{- range $key, $value := . -}}{{- $words = append $words (printf "%s=%s" $key $value) -}}{{- end -}}
[{{ join ", " $words }}]
{{- end -}}

{{- define "slime-router.config" -}}
host = 0.0.0.0
port = 30000
shutdown-grace-period-secs = {{ .Values.shutdownGracePeriodSeconds }}
{{- with include "slime-router.plugins" . }}
plugin = [{{ . }}]
{{- end }}
{{- if .Values.persistence.enabled }}
state-dir = /var/lib/slime-router/state
{{- if has "radix_cache" .Values.plugins }}
trajectory-log = /var/lib/slime-router/trajectories
{{- end }}
{{- end }}
{{- with .Values.workerUrls }}
worker-urls = [{{ join ", " . }}]
{{- end }}
{{- with .Values.discovery }}
{{- if .enabled }}
service-discovery = true
service-discovery-namespace = {{ include "slime-router.discoveryNamespace" $ }}
service-discovery-port = {{ .port }}
{{- with .selector }}
selector = {{ include "slime-router.selector" . }}
{{- end }}
{{- with .prefillSelector }}
prefill-selector = {{ include "slime-router.selector" . }}
{{- end }}
{{- with .decodeSelector }}
decode-selector = {{ include "slime-router.selector" . }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.tls.existingSecret }}
tls-cert-path = /etc/slime-router-tls/tls.crt
tls-key-path = /etc/slime-router-tls/tls.key
{{- end }}
{{- range $name, $value := .Values.config }}
{{ include "slime-router.flag" (dict "name" $name "value" $value) }}
{{- end }}
{{- end -}}
