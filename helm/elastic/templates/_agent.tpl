{{/* The pod template of an agent, without its keys `metadata.labels` that differ. */}}
{{- define "elastic.agentPod" -}}
{{- $v := .Values.agents -}}
metadata:
  labels:
    {{- include "elastic.labels" (list . "agent") | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $v.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "elastic.podCommon" . | nindent 2 }}
  restartPolicy: {{ ternary "Never" "Always" (has $v.kind (list "Job" "JobSet")) }}
  terminationGracePeriodSeconds: {{ include "elastic.grace" . }}
  securityContext:
    {{- toYaml (mergeOverwrite (deepCopy .Values.podSecurityContext) $v.podSecurityContext) | nindent 4 }}
  {{- if $v.hostNetwork }}
  hostNetwork: true
  {{- if not $v.dnsPolicy }}
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- end }}
  {{- include "elastic.placement" $v | nindent 2 }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $v.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $v.topologySpreadConstraints (ne $v.kind "DaemonSet") }}
  topologySpreadConstraints:
    {{- range $v.topologySpreadConstraints }}
    - {{ toYaml . | nindent 6 | trim }}
      {{- if not .labelSelector }}
      labelSelector:
        matchLabels:
          {{- include "elastic.selector" $ | nindent 10 }}
          app.kubernetes.io/component: agent
      {{- end }}
    {{- end }}
  {{- end }}
  {{- if or $v.doctor $v.initContainers $v.sidecars }}
  initContainers:
    {{- include "elastic.sidecars" $v.sidecars | nindent 4 }}
    {{- with $v.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if $v.doctor }}
    - name: doctor
      image: {{ include "elastic.image" (list . dict) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [elastic]
      args: [doctor, --fail-on, error]
      env:
        {{- include "elastic.agentEnv" . | nindent 8 }}
      {{- include "elastic.agentRest" . | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: agent
      image: {{ include "elastic.image" (list . dict) }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [elastic]
      args:
        - agent
        - {{ include "elastic.script" . | quote }}
        {{- range .Values.script.args }}
        - {{ include "elastic.text" . | quote }}
        {{- end }}
      env:
        {{- include "elastic.agentEnv" . | nindent 8 }}
      {{- if $v.http.enabled }}
      ports:
        - name: http
          containerPort: {{ int64 $v.http.port }}
      {{- end }}
      {{- include "elastic.agentRest" . | nindent 6 }}
  volumes:
    - name: tmp
      emptyDir: {{ with $v.tmp.size }}{sizeLimit: {{ . }}}{{ else }}{}{{ end }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.shm.size }}
    {{- include "elastic.tlsVolumes" (list . "agent") | nindent 4 }}
    {{- if .Values.script.inline }}
    - name: script
      configMap:
        name: {{ include "elastic.scriptConfigMap" . }}
    {{- end }}
    {{- if include "elastic.onVolume" . }}
    - name: checkpoints
      persistentVolumeClaim:
        claimName: {{ include "elastic.claim" . }}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The agent's variables. `elastic doctor` gets them too, and ignores those it does not know. */}}
{{- define "elastic.agentEnv" -}}
{{- $v := .Values.agents -}}
{{- if eq $v.kind "DaemonSet" }}
- name: NODE_PLACE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: ELASTIC_NODE_NAME
  value: $(NODE_PLACE)
{{- else if eq $v.kind "StatefulSet" }}
- name: NODE_PLACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: ELASTIC_NODE_NAME
  value: $(NODE_PLACE)
{{- else }}
- name: NODE_PLACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
- name: ELASTIC_NODE_NAME
  value: {{ include "elastic.fullname" . }}-$(NODE_PLACE)
{{- end }}
- name: ELASTIC_MACHINE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: ELASTIC_NODE_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- include "elastic.sharedEnv" (list . "agent") | nindent 0 }}
{{- include "elastic.runEnv" . | nindent 0 }}
{{- if .Values.checkpoint.dir }}
- name: ELASTIC_CHECKPOINT_EVERY
  value: {{ int64 .Values.checkpoint.every | quote }}
{{- end }}
- name: ELASTIC_NPROC_PER_NODE
  value: {{ include "elastic.text" $v.nprocPerNode | quote }}
- name: ELASTIC_SPARES
  value: {{ int64 $v.spares | quote }}
- name: ELASTIC_DRAIN_TIMEOUT_S
  value: {{ include "elastic.drainTimeout" . | quote }}
- name: ELASTIC_HTTP_ADDRESS
  value: {{ ternary (printf "0.0.0.0:%d" (int64 $v.http.port)) "off" $v.http.enabled | quote }}
- name: ELASTIC_ON_QUARANTINE
  value: {{ ternary "exit" "wait" (has $v.kind (list "Job" "JobSet")) }}
# The user has no entry in passwd(5), and the root is read-only.
- name: HOME
  value: /tmp
- name: USER
  value: elastic
- name: ELASTIC_LOG_DIR
  value: /tmp/elastic/logs
- name: ELASTIC_STATE_DIR
  value: /tmp/elastic/state
{{- include "elastic.settingsEnv" $v.settings | nindent 0 }}
{{- with $v.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{/* The rest that the containers of an agent's pod share. */}}
{{- define "elastic.agentRest" -}}
{{- $v := .Values.agents -}}
{{- if or .Values.checkpoint.credentialsSecret $v.extraEnvFrom }}
envFrom:
  {{- with .Values.checkpoint.credentialsSecret }}
  - secretRef:
      name: {{ . }}
  {{- end }}
  {{- with $v.extraEnvFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
securityContext:
  {{- toYaml (mergeOverwrite (include "elastic.containerSecurity" . | fromYaml) $v.securityContext) | nindent 2 }}
{{- with $v.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: shm
    mountPath: /dev/shm
  {{- include "elastic.tlsMounts" . | nindent 2 }}
  {{- if .Values.script.inline }}
  - name: script
    mountPath: /script
    readOnly: true
  {{- end }}
  {{- if include "elastic.onVolume" . }}
  - name: checkpoints
    mountPath: {{ .Values.checkpoint.dir | quote }}
  {{- end }}
  {{- with $v.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The fields that a Job cannot change: a change makes another Job. Exit codes: docs/EVENTS.md. */}}
{{- define "elastic.jobFixed" -}}
completionMode: Indexed
backoffLimitPerIndex: {{ int64 .Values.agents.backoffLimitPerIndex }}
podReplacementPolicy: Failed
podFailurePolicy:
  # The first matching rule decides. Other codes (75, 78, 83, 84, killed) may be due to one machine or to a
  # moment: they count, and Kubernetes tries again, perhaps elsewhere.
  rules:
    # The machine goes away, whatever the agent says to that.
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    # The run is over for all: it was stopped, or had ended before this pod came. No pod restarts.
    - action: FailJob
      onExitCodes:
        containerName: agent
        operator: In
        values: [82]
    # The script failed or the command is wrong, usually on all nodes: then all indexes fail, and with
    # them the Job. A node that fails alone does not end the others.
    - action: FailIndex
      onExitCodes:
        containerName: agent
        operator: In
        values: [1, 2]
    # The node was drained, is in quarantine, or its pod was deleted: another pod takes its place.
    - action: Ignore
      onExitCodes:
        containerName: agent
        operator: In
        values: [80, 81, 130, 143]
successPolicy:
  rules:
    # An agent ends with 0 only when the job is finished.
    - succeededCount: 1
template:
  {{- include "elastic.agentPod" . | nindent 2 }}
{{- end }}

{{- define "elastic.jobSpec" -}}
completions: {{ int64 .Values.nodes }}
parallelism: {{ int64 .Values.nodes }}
{{- with .Values.agents.ttlSecondsAfterFinished }}
ttlSecondsAfterFinished: {{ int64 . }}
{{- end }}
{{ include "elastic.jobFixed" . }}
{{- end }}

{{- define "elastic.agentsName" -}}
{{- if eq .Values.agents.kind "Job" -}}
{{ include "elastic.fullname" . }}-{{ include "elastic.jobFixed" . | sha256sum | trunc 8 }}
{{- else if eq .Values.agents.kind "JobSet" -}}
{{/* A JobSet cannot change its Jobs, not even their size. */}}
{{- include "elastic.fullname" . }}-{{ include "elastic.jobSpec" . | sha256sum | trunc 8 }}
{{- else -}}{{ include "elastic.fullname" . }}{{- end -}}
{{- end }}

{{- define "elastic.kueueLabels" -}}
{{- with .Values.kueue }}
{{- if .queue }}
kueue.x-k8s.io/queue-name: {{ .queue }}
{{- with .priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
