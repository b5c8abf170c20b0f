"""What the chart's pods do: their commands and environments as processes of this machine, with a
real etcd, and the rendered rules of the Job on how they end."""

from __future__ import annotations

import base64
import contextlib
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ExitCode
from tests.chaos.kills import ENVIRONMENT
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.deploy.helm import Document, Values, merged, render
from tests.deploy.rendered import Pod, job_spec, of_kind, pod_of
from tests.etcd_cluster import EtcdCluster, etcd_cluster, free_ports
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import Place
from tests.job_process import CommandProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

VALUES: Values = {
    "script": {
        "inline": TRAINER.read_text(),
        "args": ["/checkpoints/out", "--epochs", "100000", "--step-s", "0.02"],
    },
    "checkpoint": {"dir": "/checkpoints", "every": 20},
    "agents": {"nprocPerNode": 1, "spot": True},
}
SHORT = {"script": {"args": ["/checkpoints/out", "--epochs", "2"]}, "run": "2"}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        yield cluster


class Release(LoopbackJob):
    """Pods of one rendering, each with its volumes in directories of its own."""

    def __init__(self, place: Place, etcd: EtcdCluster, values: Values) -> None:
        given = merged(VALUES, {"etcd": {"endpoints": etcd.endpoints().split(",")}}, values)
        self.documents = render(given)
        super().__init__(place, (), etcd=etcd.endpoints(), job="gpt", **ENVIRONMENT)
        self.volumes = place.files / "volumes"
        self.out = self.volumes / "checkpoints" / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.steps = StepRecords(self.out)
        self._place = place
        self._coordinator_environment: dict[str, str] = {}

    def coordinator(self) -> CommandProcess:
        (port,) = free_ports(1)
        own = {
            "ELASTIC_LISTEN": f"127.0.0.1:{port}",
            "ELASTIC_EVENTS_FILE": "/dev/stderr",
            "ELASTIC_HTTP_ADDRESS": "off",
        }
        pod = pod_of(self.documents, "coordinator")
        process = self.start_pod(pod, own)  # a pod has the port for itself
        self._coordinator_environment = self.environment_of(pod, {}) | own
        self.coordinators.append(process)
        return process

    def agent(self, index: int, machine: str) -> CommandProcess:
        fields = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "spec.nodeName": machine,
            "status.podIP": "127.0.0.1",
        }
        process = self.start_pod(pod_of(self.documents, "agent"), {}, fields)
        self.agents.setdefault(f"gpt-{index}", []).append(process)
        return process

    def exec(self, *arguments: str) -> CommandProcess:
        """A command in a coordinator's pod."""
        process = self.start(*arguments, **self._coordinator_environment)
        process.wait()
        return process

    def start_pod(
        self, pod: Pod, own: dict[str, str], fields: dict[str, str] | None = None
    ) -> CommandProcess:
        assert pod.container["command"] == ["elastic"]
        environment = self.environment_of(pod, fields or {}) | own
        arguments = [self.path(pod, argument) for argument in pod.container["args"]]
        return self.start(*arguments, **environment)

    def environment_of(self, pod: Pod, fields: dict[str, str]) -> dict[str, str]:
        self._mount(pod)
        found: dict[str, str] = {}
        for name, value in pod.environment.items():
            text = fields[value["fieldRef"]["fieldPath"]] if isinstance(value, dict) else value
            for known, content in found.items():
                text = text.replace(f"$({known})", content)
            found[name] = self.path(pod, text)
        return found

    def path(self, pod: Pod, text: str) -> str:
        """A path in the pod is one here."""
        for mount in pod.container["volumeMounts"]:
            if text == mount["mountPath"] or text.startswith(mount["mountPath"] + "/"):
                return str(self._mounted[mount["name"]]) + text[len(mount["mountPath"]) :]
        return text

    def _mount(self, pod: Pod) -> None:
        self._mounted: dict[str, Path] = {}
        for volume in pod.spec["volumes"]:
            self._mounted[volume["name"]] = self._directory(volume)

    def _directory(self, volume: dict[str, Any]) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.volumes / "checkpoints"
        if "emptyDir" in volume:  # sockets lie there
            return Path(tempfile.mkdtemp(prefix="p", dir=self._place.sockets))
        kind, key = ("Secret", "secretName") if "secret" in volume else ("ConfigMap", "name")
        name = (volume.get("secret") or volume["configMap"])[key]
        directory = self.volumes / name  # the same path in every pod
        directory.mkdir(exist_ok=True)
        (found,) = (one for one in of_kind(self.documents, kind) if one["metadata"]["name"] == name)
        for file, content in found["data"].items():
            data = base64.b64decode(content) if kind == "Secret" else content.encode()
            (directory / file).write_bytes(data)
            (directory / file).chmod(0o600)
        return directory


