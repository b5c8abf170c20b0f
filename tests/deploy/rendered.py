"""Checks what must hold for everything that the chart renders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import kubernetes_validate

from elastic.settings.commands import every_option
from elastic.settings.fields import ENVIRONMENT_PREFIX
from tests.deploy.helm import Document

VERSIONS = ("1.31", "1.36")
CUSTOM = frozenset({"JobSet", "Certificate", "Issuer", "PodMonitor", "PrometheusRule"})
"""Kinds of custom resources."""
_SECRET = re.compile("PASSWORD|PASSWD|TOKEN|SECRET|PRIVATE KEY")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod template, and the object that it belongs to."""

    owner: str
    metadata: Document
    spec: Document

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.metadata["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Document:
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def environment(self) -> dict[str, Any]:
        """Each variable's value, or its `valueFrom`, by name."""
        listed = self.container.get("env", [])
        found = {one["name"]: one.get("value", one.get("valueFrom")) for one in listed}
        assert len(found) == len(listed), f"{self.owner} sets a variable twice"
        return found


def pods(documents: list[Document]) -> list[Pod]:
    return [pod for document in documents for pod in _pods_of(document)]


def pod_of(documents: list[Document], component: str) -> Pod:
    """Return the only pod template of a component."""
    (found,) = (pod for pod in pods(documents) if pod.component == component)
    return found


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def job_spec(documents: list[Document]) -> Document:
    """Return the spec of the only Job, which may be inside a JobSet."""
    (found,) = [spec for document in documents for spec in _job_specs(document)]
    return found


def check(documents: list[Document]) -> None:
    _valid(documents)
    _names(documents)
    for pod in pods(documents):
        _restricted(pod)
        _mounts(pod)
        _variables(pod)
    _references(documents)
    _selectors(documents)
    _grace(documents)


def _pods_of(document: Document) -> Iterator[Pod]:
    kind, name = document["kind"], f"{document['kind']} {document['metadata']['name']}"
    if kind == "Pod":
        yield Pod(owner=name, metadata=document["metadata"], spec=document["spec"])
        return
    specs = [*_job_specs(document)]
    if kind in ("Deployment", "StatefulSet", "DaemonSet"):
        specs.append(document["spec"])
    for spec in specs:
        template = spec["template"]
        yield Pod(owner=name, metadata=template["metadata"], spec=template["spec"])


def _job_specs(document: Document) -> Iterator[Document]:
    if document["kind"] == "Job":
        yield document["spec"]
    if document["kind"] == "JobSet":
        for replicated in document["spec"]["replicatedJobs"]:
            yield replicated["template"]["spec"]


def _valid(documents: list[Document]) -> None:
    """Validate objects by the schemas of Kubernetes; of custom resources, only a JobSet's Jobs."""
    for document in documents:
        objects = [document] if document["kind"] not in CUSTOM else []
        if document["kind"] == "JobSet":
            meta = {"name": "inner"}
            objects = [
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}
                for spec in _job_specs(document)
            ]
        for one in objects:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)


def _names(documents: list[Document]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(names) == len(set(names)), names
    for kind, name in names:
        assert re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name), (kind, name)


def _restricted(pod: Pod) -> None:
    """Check the `restricted` pod security standard, and what this chart promises besides."""
    security, container = pod.spec["securityContext"], pod.container["securityContext"]
    assert security["runAsNonRoot"] is True, pod.owner
    assert security.get("runAsUser", 1) != 0, pod.owner
    assert security["seccompProfile"]["type"] == "RuntimeDefault", pod.owner
    assert container["allowPrivilegeEscalation"] is False, pod.owner
    assert container["readOnlyRootFilesystem"] is True, pod.owner
    assert container["capabilities"]["drop"] == ["ALL"], pod.owner
    assert "privileged" not in container
    kinds = {kind for volume in pod.spec.get("volumes", ()) for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}, pod.owner
    assert pod.spec["automountServiceAccountToken"] is False, pod.owner
    assert pod.spec["enableServiceLinks"] is False, pod.owner


def _mounts(pod: Pod) -> None:
    volumes = [volume["name"] for volume in pod.spec["volumes"]]
    mounts = [mount["name"] for mount in pod.container["volumeMounts"]]
    assert len(volumes) == len(set(volumes)), pod.owner
    assert sorted(volumes) == sorted(mounts), pod.owner


def _variables(pod: Pod) -> None:
    known = {option.variable for option in every_option().values()}
    for name, value in pod.environment.items():
        if name.startswith(ENVIRONMENT_PREFIX):
            assert name in known, f"{pod.owner} sets {name}, which is no setting"
        if _SECRET.search(name) or _SECRET.search(str(value)):
            assert isinstance(value, dict), f"{pod.owner} has {name} in plain text"
    seen: set[str] = set()
    for name, value in pod.environment.items():
        for used in re.findall(r"(?<!\$)\$\((\w+)\)", str(value)):
            assert used in seen, f"{pod.owner}: {name} uses {used}, which comes later or never"
        seen.add(name)


def _references(documents: list[Document]) -> None:
    """Check that the ConfigMaps of pods exist, and their TLS Secrets if the chart makes Secrets."""
    present = {(one["kind"], one["metadata"]["name"]) for one in documents}
    for pod in pods(documents):
        for volume in pod.spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in present, pod.owner
            if volume["name"] == "tls" and of_kind(documents, "Secret"):
                assert ("Secret", volume["secret"]["secretName"]) in present, pod.owner


def _selectors(documents: list[Document]) -> None:
    templates = pods(documents)
    for document in documents:
        spec = document.get("spec", {})
        kind, name = document["kind"], document["metadata"]["name"]
        if kind in ("Deployment", "StatefulSet", "DaemonSet"):
            selected = _selected(spec["selector"]["matchLabels"], templates)
            assert [pod.owner for pod in selected] == [f"{kind} {name}"]
        if kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            wanted = spec.get("podSelector") or spec["selector"]
            selected = _selected(wanted.get("matchLabels", wanted), templates)
            assert len(selected) == 1, f"{kind} {name} selects {selected}"
        if kind == "Service":
            (pod,) = selected
            ports = {port["name"] for port in pod.container.get("ports", ())}
            assert {port["targetPort"] for port in spec.get("ports", ())} <= ports
        if kind == "PodDisruptionBudget":
            assert selected[0].component != "agent", "agents may always be drained"


def _selected(labels: dict[str, str], templates: list[Pod]) -> list[Pod]:
    return [pod for pod in templates if labels.items() <= pod.labels.items()]


def _grace(documents: list[Document]) -> None:
    agent = pod_of(documents, "agent")
    drain_s = float(agent.environment["ELASTIC_DRAIN_TIMEOUT_S"])
    assert agent.spec["terminationGracePeriodSeconds"] >= drain_s + 5


def verdict(spec: Document, exit_code: int, *conditions: str, container: str = "agent") -> str:
    """Return what the Job controller does about a pod: for a failed one, the first matching rule's
    action.

    spec: a Job's. conditions: types of the pod's conditions whose status is True. container: which
    one ended with `exit_code`. "Count": no rule matches, so the failure counts against the index.
    """
    if exit_code == 0:
        return "Complete"
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"containerName": ""})
        of_container = codes.get("containerName", container) == container
        if of_container and (exit_code in codes["values"]) is (codes["operator"] == "In"):
            return str(rule["action"])
        for wanted in rule.get("onPodConditions", ()):
            if wanted.get("status", "True") == "True" and wanted["type"] in conditions:
                return str(rule["action"])
    return "Count"
