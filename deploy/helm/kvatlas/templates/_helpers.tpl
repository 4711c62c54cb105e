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
{{- $own := dict "host" "0.0.0.0" "port" .Values.gateway.port }}
{{- if gt (int .Values.gateway.replicas) 1 }}
{{- $_ := set $own "peers" (list (printf "%s://%s-gateway-each:%v" (include "kvatlas.scheme" .) .Release.Name .Values.gateway.port)) }}
{{- end }}
{{- include "kvatlas.tables" (mustMergeOverwrite (include "kvatlas.operatorTables" . | fromJson) (include "kvatlas.secretTables" . | fromJson) (dict "gateway" $own)) }}
{{- range .Values.workers }}
[[worker]]
{{- include "kvatlas.keys" . }}
{{ end }}
{{- end }}

{{/* The agents'. */}}
{{- define "kvatlas.agentConfig" -}}
{{- $tables := pick (include "kvatlas.operatorTables" . | fromJson) "admin" "register" }}
{{- include "kvatlas.tables" (mustMergeOverwrite $tables (omit (include "kvatlas.secretTables" . | fromJson) "tenants")) }}
{{- end }}

{{/* What the values say of them; the register is called as the release, unless they say otherwise. */}}
{{- define "kvatlas.operatorTables" -}}
{{- $named := dict }}
{{- if include "kvatlas.registerUrl" . }}{{ $_ := set $named "register" (dict "name" .Release.Name) }}{{ end }}
{{- toJson (mustMergeOverwrite $named (deepCopy .Values.config)) }}
{{- end }}

{{/* Files of the secrets, as the tables of a kvatlas.toml name them, and the register. */}}
{{- define "kvatlas.secretTables" -}}
{{- $tables := dict }}
{{- with .Values.secrets.keys }}{{ $_ := set $tables "keys" (dict "secret_file" "/etc/kvatlas/secret") }}{{ end }}
{{- with .Values.secrets.tenants }}{{ $_ := set $tables "tenants" (dict "file" (include "kvatlas.tenants" $)) }}{{ end }}
{{- with .Values.secrets.admin }}{{ $_ := set $tables "admin" (dict "tokens_file" "/etc/kvatlas/admin.tokens") }}{{ end }}
{{- with .Values.secrets.gatewayTls }}
{{- $_ := set $tables "tls" (dict "ca" "/etc/kvatlas/ca.crt" "cert" "/etc/kvatlas/tls.crt" "key" "/etc/kvatlas/tls.key") }}
{{- end }}
{{- with include "kvatlas.registerUrl" . }}
{{- $_ := set $tables "register" (dict "url" .) }}
{{- with $.Values.secrets.register }}{{ $_ := set $tables.register "password_file" "/etc/kvatlas/register.password" }}{{ end }}
{{- end }}
{{- toJson $tables }}
{{- end }}

{{/* Gateways with a register write this file: what one changes, all have. */}}
{{- define "kvatlas.tenants" -}}
{{ ternary "/var/lib/kvatlas" "/etc/kvatlas" (not (empty (include "kvatlas.registerUrl" .))) }}/tenants.toml
{{- end }}

{{- define "kvatlas.registerUrl" -}}
{{ ternary (printf "valkey://%s-valkey:6379" .Release.Name) .Values.register.url .Values.register.trial }}
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
      {{- with $secrets.register }}
      - secret: {name: {{ . }}, items: [{key: register.password, path: register.password}]}
      {{- end }}
      {{- with get $secrets (printf "%sTls" $part) }}
      - secret:
          name: {{ . }}
          items: [{key: ca.crt, path: ca.crt}, {key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      {{- end }}
{{- end }}
