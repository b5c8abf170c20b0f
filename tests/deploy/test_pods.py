"""The chart's pods as processes of this machine: rendered commands and environments, a real etcd,
and the verdicts of the rendered Job on their exit codes."""

from __future__ import annotations

import base64
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ExitCode
from tests.cluster import TRAINER
from tests.cluster_steps import StepRecords
from tests.deploy.helm import Values, merged, render
from tests.deploy.rendered import Pod, check, job_spec, of_kind, pod_of, verdict
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
SUCCESSOR_WITHIN_S = 10.0


@pytest.fixture
def etcd() -> Iterator[EtcdCluster]:
    with etcd_cluster(size=1) as cluster:
        yield cluster


class Release(LoopbackJob):
    """Runs the pods of one rendering. Volumes are directories; pods share all but emptyDir."""

    def __init__(
        self, place: Place, etcd: EtcdCluster, values: Values, *, above: Values = VALUES
    ) -> None:
        self._given = merged(above, {"etcd": {"endpoints": etcd.endpoints().split(",")}}, values)
        self.documents = render(self._given)
        super().__init__(place, (), etcd=etcd.endpoints(), job="gpt")
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
        process = self.start_pod(pod, own)  # a real pod has the ports for itself
        self._coordinator_environment = self.environment_of(pod, {}) | own
        self.coordinators.append(process)
        return process

    def agent(self, index: int, machine: str) -> CommandProcess:
        fields = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
            "spec.nodeName": machine,
            "status.podIP": "127.0.0.1",
        }
        own = {"ELASTIC_HTTP_ADDRESS": "off"}  # a real pod has the ports for itself
        process = self.start_pod(pod_of(self.documents, "agent"), own, fields)
        self.agents.setdefault(f"gpt-{index}", []).append(process)
        return process

    def upgrade(self, values: Values) -> None:
        """Render again with `values`. Secrets stay, because helm finds them in a cluster."""
        self._given = merged(self._given, values)
        kept = of_kind(self.documents, "Secret")
        self.documents = kept + [d for d in render(self._given) if d["kind"] != "Secret"]

    def trained(self, agent: CommandProcess) -> list[float]:
        """Return when the workers of an agent have committed steps (CLOCK_MONOTONIC)."""
        processes = {f"steps-{event['pid']}" for event in agent.named("worker_started")}
        return [
            float(row["at"])
            for process, rows in self.steps.by_process().items()
            for row in rows
            if process in processes and row["kind"] == "commit"
        ]

    def audit(self) -> None:
        """Assert that each step was committed, in one generation, and begun once by each worker."""
        generations: dict[int, set[int]] = defaultdict(set)
        for row in self.steps.commits():
            generations[row["step"]].add(row["generation"])
        assert sorted(generations) == list(range(len(generations))), "a step is missing"
        assert [step for step, those in generations.items() if len(those) > 1] == []
        assert self.steps.repeated(since_s=0.0) == []

    def stop(self) -> None:
        stopped = self.exec("stop")
        assert stopped.process.returncode == 0, stopped.story()

    def exec(self, *arguments: str) -> CommandProcess:
        """Run a command with the environment of a coordinator's pod; return after its end."""
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
        """Return the path on this machine for a path in the pod; leave other text as it is."""
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
        if "emptyDir" in volume:  # for sockets, whose paths must be short
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


def test_deleted_drained_stopped_and_finished_pods_end_with_the_right_verdict(
    place: Place, etcd: EtcdCluster
) -> None:
    with Release(place, etcd, {}) as release:
        spec = job_spec(release.documents)
        grace_s = pod_of(release.documents, "agent").spec["terminationGracePeriodSeconds"]
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
        assert not release.trained(again)
        agents[1] = release.agent(1, "machine-2")
        generation = release.generation()
        release.wait(lambda: release.generation() > generation, "another group")
        release.wait(lambda: release.world() == 2, "a group with another machine")

        # The job is stopped: nothing trains again, and coordinators keep serving.
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
    with Release(place, etcd, SHORT) as release:
        leaders = [release.coordinator()]
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-2")]
        assert [verdict(spec, agent.wait()) for agent in agents] == ["Complete"] * 2
        leaders[0].wait_for_event("serving_after_end", exit_code=0)
        leaders[0].process.send_signal(signal.SIGTERM)
        assert leaders[0].wait() == 0


