"""A drained node whose workers do not come to a step boundary."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import NODES, LoopbackJob
from tests.integration.running import SCRIPTS, Place

DRAIN_TIMEOUT_S = 2.0
DRAINED = 80


@pytest.mark.long
@pytest.mark.timeout(240)  # five agents
def test_a_drain_ends_after_its_timeout_and_keeps_the_machine_out(
    place: Place, etcd: EtcdCluster, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    script = (SCRIPTS / "evaluates_for_ever.py", begun)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as state,  # a short path, for sockets
        LoopbackJob(place, script, etcd=etcd.endpoints()) as job,
    ):
        job.start_coordinator("--min-workers", "2")
        job.start_agents("--drain-timeout-s", str(DRAIN_TIMEOUT_S))
        job.wait(lambda: len(list(begun.iterdir())) == len(NODES), "both evaluations")
        asked_s = time.monotonic()
        assert job.start("drain", "b").wait() == 0
        assert job.agents["b"][-1].wait() == DRAINED, job.story()
        assert time.monotonic() - asked_s >= DRAIN_TIMEOUT_S
        (told,) = job.events("leave_timed_out", node="b")
        assert told["waited_s"] >= DRAIN_TIMEOUT_S
        assert len(job.agents["b"][-1].named("leave_timed_out")) == 1
        job.wait(lambda: job.events("node_lost", node="b"), "the loss of b")
        assert job.agents["a"][-1].process.poll() is None
        assert not job.events("node_quarantined")
        (told,) = job.events("node_drained")
        assert (told["node"], told["machine"]) == ("b", "machine-of-b")
        # The machine is kept out under any name, and the name is let in on any other machine.
        assert job.start_agent("c", "--machine", "machine-of-b").wait() == DRAINED, job.story()
        job.start_agent("b", "--machine", "another")
        job.wait(lambda: len(job.events("node_connected", node="b")) == 2, "b elsewhere")
        late = job.start_agent("b", "--machine", "late", "--state-dir", state)
        late.wait_for_event("registration_waiting", at_most_s=3.0)
        nodes = json.loads(job.output_of("nodes", "--output", "json"))
        states = {(n["node"], n["machine"]): n["state"] for n in nodes}
        assert states["b", "another"] == "ready"
        assert states["b", "machine-of-b"] == "drained"


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_time_that_a_drain_delays_the_group_is_accounted_for(
    place: Place, etcd: EtcdCluster, tmp_path: Path
) -> None:
    flag = tmp_path / "hangs"
    script = (SCRIPTS / "hangs_somewhere.py", "block", "1", flag)
    with LoopbackJob(place, script, etcd=etcd.endpoints()) as job:
        job.start_coordinator()
        job.start_agents("--drain-timeout-s", str(DRAIN_TIMEOUT_S))
        job.wait(flag.exists, "the hang")
        hung_at = float(flag.read_text())
        (formed,) = job.events("generation_formed")
        node = str(formed["members"][1]).partition("-")[0]
        assert job.start("drain", node).wait() == 0
        assert job.agents[node][-1].wait() == DRAINED, job.story()
        job.wait(lambda: job.events("recovered"), "the others to go on")
        (recovered,) = job.events("recovered")
        true_s = recovered["time"] - hung_at
        print(f"accounted {recovered['total_s']:.2f} of {true_s:.2f} s")
        assert recovered["total_s"] > DRAIN_TIMEOUT_S
        assert abs(recovered["total_s"] - true_s) < 1.0
        phases = ("detect_s", "persist_s", "notify_s", "join_s", "sync_s", "first_step_s")
        assert sum(recovered[p] for p in phases) == pytest.approx(recovered["total_s"], abs=0.01)
