{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /*
One pod of a role; all roles are alike but for their arguments and how long they may take to start.
Takes a dict: root, role (router, prefill, decode), args (list), startSeconds (multiple of 5).
*/ -}}
{{- define "isthmus.pod" -}}
{{- $values := index .root.Values .role -}}
{{- if not .root.Values.checkpoint.volume -}}
{{- fail "checkpoint.volume has no default: name the volume source that holds the model" -}}
{{- end -}}
metadata:
  labels:
    {{- include "isthmus.selector" . | nindent 4 }}
  annotations:
    checksum/config: {{ $values.config | toJson | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
  containers:
    - name: {{ .role }}
      image: {{ include "isthmus.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [isthmus-{{ .role }}]
      args:
        - --config
        - /etc/isthmus/{{ .role }}.json
        - --set
        - listen=0.0.0.0:{{ $values.ports.grpc }}
        - --set
        - metrics_listen=0.0.0.0:{{ $values.ports.metrics }}
        - --set
        - checkpoint={{ .root.Values.checkpoint.mountPath }}
        {{- range .args }}
        - --set
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
      ports:
        - {name: grpc, containerPort: {{ $values.ports.grpc }}}
        - {name: metrics, containerPort: {{ $values.ports.metrics }}}
      startupProbe:
        grpc: {port: {{ $values.ports.grpc }}, service: liveness}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ div .startSeconds 5 }}
      livenessProbe:
        grpc: {port: {{ $values.ports.grpc }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        grpc: {port: {{ $values.ports.grpc }}, service: readiness}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 1
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      securityContext:
        {{- toYaml .root.Values.containerSecurityContext | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/isthmus, readOnly: true}
        - name: checkpoint
          mountPath: {{ .root.Values.checkpoint.mountPath }}
          {{- with .root.Values.checkpoint.subPath }}
          subPath: {{ . | quote }}
          {{- end }}
          readOnly: true
  volumes:
    - name: config
      configMap: {name: {{ include "isthmus.name" .root }}-{{ .role }}}
    - name: checkpoint
      {{- with .root.Values.checkpoint.volume }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
