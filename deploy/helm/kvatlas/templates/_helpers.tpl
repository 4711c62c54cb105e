{{/* Labels of a part. Called with (list $ "gateway"). */}}
{{- define "kvatlas.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvatlas.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* What selects its pods: never changes. */}}
{{- define "kvatlas.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kvatlas
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "kvatlas.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* A pod that asks Kubernetes for nothing. Called with (list $ "gateway"). */}}
{{- define "kvatlas.pod" -}}
{{- $root := index . 0 -}}
serviceAccountName: {{ $root.Release.Name }}-{{ index . 1 }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Of every container. */}}
{{- define "kvatlas.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvatlas.scheme" -}}
{{ ternary "https" "http" (not (empty .Values.secrets.gatewayTls)) }}
{{- end }}

{{/* Tables of a kvatlas.toml. JSON's strings, numbers, booleans and arrays are TOML's, too. */}}
{{- define "kvatlas.tables" -}}
{{- range $table, $keys := . }}
{{- if $keys }}
[{{ $table }}]
{{- include "kvatlas.keys" $keys }}
{{ end }}
{{- end }}
{{- end }}

{{- define "kvatlas.keys" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{/* The gateways' kvatlas.toml. */}}
{{- define "kvatlas.gatewayConfig" -}}
{{- $address := dict "gateway" (dict "host" "0.0.0.0" "port" .Values.gateway.port) }}
{{- include "kvatlas.tables" (mustMergeOverwrite (deepCopy .Values.config) (include "kvatlas.secretTables" . | fromJson) $address) }}
{{- range .Values.workers }}
[[worker]]
{{- include "kvatlas.keys" . }}
{{ end }}
{{- range .Values.agents.nodes }}
[[agent]]
name = {{ toJson .name }}
url = "{{ include "kvatlas.scheme" $ }}://{{ .address }}:{{ $.Values.agents.port }}"
workers = {{ toJson .workers }}
{{- if $.Values.agents.object }}
store = "object"
{{- end }}
{{ end }}
{{- end }}

{{/* The agents'. */}}
{{- define "kvatlas.agentConfig" -}}
{{- $admin := dict "admin" (get .Values.config "admin" | default dict) }}
{{- $files := omit (include "kvatlas.secretTables" . | fromJson) "tenants" }}
{{- include "kvatlas.tables" (mustMergeOverwrite (deepCopy $admin) $files) }}
{{- end }}

{{/* Files of the secrets, as [keys], [tenants], [admin] and [tls] name them. */}}
{{- define "kvatlas.secretTables" -}}
{{- $tables := dict }}
{{- with .Values.secrets.keys }}{{ $_ := set $tables "keys" (dict "secret_file" "/etc/kvatlas/secret") }}{{ end }}
{{- with .Values.secrets.tenants }}{{ $_ := set $tables "tenants" (dict "file" "/etc/kvatlas/tenants.toml") }}{{ end }}
{{- with .Values.secrets.admin }}{{ $_ := set $tables "admin" (dict "tokens_file" "/etc/kvatlas/admin.tokens") }}{{ end }}
{{- with .Values.secrets.gatewayTls }}
{{- $_ := set $tables "tls" (dict "ca" "/etc/kvatlas/ca.crt" "cert" "/etc/kvatlas/tls.crt" "key" "/etc/kvatlas/tls.key") }}
{{- end }}
{{- toJson $tables }}
{{- end }}

{{/* All that is in a pod's /etc/kvatlas. Called with (list $ "gateway"). */}}
{{- define "kvatlas.files" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $secrets := $root.Values.secrets -}}
- name: files
  projected:
    defaultMode: 0440
    sources:
      - configMap:
          name: {{ $root.Release.Name }}-{{ $part }}
      {{- with $secrets.keys }}
      - secret: {name: {{ . }}, items: [{key: secret, path: secret}]}
      {{- end }}
      {{- if eq $part "gateway" }}
      {{- with $secrets.tenants }}
      - secret: {name: {{ . }}, items: [{key: tenants.toml, path: tenants.toml}]}
      {{- end }}
      {{- end }}
      {{- with $secrets.admin }}
      - secret: {name: {{ . }}, items: [{key: admin.tokens, path: admin.tokens}]}
      {{- end }}
      {{- with get $secrets (printf "%sTls" $part) }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- end }}
{{- end }}
