"""What the Helm chart renders for each of its options, with the real helm."""

from __future__ import annotations

import base64
import functools
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from elastic.cli import agent as agent_command
from elastic.cli import coordinator as coordinator_command
from elastic.cli import doctor as doctor_command
from elastic.cli import main
from elastic.cli import operator as operator_commands
from elastic.errors import ExitCode
from elastic.rpc.certificates import Role, load_certificate
from elastic.settings.tls_files import TlsFiles
from tests.deploy import chart_documents
from tests.deploy.expressions import RULES
from tests.deploy.helm import CHART, Document, Refused, Values, merged, render, run
from tests.deploy.rendered import Pod, check, job_spec, of_kind, pod_of, verdict

PLAIN: Values = {"tls": {"mode": "insecure"}}  # making keys would take a while
LEAST: Values = {
    "script": {"path": "/app/train.py"},
    "checkpoint": {"dir": "s3://bucket/gpt"},
    "etcd": {"endpoints": ["etcd-0.etcd:2379", "etcd-1.etcd:2379"]},
}
INLINE: Values = {
    "script": {
        "inline": "import elastic\nelastic.init()\n",
        "args": ["--lr", 1e-4, "--epochs", 10],
    },
    "checkpoint": {"dir": "/checkpoints", "every": 50},
    "etcd": {"endpoints": ["https://etcd:2379"]},
}
ALL: Values = {
    "job": "gpt-2",
    "image": {"pullSecrets": [{"name": "pull"}], "digest": "sha256:" + "0" * 64},
    "commonLabels": {"team": "ml"},
    "commonAnnotations": {"argocd.argoproj.io/sync-wave": "2"},
    "checkpoint": {"credentialsSecret": "s3"},
    "etcd": {
        "tls": {"secret": "etcd-tls", "clientCertificate": True},
        "auth": {"secret": "etcd-user"},
    },
    "tls": {"mode": "secret", "secrets": {"coordinator": "c-tls", "agent": "a-tls"}},
    "agents": {
        "nprocPerNode": 8,
        "spot": True,
        "ttlSecondsAfterFinished": 86400,
        "settings": {"join_timeout_s": 30, "record_samples": True, "launch": "elastic"},
        "resources": {
            "limits": {"nvidia.com/gpu": 8, "rdma/hca": 1},
            "claims": [{"name": "nic"}],
        },
        "shm": {"size": "64Gi"},
        "tmp": {"size": "20Gi"},
        "hostNetwork": True,
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "fast-nic"}],
        "sidecars": [{"name": "shipper", "image": "shipper:1"}],
        "http": {"port": 9401},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
        "extraVolumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "extraVolumeMounts": [{"name": "data", "mountPath": "/data"}],
        "initContainers": [{"name": "fetch", "image": "fetch:1"}],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "podSecurityContext": {"supplementalGroups": [44]},
    },
    "kueue": {"queue": "team", "priorityClass": "high"},
    "coordinators": {
        "minWorkers": 8,
        "maxWorkers": 64,
        "image": {"tag": "2"},
        "settings": {"max_restarts": 1000000, "quarantine_after": 5},
        "priorityClassName": "high",
        "schedulerName": "volcano",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.10"]},
        "sidecars": [{"name": "shipper", "image": "shipper:1"}],
        "initContainers": [{"name": "wait", "image": "wait:1"}],
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "extraEnv": [{"name": "AWS_REGION", "value": "eu-north-1"}],
        "extraVolumes": [{"name": "ledger", "persistentVolumeClaim": {"claimName": "ledger"}}],
        "extraVolumeMounts": [{"name": "ledger", "mountPath": "/ledger"}],
    },
    "networkPolicy": {
        "from": [
            {"namespaceSelector": {"matchLabels": {"team": "ops"}}},
            {"ipBlock": {"cidr": "10.0.0.0/16"}},
        ]
    },
}
MATRIX: dict[str, Values] = {
    "url": merged(LEAST, PLAIN),
    "inline": merged(INLINE, PLAIN),
    "no-checkpoints": merged(LEAST, PLAIN, {"checkpoint": {"dir": "", "allowLoss": True}}),
    "claim": merged(INLINE, PLAIN, {"checkpoint": {"volume": {"existingClaim": "ckpt"}}}),
    "own-volume": merged(
        INLINE,
        PLAIN,
        {"checkpoint": {"volume": {"enabled": False, "storageClassName": "fast"}}},
        {
            key: {
                "extraVolumes": [{"name": "nfs", "persistentVolumeClaim": {"claimName": "nfs"}}],
                "extraVolumeMounts": [{"name": "nfs", "mountPath": "/checkpoints"}],
            }
            for key in ("agents", "coordinators")
        },
    ),
    "all": merged(LEAST, ALL),
    "generated": LEAST,
    "cert-manager": merged(LEAST, {"tls": {"mode": "certManager"}}),
    "issuer": merged(
        LEAST, {"tls": {"mode": "certManager", "certManager": {"issuerRef": {"name": "corp"}}}}
    ),
    "bundled-etcd": merged(
        LEAST, PLAIN, {"etcd": {"endpoints": [], "bundled": {"enabled": True, "image": "etcd:3"}}}
    ),
    "jobset": merged(LEAST, ALL, {"agents": {"kind": "JobSet"}}),
    "statefulset": merged(LEAST, ALL, {"agents": {"kind": "StatefulSet"}}),
    "daemonset": merged(LEAST, PLAIN, {"agents": {"kind": "DaemonSet"}}),
    "one-coordinator": merged(LEAST, PLAIN, {"coordinators": {"replicas": 1}}),
    "open": merged(
        LEAST,
        PLAIN,
        {
            "networkPolicy": {"enabled": False},
            "serviceAccount": {"create": False, "name": "mine"},
            "agents": {"topologySpreadConstraints": []},
        },
    ),
    "no-http": merged(LEAST, PLAIN, {"coordinators": {"http": {"enabled": False}}}),
    "pod-monitor": merged(
        LEAST,
        {"coordinators": {"http": {"podMonitor": True}}},
        {"tls": {"mode": "secret", "secrets": {"coordinator": "c", "agent": "a"}}},
    ),
    "monitoring": merged(LEAST, PLAIN, {"monitoring": {"rules": True, "dashboards": True}}),
    "monitored-etcd": merged(
        LEAST,
        PLAIN,
        {
            "etcd": {"endpoints": [], "bundled": {"enabled": True, "image": "etcd:3"}},
            "coordinators": {"http": {"podMonitor": True}},
            "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
        },
    ),
    "long-names": merged(LEAST, PLAIN, {"fullnameOverride": "x" * 40}),
}
QUICK = ("inline", "all", "generated", "monitored-etcd")
VERDICTS = {
    "Complete": {ExitCode.OK},
    "FailJob": {ExitCode.STOPPED},
    "FailIndex": {ExitCode.SCRIPT_FAILED, ExitCode.USAGE},
    "Ignore": {
        ExitCode.DRAINED,
        ExitCode.QUARANTINED,
        ExitCode.INTERRUPTED,
        ExitCode.TERMINATED,
    },
    "Count": {
        ExitCode.TEMPORARY,
        ExitCode.REFUSED,  # perhaps because of an upgrade under way
        ExitCode.CONFIGURATION,  # perhaps of this machine, such as one without a GPU
        ExitCode.NOT_SAVED,  # perhaps only this pod, which left while no coordinator led
    },
}
"""What the Job controller does about a pod, by the exit code of its agent."""
SIGKILLED = 137


