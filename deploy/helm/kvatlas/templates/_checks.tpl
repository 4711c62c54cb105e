{{/* What the schema cannot say: values that contradict each other, each with the reason. */}}
{{- define "kvatlas.checks" -}}
{{- $secrets := .Values.secrets }}
{{- $agents := .Values.agents }}
{{- if and (gt (int .Values.gateway.replicas) 1) (not $secrets.keys) }}
{{- fail "gateway.replicas: several gateways need secrets.keys: without the same secret each makes keys of its own" }}
{{- end }}
{{- if and $agents.nodes (not $secrets.keys) }}
{{- fail "agents.nodes: agents need secrets.keys: their keys must be the gateways'" }}
{{- end }}
{{- if and $secrets.tenants (not $secrets.keys) }}
{{- fail "secrets.tenants needs secrets.keys: by it salts prove whose a request is" }}
{{- end }}
{{- if and $secrets.agentTls (not $secrets.gatewayTls) }}
{{- fail "secrets.agentTls without secrets.gatewayTls: gateways without TLS are refused by agents with it" }}
{{- end }}
{{- if and $secrets.gatewayTls $agents.nodes (not $secrets.agentTls) }}
{{- fail "secrets.gatewayTls without secrets.agentTls: agents without TLS are refused by gateways with it" }}
{{- end }}
{{- if ne (empty $agents.disk.path) (eq (int $agents.disk.sizeGB) 0) }}
{{- fail "agents.disk: path and sizeGB need each other" }}
{{- end }}
{{- if and $agents.peers (lt (len $agents.nodes) 2) }}
{{- fail "agents.peers: there is nobody to read from: name at least two agents.nodes" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled $agents.nodes (not $agents.hostNetwork) (not .Values.networkPolicy.nodeCIDRs) }}
{{- fail "networkPolicy.nodeCIDRs: gateways reach agents by the nodes' addresses, so name the nodes' networks, or nobody is let in" }}
{{- end }}
{{- $known := list }}
{{- range .Values.workers }}{{ $known = append $known .name }}{{ end }}
{{- range $node := $agents.nodes }}
{{- range $node.workers }}
{{- if not (has . $known) }}
{{- fail (printf "agents.nodes: %s: there is no worker %q" $node.name .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
