{{- define "steerage.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "steerage.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "steerage.labels" -}}
{{ include "steerage.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: steerage
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "steerage.metadata" -}}
name: {{ include "steerage.fullname" .root }}-{{ .component }}
labels:
  {{- include "steerage.labels" . | nindent 2 }}
{{- end }}

{{- define "steerage.image" -}}
{{ .root.Values.image.registry }}/{{ .component }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- /* What all our containers have in common: {root, component, port}, of the agent healthzPort, of the edge peersPort. */ -}}
{{- define "steerage.container" -}}
name: {{ .component }}
image: {{ include "steerage.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
ports:
  - name: admin
    containerPort: {{ .port }}
  {{- with .healthzPort }}
  - name: healthz
    containerPort: {{ . }}
  {{- end }}
  {{- with .peersPort }}
  - name: peers
    containerPort: {{ . }}
  {{- end }}
livenessProbe:
  httpGet: {path: /livez, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 2
  timeoutSeconds: 5
{{- end }}

{{- /* Binds a role to the component's account: {root, component, kind}. */ -}}
{{- define "steerage.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  {{- include "steerage.metadata" . | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ include "steerage.fullname" .root }}-{{ .component }}
subjects:
  - kind: ServiceAccount
    name: {{ include "steerage.fullname" .root }}-{{ .component }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}
