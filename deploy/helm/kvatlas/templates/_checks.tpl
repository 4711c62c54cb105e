{{/* What the schema cannot say: values that contradict each other, each with the reason. */}}
{{- define "kvatlas.checks" -}}
{{- $secrets := .Values.secrets }}
{{- $agents := .Values.agents }}
{{- $register := include "kvatlas.registerUrl" . }}
{{- if and .Values.register.url .Values.register.trial }}
{{- fail "register: url of your own, or trial: not both" }}
{{- end }}
{{- if and (gt (int .Values.gateway.replicas) 1) (not $register) }}
{{- fail "gateway.replicas: several gateways need a Valkey by which they are one: register.url, or register.trial" }}
{{- end }}
{{- if and $agents.enabled (not $register) }}
{{- fail "agents.enabled: agents need a Valkey by which gateways find them: register.url, or register.trial" }}
{{- end }}
{{- if and $register (not $secrets.keys) }}
{{- fail "register: its members need secrets.keys: the same secret proves that they are of one cluster, and makes the same keys" }}
{{- end }}
{{- if and $secrets.register (not .Values.register.url) }}
{{- fail "secrets.register: there is no register.url that has this password" }}
{{- end }}
{{- if and $secrets.tenants (not $secrets.keys) }}
{{- fail "secrets.tenants needs secrets.keys: by it salts prove whose a request is" }}
{{- end }}
{{- if and $secrets.agentTls (not $secrets.gatewayTls) }}
{{- fail "secrets.agentTls without secrets.gatewayTls: gateways without TLS are refused by agents with it" }}
{{- end }}
{{- if and $secrets.gatewayTls $agents.enabled (not $secrets.agentTls) }}
{{- fail "secrets.gatewayTls without secrets.agentTls: agents without TLS are refused by gateways with it" }}
{{- end }}
{{- if ne (empty $agents.disk.path) (eq (int $agents.disk.sizeGB) 0) }}
{{- fail "agents.disk: path and sizeGB need each other" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled $agents.enabled (not .Values.networkPolicy.nodeCIDRs) }}
{{- fail "networkPolicy.nodeCIDRs: gateways reach agents by the nodes' addresses, so name the nodes' networks, or nobody is let in" }}
{{- end }}
{{- end }}