def test_training_continues_in_pods_with_another_image(place: Place, etcd: EtcdCluster) -> None:
    with Release(place, etcd, {"run": "image"}) as release:
        spec = job_spec(release.documents)
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
            """Replace a new agent that had a place when the old ones left, and so ended too."""
            for index, agent in enumerate(after):
                if agent.process.poll() is not None:
                    assert verdict(spec, agent.wait()) == "Ignore", agent.story()
                    after[index] = release.agent(index, f"machine-{index + 2}")
            return release.steps.newest() >= trained + 10

        release.wait(trains_on, "steps beyond those before")
        assert not release.events("state_restored", source="initial")[1:]
        assert release.exec("stop").process.returncode == 0
        assert [agent.wait() for agent in after] == [ExitCode.STOPPED] * 2


def test_a_release_with_only_three_values_set_trains(place: Place, etcd: EtcdCluster) -> None:
    out = place.files / "volumes" / "checkpoints" / "out"
    given = f"import sys\n\nsys.argv[1:] = [{str(out)!r}, '--epochs', '2']\n"
    three: Values = {
        "script": {"inline": given + TRAINER.read_text()},
        "checkpoint": {"dir": "/checkpoints"},
    }
    with Release(place, etcd, three, above={}) as release:
        check(release.documents)
        spec = job_spec(release.documents)
        for _ in range(2):
            release.coordinator()
        agents = [release.agent(index, f"machine-{index}") for index in range(spec["completions"])]
        assert [verdict(spec, agent.wait()) for agent in agents] == ["Complete"] * 2
        assert release.steps.newest() > 0
        release.audit()
        again = release.agent(0, "machine-0")  # a StatefulSet would restart the pod
        assert again.wait() == ExitCode.OK
        assert not again.named("worker_started")


@pytest.mark.parametrize(("spot", "grace_s"), [(False, 30), (True, 15)])
def test_a_deleted_pod_costs_no_step_and_its_successor_trains_soon(
    spot: bool, grace_s: int, place: Place, etcd: EtcdCluster
) -> None:
    with Release(place, etcd, {"agents": {"spot": spot}}) as release:
        spec = job_spec(release.documents)
        assert pod_of(release.documents, "agent").spec["terminationGracePeriodSeconds"] == grace_s
        release.coordinator()
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-1")]
        release.wait(lambda: all(map(release.trained, agents)), "steps of both")
        for index in (1, 0):
            agents[index].process.send_signal(signal.SIGTERM)
            assert verdict(spec, agents[index].wait(grace_s)) == "Ignore"
            began = time.monotonic()
            agents[index] = release.agent(index, f"machine-{index}")
            release.wait(lambda agent=agents[index]: release.trained(agent), "steps of the next")  # type: ignore[misc]
            took_s = release.trained(agents[index])[0] - began
            print(f"with {grace_s} s of grace, the next pod trains {took_s:.1f} s after its start")
            assert took_s < SUCCESSOR_WITHIN_S
        release.stop()
        assert [agent.wait() for agent in agents] == [ExitCode.STOPPED] * 2
        release.audit()


def test_a_failed_script_fails_its_index_and_is_not_rerun(place: Place, etcd: EtcdCluster) -> None:
    with Release(place, etcd, {"script": {"inline": "raise ValueError('wrong')\n"}}) as release:
        spec = job_spec(release.documents)
        leader = release.coordinator()
        for index in (0, 1):
            release.agent(index, f"machine-{index}")
        for agents in release.agents.values():
            code = agents[0].wait()
            assert (code, verdict(spec, code)) == (ExitCode.SCRIPT_FAILED, "FailIndex")
        leader.wait_for_event("serving_after_end", exit_code=int(ExitCode.SCRIPT_FAILED))
        again = release.agent(0, "machine-0")
        assert again.wait() == ExitCode.SCRIPT_FAILED
        assert not again.named("worker_started")