@functools.cache
def _rendered(given: str, release: str) -> str:
    return json.dumps(render(json.loads(given), release=release))


def rendered(given: Values, release: str = "gpt") -> list[Document]:
    documents: list[Document] = json.loads(_rendered(json.dumps(given), release))
    return documents


cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in MATRIX]
)


# ---- what is rendered


@cases
def test_objects_are_valid_and_restricted_and_fit_together(name: str) -> None:
    check(rendered(MATRIX[name]))


@cases
def test_the_command_line_accepts_the_commands_of_the_pods(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, Any] = {}
    monkeypatch.setattr(
        coordinator_command, "coordinate", lambda s: taken.update(coordinator=s) or 0
    )

    def attend(command: agent_command.NodeCommand) -> int:
        taken["agent"] = command
        return 0

    monkeypatch.setattr(agent_command, "attend", attend)
    monkeypatch.setattr(operator_commands, "status", lambda target, **_: taken.update(test=target))
    values, documents = MATRIX[name], rendered(MATRIX[name])
    for component in ("coordinator", "agent", "test"):
        pod = pod_of(documents, component)
        assert pod.container["command"] == ["elastic"]
        environment = dict.fromkeys(map(str, main.os.environ), None) | outcome(pod)
        ended = CliRunner().invoke(main.app, pod.container["args"], env=environment)
        assert (ended.exit_code, component in taken) == (0, True), ended.output
    node, leader = taken["agent"], taken["coordinator"]
    assert node.settings.job == leader.job == taken["test"].settings.job
    assert node.settings.run_id == leader.run_id
    assert node.settings.checkpoint_dir == leader.checkpoint_dir
    assert node.settings.isolation_timeout_s == leader.isolation_timeout_s
    assert node.argv[1:] == [str(one) for one in values["script"].get("args", ())]
    assert node.settings.node_host == "10.0.0.7"