def verdict(spec: Document, exit_code: int) -> str:
    """What the Job controller does about a pod that ends so by itself."""
    if exit_code == 0:
        return "Complete"
    for rule in spec["podFailurePolicy"]["rules"]:
        if exit_code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
    return "Count"


def test_pods_train_are_replaced_and_end_as_the_job_must(place: Place, etcd: EtcdCluster) -> None:
    release = Release(place, etcd, {})
    spec = job_spec(release.documents)
    grace_s = pod_of(release.documents, "agent").spec["terminationGracePeriodSeconds"]
    try:
        leaders = [release.coordinator(), release.coordinator()]
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-1")]
        release.wait(lambda: release.world() == 2, "a group of both")
        test = release.start_pod(pod_of(release.documents, "test"), {})
        assert test.wait() == 0, test.story()
        assert "job gpt: running, 2 of 2 workers" in "\n".join(test.output)

        # The pod of a node is deleted, and replaced.
        agents[1].process.send_signal(signal.SIGTERM)
        assert verdict(spec, agents[1].wait(grace_s)) == "Ignore"
        agents[1] = release.agent(1, "machine-1")
        agents[1].wait_for_event("worker_started")
        release.wait(lambda: release.world() == 2, "a group of both again")

        # An operator drains a node; another machine takes its place.
        drained = release.exec("drain", "gpt-1", "--reason", "kernel")
        assert drained.process.returncode == 0, drained.story()
        code = agents[1].wait(grace_s)
        assert (code, verdict(spec, code)) == (ExitCode.DRAINED, "Ignore")
        again = release.agent(1, "machine-1")
        assert again.wait() == ExitCode.DRAINED
        agents[1] = release.agent(1, "machine-2")
        generation = release.generation()
        release.wait(lambda: release.generation() > generation, "another group")
        release.wait(lambda: release.world() == 2, "a group with another machine")

        # The job is stopped: nothing trains again, coordinators go on serving.
        assert release.exec("stop").process.returncode == 0
        for agent in agents:
            code = agent.wait()
            assert (code, verdict(spec, code)) == (ExitCode.STOPPED, "FailJob")
        trained = release.steps.newest()
        assert release.agent(1, "machine-2").wait() == ExitCode.STOPPED
        for leader in leaders:
            leader.wait_for_event("serving_after_end", exit_code=int(ExitCode.STOPPED))
            assert leader.process.poll() is None
            leader.process.send_signal(signal.SIGTERM)
            assert leader.wait() == ExitCode.STOPPED
        assert release.steps.newest() == trained
    finally:
        release.close()
    with contextlib.closing(Release(place, etcd, SHORT)) as release:
        leaders = [release.coordinator()]
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-2")]
        assert [verdict(spec, agent.wait()) for agent in agents] == ["Complete"] * 2
        leaders[0].wait_for_event("serving_after_end", exit_code=0)
        leaders[0].process.send_signal(signal.SIGTERM)
        assert leaders[0].wait() == 0


def test_pods_of_a_job_with_another_image_go_on(place: Place, etcd: EtcdCluster) -> None:
    release = Release(place, etcd, {"run": "image"})
    spec = job_spec(release.documents)
    try:
        release.coordinator()
        before = [release.agent(0, "machine-0"), release.agent(1, "machine-1")]
        release.wait(lambda: release.world() == 2, "a group of both")
        release.wait(lambda: release.steps.newest() >= 10, "ten steps")
        after = [release.agent(0, "machine-2"), release.agent(1, "machine-3")]
        for agent in after:
            agent.wait_for_event("agent_started")
        for agent in before:
            agent.process.send_signal(signal.SIGTERM)
        assert [agent.wait() for agent in before] == [ExitCode.TERMINATED] * 2
        trained = release.steps.newest()

        def trains_on() -> bool:
            """One that had a place when the others left ends as they did, and is replaced."""
            for index, agent in enumerate(after):
                if agent.process.poll() is not None:
                    assert verdict(spec, agent.wait()) == "Ignore", agent.story()
                    after[index] = release.agent(index, f"machine-{index + 2}")
            return release.steps.newest() >= trained + 10

        release.wait(trains_on, "steps beyond those before")
        assert not release.events("state_restored", source="initial")[1:]
        assert release.exec("stop").process.returncode == 0
        assert [agent.wait() for agent in after] == [ExitCode.STOPPED] * 2
    finally:
        release.close()
