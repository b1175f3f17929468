{{- define "reprise.namespace" -}}
{{ .Values.namespace | default .Release.Namespace }}
{{- end }}

{{- define "reprise.image" -}}
{{ .Values.image.name }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "reprise.selectorLabels" -}}
app.kubernetes.io/name: reprise
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "reprise.labels" -}}
{{ include "reprise.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "reprise.listen" -}}
{{- $address := .Values.metrics.address -}}
{{ if contains ":" $address }}[{{ $address }}]{{ else }}{{ $address }}{{ end }}:{{ .Values.metrics.port }}
{{- end }}

{{/* The config file. */}}
{{- define "reprise.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if gt (int64 (dig "back-off" 10 $config)) (int64 (dig "back-off-max" 300 $config)) -}}
{{- fail "config: back-off is longer than back-off-max" -}}
{{- end -}}
{{- if and .Values.hardReset.enabled .Values.hardReset.terms -}}
{{- $_ := set $config "hardReset" .Values.hardReset.terms -}}
{{- end -}}
{{ toYaml $config }}
{{- end }}

{{/* Of every pod with our annotations, and of an update only if it changes one: what is there must stay changeable. The
kubelet's mirrors of static pods are root's words. */}}
{{- define "reprise.admission.match" -}}
failurePolicy: Fail
matchConstraints:
  resourceRules:
    - apiGroups: [""]
      apiVersions: [v1]
      # What is written to the status may change labels and annotations as well.
      resources: [pods, pods/status]
      operations: [CREATE, UPDATE]
matchConditions:
  - name: is-no-kubelet
    expression: >-
      !('system:nodes' in request.userInfo.?groups.orValue([]))
  - name: has-or-changes-annotations-of-reprise
    expression: >-
      object.metadata.?annotations.orValue({}).exists(key,
        key.matches('^([^/]*[.])?reprise[.]dev(/|$)')
        && (request.operation == 'CREATE'
            || oldObject.metadata.?annotations[?key] != object.metadata.?annotations[?key]))
{{- end }}
