{{/* Checks that a schema cannot express. */}}
{{- define "elastic.checks" -}}
{{- $v := .Values -}}
{{- if and (not $v.script.path) (not $v.script.inline) }}{{ fail "\n\nno script: set script.path to the script in your image, or give a small one with --set-file script.inline=train.py" }}{{ end -}}
{{- if and $v.script.path $v.script.inline }}{{ fail "\n\nscript.path and script.inline are both set: leave one of them out" }}{{ end -}}
{{- if and (not $v.checkpoint.dir) (not $v.checkpoint.allowLoss) }}{{ fail "\n\nno checkpoints: set checkpoint.dir to a path (the chart creates a volume for it) or a URL such as s3://bucket/job, or checkpoint.allowLoss=true if the job may be lost when all nodes are lost" }}{{ end -}}
{{- if and $v.checkpoint.dir (not (contains "://" $v.checkpoint.dir)) (not (hasPrefix "/" $v.checkpoint.dir)) }}{{ fail (printf "\n\ncheckpoint.dir is %q: give an absolute path or a URL" $v.checkpoint.dir) }}{{ end -}}
{{- if and (not $v.etcd.endpoints) (not $v.etcd.bundled.enabled) }}{{ fail "\n\nno etcd: set etcd.endpoints={etcd1:2379,...}, or, only for tests, etcd.bundled.enabled=true" }}{{ end -}}
{{- if and $v.etcd.endpoints $v.etcd.bundled.enabled }}{{ fail "\n\netcd.endpoints and etcd.bundled.enabled are both set: leave one of them out" }}{{ end -}}
{{- if and $v.etcd.bundled.enabled (not $v.etcd.bundled.image) }}{{ fail "\n\netcd.bundled.image is empty: give an image of etcd, 3.5.23 or 3.6.5 at least" }}{{ end -}}
{{- if and $v.etcd.bundled.enabled (or $v.etcd.tls.secret $v.etcd.auth.secret) }}{{ fail "\n\nthe bundled etcd has neither certificates nor users: leave etcd.tls.secret and etcd.auth.secret out, or give etcd.endpoints" }}{{ end -}}
{{- if and $v.etcd.tls.clientCertificate (not $v.etcd.tls.secret) }}{{ fail "\n\netcd.tls.clientCertificate is set, but no etcd.tls.secret: name the Secret that has the certificate" }}{{ end -}}
{{- if and (eq $v.tls.mode "secret") (or (not $v.tls.secrets.coordinator) (not $v.tls.secrets.agent)) }}{{ fail "\n\ntls.mode is secret: name the Secrets with tls.secrets.coordinator and tls.secrets.agent (they may be the same)" }}{{ end -}}
{{- if and (ne $v.tls.mode "secret") (or $v.tls.secrets.coordinator $v.tls.secrets.agent) }}{{ fail (printf "\n\ntls.secrets is set, but tls.mode is %s: set tls.mode=secret" $v.tls.mode) }}{{ end -}}
{{- if and $v.coordinators.http.podMonitor (not $v.coordinators.http.enabled) }}{{ fail "\n\ncoordinators.http.podMonitor is set, but nothing serves metrics: set coordinators.http.enabled=true" }}{{ end -}}
{{- if and $v.coordinators.http.podMonitor (hasKey $v.coordinators.settings "metrics_address") }}{{ fail "\n\ncoordinators.settings.metrics_address moves /metrics away from port 9400, which coordinators.http.podMonitor scrapes: leave one of them out" }}{{ end -}}
{{- $blocks := false }}{{- range $v.networkPolicy.from }}{{- if .ipBlock }}{{- $blocks = true }}{{- end }}{{- end }}
{{- if and $v.agents.hostNetwork $v.networkPolicy.enabled (not $blocks) }}{{ fail "\n\nagents.hostNetwork is set: such pods have the addresses of their machines, and no selector of networkPolicy lets these in; name them with networkPolicy.from=[{ipBlock: {cidr: 10.0.0.0/16}}], or set networkPolicy.enabled=false" }}{{ end -}}
{{- if and $v.kueue.queue (not (has $v.agents.kind (list "Job" "JobSet" "StatefulSet"))) }}{{ fail "\n\nkueue.queue is set, but Kueue does not queue a DaemonSet: choose another agents.kind" }}{{ end -}}
{{- if and $v.coordinators.maxWorkers (lt (int64 $v.coordinators.maxWorkers) (int64 $v.coordinators.minWorkers)) }}{{ fail (printf "\n\ncoordinators.minWorkers %d is more than coordinators.maxWorkers %d; lower minWorkers or raise maxWorkers" (int64 $v.coordinators.minWorkers) (int64 $v.coordinators.maxWorkers)) }}{{ end -}}
{{- if and (hasKey $v.agents.settings "isolation_timeout_s") (ne (toString (get $v.agents.settings "isolation_timeout_s")) (toString (get $v.coordinators.settings "isolation_timeout_s"))) }}{{ fail "\n\nisolation_timeout_s must be the same in agents.settings and coordinators.settings" }}{{ end -}}
{{- if and (hasKey $v.coordinators.settings "isolation_timeout_s") (not (hasKey $v.agents.settings "isolation_timeout_s")) }}{{ fail "\n\nisolation_timeout_s must be the same in agents.settings and coordinators.settings" }}{{ end -}}
{{- end }}
