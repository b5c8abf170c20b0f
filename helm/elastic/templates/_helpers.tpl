{{- define "elastic.fullname" -}}
{{- if .Values.fullnameOverride -}}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "elastic.job" -}}
{{ .Values.job | default (include "elastic.fullname" .) }}
{{- end }}

{{/* Labels that all pods of the release share and that never change. */}}
{{- define "elastic.selector" -}}
app.kubernetes.io/name: elastic
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Takes a list: the root, and the component. */}}
{{- define "elastic.labels" -}}
{{- $root := index . 0 -}}
{{ include "elastic.selector" $root }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of objects, not of pods, so that a new version of the chart does not replace pods. */}}
{{- define "elastic.objectLabels" -}}
{{ include "elastic.labels" . }}
helm.sh/chart: elastic-{{ (index . 0).Chart.Version }}
{{- end }}

{{/* Labels and annotations of an object. Takes a list: the root, the component, more labels, own annotations. */}}
{{- define "elastic.meta" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "elastic.objectLabels" (list $root (index . 1)) | nindent 2 }}
  {{- with index . 2 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (index . 3) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "elastic.image" -}}
{{- $root := index . 0 -}}{{- $own := index . 1 -}}{{- $all := $root.Values.image -}}
{{- $repository := $own.repository | default $all.repository -}}
{{- $digest := $own.digest | default (ternary "" $all.digest (not (empty $own.tag))) -}}
{{- if $digest -}}{{ $repository }}@{{ $digest }}
{{- else -}}{{ $repository }}:{{ $own.tag | default $all.tag | default $root.Chart.AppVersion }}{{- end -}}
{{- end }}

{{- define "elastic.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ .Values.serviceAccount.name | default (include "elastic.fullname" .) }}
{{- else -}}{{ .Values.serviceAccount.name | default "default" }}{{- end -}}
{{- end }}

{{- define "elastic.script" -}}
{{- if .Values.script.inline -}}/script/train.py{{- else -}}{{ .Values.script.path }}{{- end -}}
{{- end }}

{{- define "elastic.scriptConfigMap" -}}
{{ include "elastic.fullname" . }}-script-{{ .Values.script.inline | sha256sum | trunc 8 }}
{{- end }}

{{/* The id contains all that agents must share: a change makes another run. */}}
{{- define "elastic.runId" -}}
{{- $settings := .Values.agents.settings -}}
{{- $same := list .Values.script.path .Values.script.inline .Values.script.args .Values.checkpoint.dir (int64 .Values.checkpoint.every) (get $settings "record_samples") (get $settings "launch") -}}
{{- with get $settings "module" }}{{ $same = append $same . }}{{ end -}}
{{ include "elastic.text" .Values.run }}-{{ $same | toJson | sha256sum | trunc 8 }}
{{- end }}

{{- define "elastic.onVolume" -}}
{{- if and .Values.checkpoint.dir (not (contains "://" .Values.checkpoint.dir)) .Values.checkpoint.volume.enabled -}}true{{- end -}}
{{- end }}

{{- define "elastic.claim" -}}
{{ .Values.checkpoint.volume.existingClaim | default (printf "%s-checkpoints" (include "elastic.fullname" .)) }}
{{- end }}

{{- define "elastic.drainTimeout" -}}
{{- if .Values.agents.spot -}}10{{- else -}}{{ int64 .Values.agents.drainTimeoutSeconds }}{{- end -}}
{{- end }}

{{/* After the drain time-out the agent has 5 s to end the remaining workers and itself. */}}
{{- define "elastic.grace" -}}
{{ add (include "elastic.drainTimeout" .) 5 }}
{{- end }}

{{/* Takes a list: the root, and the role. */}}
{{- define "elastic.tlsSecret" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- if eq $root.Values.tls.mode "secret" -}}{{ get $root.Values.tls.secrets $role }}
{{- else -}}{{ include "elastic.fullname" $root }}-{{ $role }}-tls{{- end -}}
{{- end }}

{{/* The names in the certificate of a role: docs/SECURITY.md. */}}
{{- define "elastic.tlsNames" -}}
{{- $job := include "elastic.job" (index . 0) -}}
{{- $names := list (printf "%s.job.elastic" $job) (printf "%s.%s.job.elastic" (index . 1) $job) -}}
{{- if eq (index . 1) "coordinator" -}}{{- $names = append $names (printf "operator.%s.job.elastic" $job) -}}{{- end -}}
{{ toJson $names }}
{{- end }}

{{- define "elastic.endpoints" -}}
{{- if .Values.etcd.bundled.enabled -}}http://{{ include "elastic.fullname" . }}-etcd:2379
{{- else -}}{{ join "," .Values.etcd.endpoints }}{{- end -}}
{{- end }}

{{/* Settings that agents, coordinators and commands share. Takes a list: the root, and the role. */}}
{{- define "elastic.sharedEnv" -}}
{{- $root := index . 0 -}}
- name: ELASTIC_JOB
  value: {{ include "elastic.job" $root | quote }}
- name: ELASTIC_ETCD
  value: {{ include "elastic.endpoints" $root | quote }}
{{- with $root.Values.etcd.tls }}
{{- if .secret }}
- name: ELASTIC_ETCD_CA
  value: /etc/elastic/etcd/ca.crt
{{- if .clientCertificate }}
- name: ELASTIC_ETCD_CERT
  value: /etc/elastic/etcd/tls.crt
- name: ELASTIC_ETCD_KEY
  value: /etc/elastic/etcd/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- with $root.Values.etcd.auth.secret }}