def test_a_missing_script_counts_and_starts_no_worker(place: Place, etcd: EtcdCluster) -> None:
    with Release(place, etcd, {"script": {"inline": "", "path": "/no/script.py"}}) as release:
        spec = job_spec(release.documents)
        release.coordinator()
        for _ in range(2):  # a StatefulSet would restart the pod
            code = (agent := release.agent(0, "machine-0")).wait()
            assert (code, verdict(spec, code)) == (ExitCode.CONFIGURATION, "Count")
            assert "/no/script.py" in agent.story()
            assert not agent.named("worker_started")


def test_pods_of_a_run_that_needs_a_fix_end_and_the_next_one_fails_the_job(
    place: Place, etcd: EtcdCluster
) -> None:
    script = (
        "import elastic\nfrom elastic.errors import ConfigurationError\n\n"
        "elastic.init()\nraise ConfigurationError('no data')\n"
    )
    with Release(place, etcd, {"script": {"inline": script}, "run": "fix"}) as release:
        spec = job_spec(release.documents)
        release.coordinator()
        code = release.agent(0, "machine-0").wait()
        assert (code, verdict(spec, code)) == (ExitCode.CONFIGURATION, "Count")
        again = release.agent(0, "machine-1")
        code = again.wait()
        assert (code, verdict(spec, code)) == (ExitCode.STOPPED, "FailJob")
        (told,) = again.named("already_ended")
        assert told["exit_code"] == ExitCode.CONFIGURATION
        assert not again.named("worker_started")


def test_a_quarantined_machine_never_trains_again(place: Place, etcd: EtcdCluster) -> None:
    with Release(place, etcd, {"coordinators": {"settings": {"quarantine_after": 1}}}) as release:
        spec = job_spec(release.documents)
        release.coordinator()
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-1")]
        release.wait(lambda: all(map(release.trained, agents)), "steps of both")
        os.kill(release.worker_pid("gpt-1"), signal.SIGKILL)
        code = agents[1].wait()
        assert (code, verdict(spec, code)) == (ExitCode.QUARANTINED, "Ignore")
        again = release.agent(1, "machine-1")
        assert again.wait() == ExitCode.QUARANTINED
        assert not release.trained(again)
        agents[1] = release.agent(1, "machine-2")
        release.wait(lambda: release.trained(agents[1]), "steps on another machine")
        release.stop()
        assert [agent.wait() for agent in agents] == [ExitCode.STOPPED] * 2


def test_upgraded_coordinators_do_not_disturb_the_group(place: Place, etcd: EtcdCluster) -> None:
    with Release(place, etcd, {}) as release:
        before = of_kind(release.documents, "Job")
        leaders = [release.coordinator(), release.coordinator()]
        agents = [release.agent(0, "machine-0"), release.agent(1, "machine-1")]
        release.wait(lambda: all(map(release.trained, agents)), "steps of both")
        release.wait(lambda: release.world() == 2, "a group of both")
        generation, together = release.generation(), release.steps.together()
        release.upgrade({"coordinators": {"image": {"tag": "2"}}})
        assert of_kind(release.documents, "Job") == before, "the agents' pods stay"
        pod = pod_of(release.documents, "coordinator")
        assert pod.container["image"] == "elastic:2"
        for leader in leaders:  # one starts before one ends
            release.coordinator().wait_for_event("coordinator_started")
            leader.process.send_signal(signal.SIGTERM)
            leader.wait(pod.spec["terminationGracePeriodSeconds"])
        release.wait(lambda: any(c.named("elected") for c in release.coordinators[2:]), "a leader")
        reached = release.steps.newest()
        release.wait(lambda: release.steps.newest() >= reached + 50, "steps under it")
        assert (release.generation(), release.steps.together()) == (generation, together)
        release.stop()
        assert [agent.wait() for agent in agents] == [ExitCode.STOPPED] * 2
        release.audit()