def outcome(pod: Pod) -> dict[str, str]:
    """Return the environment as Kubernetes gives it to the container."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": "3",
        "metadata.name": "gpt-3",
        "spec.nodeName": "machine-1",
        "status.podIP": "10.0.0.7",
    }
    found: dict[str, str] = {}
    for name, value in pod.environment.items():
        if isinstance(value, dict):
            value = fields[value["fieldRef"]["fieldPath"]] if "fieldRef" in value else "given"
        for known, content in found.items():
            value = value.replace(f"$({known})", content)
        found[name] = value
    return found


def test_values_reach_the_pods_and_the_job() -> None:
    documents = rendered(MATRIX["all"])
    agent, leader = pod_of(documents, "agent"), pod_of(documents, "coordinator")
    assert agent.spec["terminationGracePeriodSeconds"] == 15
    assert outcome(agent)["ELASTIC_NODE_NAME"] == "gpt-3"
    assert outcome(agent)["ELASTIC_JOIN_TIMEOUT_S"] == "30"
    assert outcome(leader)["ELASTIC_MAX_RESTARTS"] == "1000000"
    assert leader.container["image"] == "elastic:2"
    assert agent.container["image"] == "elastic@sha256:" + "0" * 64
    assert agent.container["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["IPC_LOCK"],
    }
    (job,) = of_kind(documents, "Job")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    common = {"argocd.argoproj.io/sync-wave": "2"}
    assert job["metadata"]["annotations"] == common | {"kueue.x-k8s.io/elastic-job": "true"}
    for document in documents:
        assert common.items() <= document["metadata"]["annotations"].items(), document["kind"]
    for pod in (agent, leader):
        assert pod.spec["schedulerName"] == "volcano"
        assert "argocd.argoproj.io/sync-wave" not in pod.metadata["annotations"]
        shipper = pod.spec["initContainers"][0]
        assert shipper == {"name": "shipper", "image": "shipper:1", "restartPolicy": "Always"}
        assert [one["name"] for one in pod.spec["initContainers"][1:]] == [
            "fetch" if pod is agent else "wait"
        ]
    assert agent.spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert (leader.spec["dnsPolicy"], leader.spec["dnsConfig"]) == (
        "None",
        {"nameservers": ["10.0.0.10"]},
    )
    assert [claim["name"] for claim in agent.spec["resourceClaims"]] == ["nic"]
    assert agent.container["ports"] == [{"name": "http", "containerPort": 9401}]


def test_the_doctor_has_the_environment_and_resources_of_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "initContainers" not in pod_of(rendered(merged(INLINE, PLAIN)), "agent").spec
    values = merged(ALL, INLINE, {"agents": {"doctor": True}})
    documents = rendered(values)
    check(documents)
    pod = pod_of(documents, "agent")
    doctor = pod.spec["initContainers"][-1]
    agent = pod.container
    for key in ("image", "env", "envFrom", "resources", "securityContext", "volumeMounts"):
        assert doctor.get(key) == agent.get(key), key
    examined: list[Any] = []
    monkeypatch.setattr(doctor_command, "doctor", lambda s, **_: examined.append(s) or 0)
    environment = dict.fromkeys(map(str, main.os.environ), None) | outcome(pod)
    ended = CliRunner().invoke(main.app, doctor["args"], env=environment)
    assert ended.exit_code == 0, ended.output
    (settings,) = examined
    assert settings.checkpoint_dir == "/checkpoints"
    assert settings.node_host == "10.0.0.7"
    assert settings.store.etcd == ("https://etcd:2379",)


@pytest.mark.parametrize("code", ExitCode)
def test_the_pod_failure_policy_gives_each_exit_code_its_verdict(code: ExitCode) -> None:
    spec = job_spec(rendered(MATRIX["inline"]))
    (wanted,) = (action for action, codes in VERDICTS.items() if code in codes)
    assert verdict(spec, code) == wanted
    disrupted = verdict(spec, code, "DisruptionTarget")
    assert disrupted == ("Complete" if code == ExitCode.OK else "Ignore")
    doctor = verdict(spec, code, container="doctor")
    assert doctor == ("Complete" if code == ExitCode.OK else "Count")


def test_only_a_verdict_on_the_whole_run_fails_the_job() -> None:
    spec = job_spec(rendered(MATRIX["inline"]))
    failing = {code for code in range(1, 256) if verdict(spec, code) == "FailJob"}
    assert failing == {ExitCode.STOPPED}
    assert verdict(spec, SIGKILLED) == "Count"
    assert verdict(spec, SIGKILLED, "DisruptionTarget") == "Ignore"
    assert spec["completions"] == spec["parallelism"] == 2
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")


def test_generated_certificates_are_valid_for_their_roles(tmp_path: Path) -> None:
    documents = rendered(MATRIX["generated"])
    for role in ("coordinator", "agent"):
        (secret,) = (one for one in of_kind(documents, "Secret") if role in one["metadata"]["name"])
        for name, content in secret["data"].items():
            (tmp_path / name).write_bytes(base64.b64decode(content))
        files = TlsFiles(
            ca=tmp_path / "ca.crt", certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key"
        )
        # Agents serve their metrics.
        load_certificate(files, "gpt", Role.SERVER, coordinates=role == "coordinator")
        load_certificate(files, "gpt", Role.CLIENT)
        mounted = pod_of(documents, role).spec["volumes"]
        (volume,) = (one for one in mounted if one["name"] == "tls")
        assert volume["secret"]["secretName"] == secret["metadata"]["name"]


@pytest.mark.long
def test_changed_training_makes_a_new_run_and_changed_agent_pods_a_new_job() -> None:
    def identity(*changes: Values) -> tuple[str, str]:
        documents = rendered(merged(MATRIX["inline"], *changes))
        (job,) = of_kind(documents, "Job")
        run_id = pod_of(documents, "agent").environment["ELASTIC_RUN_ID"]
        assert pod_of(documents, "coordinator").environment["ELASTIC_RUN_ID"] == run_id
        return run_id, job["metadata"]["name"]

    run_id, job = identity()
    for change in (
        {"script": {"inline": "import elastic\n"}},
        {"script": {"args": ["--lr", "0.2"]}},
        {"checkpoint": {"every": 51}},
        {"checkpoint": {"dir": "/elsewhere"}},
        {"agents": {"settings": {"record_samples": True}}},
        {"agents": {"settings": {"module": True}}},
        {"run": 2},
    ):
        other_run, other_job = identity(change)
        assert other_run != run_id, change
        assert other_job != job, change
    assert identity({"run": "2"}) == identity({"run": 2})
    for change in ({"image": {"tag": "2"}}, {"agents": {"drainTimeoutSeconds": 30}}):
        other_run, other_job = identity(change)
        assert other_run == run_id, change
        assert other_job != job, change
    jobset = {"agents": {"kind": "JobSet"}}
    names = {
        one["metadata"]["name"]
        for nodes in (2, 3)
        for one in of_kind(rendered(merged(MATRIX["inline"], jobset, {"nodes": nodes})), "JobSet")
    }
    assert len(names) == 2, "the server refuses another size of a JobSet's Jobs"
    for change in (
        {"nodes": 5},
        {"coordinators": {"image": {"tag": "2"}}},
        {"coordinators": {"settings": {"quarantine_after": 1}}},
        {"agents": {"ttlSecondsAfterFinished": 60}},
    ):
        assert identity(change) == (run_id, job), change


@pytest.mark.long
def test_helm_lint_finds_no_fault() -> None:
    said = run("lint", "--strict", str(CHART), given=MATRIX["all"])
    assert "WARNING" not in said
    assert "ERROR" not in said


@pytest.mark.long
@pytest.mark.parametrize("name", list(MATRIX))
def test_notes_name_commands_that_exist(name: str) -> None:
    said = run("install", "gpt", str(CHART), "--dry-run=client", given=MATRIX[name])
    notes = said.partition("NOTES:")[2]
    lines = [shlex.split(line, comments=True) for line in notes.splitlines() if "--" in line]
    named = {line[line.index("elastic") + 1] for line in lines if "elastic" in line}
    assert named >= {"status", "nodes", "events", "stop"}
    assert named <= {command.callback.__name__ for command in main.app.registered_commands}  # type: ignore[union-attr]


# ---- values that are refused


WRONG: list[tuple[Values, str]] = [
    ({"node": 3}, "node"),
    ({"nodes": "three"}, "nodes"),
    ({"job": "GPT"}, "job"),
    ({"run": "the first"}, "run"),
    ({"run": ""}, "run"),
    ({"nodes": 0}, "nodes"),
    ({"image": {"tag": 1.1}}, "tag"),
    ({"agents": {"kind": "Deployment"}}, "kind"),
    ({"agents": {"nprocPerNode": 0}}, "nprocPerNode"),
    ({"agents": {"settings": {"hang_timeout": 3}}}, "hang_timeout"),
    ({"agents": {"settings": {"checkpoint_dir": "/x"}}}, "checkpoint_dir"),
    ({"agents": {"settings": {"http_address": "0.0.0.0:1"}}}, "http_address"),
    ({"monitoring": {"thresholds": {"ElasticNoProgres": 60}}}, "ElasticNoProgres"),
    ({"monitoring": {"thresholds": {"ElasticNoProgress": "10m"}}}, "ElasticNoProgress"),
    ({"coordinators": {"settings": {"spares": 3}}}, "spares"),
    ({"tls": {"mode": "none"}}, "mode"),
    ({"checkpoint": {"directory": "/x"}}, "directory"),
    ({"etcd": {"endpoints": "etcd:2379"}}, "endpoints"),
]
MISSING: list[tuple[Values, str]] = [
    ({"script": {"path": ""}}, "no script: set script.path"),
    ({"script": {"inline": "x"}}, "script.path and script.inline are both set"),
    ({"checkpoint": {"dir": ""}}, "no checkpoints: set checkpoint.dir"),
    ({"checkpoint": {"dir": "here"}}, 'checkpoint.dir is "here": give an absolute path or a URL'),
    ({"etcd": {"endpoints": []}}, "no etcd: set etcd.endpoints"),
    ({"etcd": {"bundled": {"enabled": True}}}, "are both set"),
    ({"etcd": {"endpoints": [], "bundled": {"enabled": True}}}, "etcd.bundled.image is empty"),
    ({"etcd": {"tls": {"clientCertificate": True}}}, "no etcd.tls.secret"),
    ({"tls": {"mode": "secret"}}, "name the Secrets with tls.secrets"),
    ({"tls": {"secrets": {"agent": "x"}}}, "tls.mode is insecure: set tls.mode=secret"),
    ({"coordinators": {"http": {"enabled": False, "podMonitor": True}}}, "nothing serves metrics"),
    (
        {
            "coordinators": {
                "http": {"podMonitor": True},
                "settings": {"metrics_address": "0.0.0.0:9500"},
            }
        },
        "metrics_address moves /metrics away from port 9400",
    ),
    ({"kueue": {"queue": "q"}, "agents": {"kind": "DaemonSet"}}, "Kueue does not queue"),
    (
        {"coordinators": {"minWorkers": 9, "maxWorkers": 8}},
        "minWorkers 9 is more than coordinators.maxWorkers 8; lower minWorkers or raise maxWorkers",
    ),
    ({"agents": {"settings": {"isolation_timeout_s": 60}}}, "must be the same"),
    ({"agents": {"hostNetwork": True}}, "networkPolicy.from=[{ipBlock:"),
    (
        {
            "agents": {"hostNetwork": True},
            "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        },
        "networkPolicy.from=[{ipBlock:",
    ),
]


@pytest.mark.parametrize(("given", "named"), WRONG)
def test_the_schema_refuses_wrong_values_and_names_them(given: Values, named: str) -> None:
    schema = json.loads(chart_documents.SCHEMA.read_text())
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(merged(LEAST, given), schema)
    assert named in f"{list(refused.value.absolute_path)} {refused.value.message}"


@pytest.mark.parametrize("name", list(MATRIX))
def test_the_schema_accepts_valid_values(name: str) -> None:
    jsonschema.validate(MATRIX[name], json.loads(chart_documents.SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("given", "named"), [pytest.param(*one, marks=pytest.mark.long) for one in [*WRONG, *MISSING]]
)
def test_helm_refuses_wrong_and_missing_values_and_says_why(given: Values, named: str) -> None:
    with pytest.raises(Refused) as refused:
        render(merged(LEAST, PLAIN, given))
    assert named in str(refused.value)


def test_helm_without_any_values_asks_for_a_script() -> None:
    with pytest.raises(Refused, match=r"no script: set script\.path"):
        render({})


# ---- what is written from values.yaml and the settings


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (chart_documents.README, chart_documents.readme),
        (chart_documents.SCHEMA, chart_documents.schema),
    ],
    ids=["README", "schema"],
)
def test_documents_of_the_chart_are_fresh(path: Path, text: Any) -> None:
    assert path.read_text() == text(), "run: python -m tests.deploy.chart_documents"


def test_the_charts_copies_of_rules_and_dashboards_are_fresh() -> None:
    there = {path.name: path.read_text() for path in chart_documents.FILES.iterdir()}
    assert there == chart_documents.files(), "run: python -m tests.deploy.chart_documents"


def test_rules_and_dashboards_are_rendered_complete() -> None:
    documents = rendered(MATRIX["monitoring"])
    (rules,) = of_kind(documents, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load(RULES.read_text())
    maps = [m for m in of_kind(documents, "ConfigMap") if "dashboard" in m["metadata"]["name"]]
    there = {name: json.loads(text) for m in maps for name, text in m["data"].items()}
    assert set(there) == {n for n in chart_documents.files() if n.endswith(".json")}
    for name, dashboard in there.items():
        assert dashboard == json.loads(chart_documents.files()[name])
    for one in maps:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_values_change_thresholds_and_the_address_of_the_runbook() -> None:
    """Each threshold changes its own alert, in all places, and nothing else."""

    def alerts(**monitoring: Any) -> dict[str, Document]:
        given = merged(MATRIX["monitoring"], {"monitoring": monitoring})
        (rules,) = of_kind(rendered(given), "PrometheusRule")
        every = (rule for group in rules["spec"]["groups"] for rule in group["rules"])
        return {rule["alert"]: rule for rule in every if "alert" in rule}

    defaults = yaml.safe_load(chart_documents.VALUES.read_text())["monitoring"]["thresholds"]
    before = alerts()
    after = alerts(thresholds=dict.fromkeys(defaults, 0.4375), runbookUrl="https://wiki/RUNBOOK")
    changed = {name for name in before if before[name]["expr"] != after[name]["expr"]}
    assert changed == set(defaults)
    for name in defaults:
        assert "0.4375" in after[name]["expr"]
        assert f" {defaults[name]:g}" not in after[name]["expr"]
    for name, alert in after.items():
        annotations = alert["annotations"]
        assert annotations["runbook_url"] == f"https://wiki/RUNBOOK#{name.lower()}"
        assert "runbook" not in annotations


# ---- who reaches whom


def may_reach(documents: list[Document], port: int, *, of: str, labels: dict[str, str]) -> bool:
    """Whether the policies let a pod of the namespace with these labels reach the port."""
    target = pod_of(documents, of)
    policies = [
        policy["spec"]
        for policy in of_kind(documents, "NetworkPolicy")
        if policy["spec"]["podSelector"]["matchLabels"].items() <= target.labels.items()
    ]
    return not policies or any(
        port in [p["port"] for p in rule.get("ports", [{"port": port}])]
        and (
            "from" not in rule
            or any(
                "podSelector" in peer
                and peer["podSelector"].get("matchLabels", {}).items() <= labels.items()
                for peer in rule["from"]
            )
        )
        for policy in policies
        for rule in policy["ingress"]
    )


@pytest.mark.parametrize(("name", "opened"), [("generated", True), ("inline", False)])
def test_only_metrics_that_need_a_certificate_are_open_to_all(name: str, opened: bool) -> None:
    documents = rendered(MATRIX[name])
    agent, leader = (pod_of(documents, one).labels for one in ("agent", "coordinator"))
    stranger = {"app": "stranger"}
    for component in ("agent", "coordinator"):
        assert may_reach(documents, 9400, of=component, labels=stranger) is opened
    assert not may_reach(documents, 29400, of="coordinator", labels=stranger)
    assert not may_reach(documents, 40001, of="agent", labels=stranger)
    assert not may_reach(documents, 40001, of="agent", labels=leader)
    assert may_reach(documents, 40001, of="agent", labels=agent)
    for labels in (agent, leader):
        assert may_reach(documents, 29400, of="coordinator", labels=labels)


def test_machines_reach_coordinators_and_the_bundled_etcd_if_agents_use_their_network() -> None:
    block = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    given = merged(
        MATRIX["bundled-etcd"],
        {"agents": {"hostNetwork": True}, "networkPolicy": {"from": [block]}},
    )
    documents = rendered(given)
    check(documents)
    policies = {
        policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: policy["spec"]
        for policy in of_kind(documents, "NetworkPolicy")
    }
    assert set(policies) == {"coordinator", "etcd"}, "none applies to pods on the host's network"
    for component, port in (("coordinator", 29400), ("etcd", 2379)):
        assert any(
            block in rule["from"] and {"port": port} in rule["ports"]
            for rule in policies[component]["ingress"]
        )


def test_the_pod_monitor_scrapes_coordinators_agents_and_the_bundled_etcd() -> None:
    documents = rendered(MATRIX["monitored-etcd"])
    seen: dict[str, str] = {}
    for monitor in of_kind(documents, "PodMonitor"):
        selector = monitor["spec"]["selector"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for component in ("agent", "coordinator", "etcd"):
            pod = pod_of(documents, component)
            fits = selector["matchLabels"].items() <= pod.labels.items() and all(
                pod.labels[one["key"]] in one["values"]
                for one in selector.get("matchExpressions", ())
            )
            if fits:
                seen[component] = endpoint["port"]
                assert endpoint["port"] in {port["name"] for port in pod.container["ports"]}
    assert seen == {"agent": "http", "coordinator": "http", "etcd": "client"}
    agent = pod_of(documents, "agent")
    assert outcome(agent)["ELASTIC_HTTP_ADDRESS"] == "0.0.0.0:9400"
    off = rendered(merged(MATRIX["inline"], {"agents": {"http": {"enabled": False}}}))
    agent = pod_of(off, "agent")
    assert outcome(agent)["ELASTIC_HTTP_ADDRESS"] == "off"
    assert "ports" not in agent.container


def test_settings_that_the_chart_derives_exist() -> None:
    unknown = {
        name
        for command, names in chart_documents.SET_BY_CHART.items()
        for name in names - set(chart_documents.all_settings(command))
    }
    assert unknown == set()


def test_the_app_version_of_the_chart_is_that_of_elastic() -> None:
    assert f"appVersion: {main.__version__}\n" in (CHART / "Chart.yaml").read_text()
