{{- /* The command lines, one place to compare with each program's args.rs. */ -}}

{{- define "steerage.commonArgs" -}}
- --log-level={{ .root.Values.log.level }}
- --log-format={{ .root.Values.log.format }}
- --admin-address=[::]:{{ .port }}
{{- end }}

{{- define "steerage.controllerArgs" -}}
{{- $controller := .Values.controller -}}
{{ include "steerage.commonArgs" (dict "root" . "port" $controller.adminPort) }}
- --provider={{ $controller.provider }}
- --default-steering={{ $controller.defaultSteering }}
{{- if $controller.serveUnsetClass }}
- --serve-unset-class
{{- end }}
{{- if $controller.migrateLegacyAnnotations }}
- --migrate-legacy-annotations
{{- end }}
{{- with $controller.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "steerage.agentArgs" -}}
{{- $agent := .Values.agent -}}
{{ include "steerage.commonArgs" (dict "root" . "port" $agent.adminPort) }}
- --services={{ $agent.services }}
{{- with $agent.apiServer }}
- --api-server={{ . }}
{{- end }}
{{- with $agent.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}
