{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /* Names and labels. Each takes the root context, or a dict of it (root) and a role. */ -}}

{{- define "isthmus.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "isthmus.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "isthmus.labels" -}}
{{ include "isthmus.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* The headless name under which workers find the router, ready or not. */ -}}
{{- define "isthmus.registration" -}}
{{ include "isthmus.name" . }}-registration.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "isthmus.image" -}}
{{- $missing := "%s has no default: no image is published yet; name one that has the programs" -}}
{{- $repository := required (printf $missing "image.repository") .Values.image.repository -}}
{{- $tag := required (printf $missing "image.tag") .Values.image.tag -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}