- name: ELASTIC_ETCD_USER
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: username
- name: ELASTIC_ETCD_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: password
{{- end }}
{{- if eq $root.Values.tls.mode "insecure" }}
- name: ELASTIC_INSECURE
  value: "true"
{{- else }}
- name: ELASTIC_TLS_CA
  value: /etc/elastic/tls/ca.crt
- name: ELASTIC_TLS_CERT
  value: /etc/elastic/tls/tls.crt
- name: ELASTIC_TLS_KEY
  value: /etc/elastic/tls/tls.key
{{- end }}
{{- end }}

{{- define "elastic.runEnv" -}}
- name: ELASTIC_RUN_ID
  value: {{ include "elastic.runId" . | quote }}
{{- with .Values.checkpoint.dir }}
- name: ELASTIC_CHECKPOINT_DIR
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{/* A value as text of an option or a variable. Helm reads numbers as floats. */}}
{{- define "elastic.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) }}{{ int64 . }}
{{- else if kindIs "slice" . }}{{ join "," . }}
{{- else }}{{ . }}{{ end -}}
{{- end }}

{{/* Settings by their names in a TOML file. */}}
{{- define "elastic.settingsEnv" -}}
{{- range $name, $value := . }}
- name: ELASTIC_{{ upper $name }}
  value: {{ include "elastic.text" $value | quote }}
{{- end }}
{{- end }}

{{- define "elastic.tlsMounts" -}}
{{- if ne .Values.tls.mode "insecure" }}
- name: tls
  mountPath: /etc/elastic/tls
  readOnly: true
{{- end }}
{{- if .Values.etcd.tls.secret }}
- name: etcd-tls
  mountPath: /etc/elastic/etcd
  readOnly: true
{{- end }}
{{- end }}

{{- define "elastic.tlsVolumes" -}}
{{- $root := index . 0 -}}
{{- if ne $root.Values.tls.mode "insecure" }}
- name: tls
  secret:
    secretName: {{ include "elastic.tlsSecret" . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
{{- end }}
{{- with $root.Values.etcd.tls.secret }}
- name: etcd-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{- define "elastic.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "elastic.podCommon" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ include "elastic.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- end }}

{{/* Takes a list: the root, and the path. */}}
{{- define "elastic.httpGet" -}}
httpGet:
  path: {{ index . 1 }}
  port: http
  scheme: {{ ternary "HTTP" "HTTPS" (eq (index . 0).Values.tls.mode "insecure") }}
{{- end }}

{{/* An annotation without the name of the section: its URL if there is one, else the path in this repository. */}}
{{- define "elastic.runbook" -}}
{{- with .Values.monitoring.runbookUrl }}runbook_url: {{ . }}#{{ else }}runbook: docs/RUNBOOK.md#{{ end -}}
{{- end }}

{{/* Sidecars are init containers that run until the pod ends, so that they do not keep a finished Job. */}}
{{- define "elastic.sidecars" -}}
{{- range . }}
- {{ merge (dict "restartPolicy" "Always") . | toYaml | nindent 2 | trim }}
{{- end }}
{{- end }}

{{/* Fields of a pod that values name as Kubernetes does. Takes the values of agents or coordinators. */}}
{{- define "elastic.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Who may reach metrics. Kubelets need no rule: a pod cannot shut out its own node. Takes a list: the root, the port. */}}
{{- define "elastic.metricsIngress" -}}
{{- $root := index . 0 -}}{{- $policy := $root.Values.networkPolicy -}}
- ports:
    - port: {{ int64 (index . 1) }}
  {{- if $policy.metricsFrom }}
  from:
    {{- toYaml $policy.metricsFrom | nindent 4 }}
  {{- else if eq $root.Values.tls.mode "insecure" }}
  # Plain text, for everybody who reaches it: only pods of the release do.
  from:
    - podSelector:
        matchLabels:
          {{- include "elastic.selector" $root | nindent 10 }}
    {{- with $policy.from }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- else }}
  # From everywhere: metrics and the page need a certificate of the job.
  {{- end }}
{{- end }}
