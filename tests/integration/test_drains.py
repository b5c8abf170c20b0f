"""A drained node whose workers do not come to a step boundary."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.etcd_cluster import etcd_cluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place

NODES = ("a", "b")
DRAIN_TIMEOUT_S = 2.0
DRAINED = 80


@pytest.mark.timeout(240)  # five agents
def test_a_drain_does_not_wait_for_ever(place: Place, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    script = (SCRIPTS / "evaluates_for_ever.py", begun)
    with etcd_cluster(size=1) as cluster:
        job = LoopbackJob(place, script, etcd=cluster.endpoints())
        try:
            job.start_coordinator("--min-workers", "2")
            for node in NODES:
                job.start_agent(node, "--drain-timeout-s", str(DRAIN_TIMEOUT_S))
            job.wait(lambda: len(list(begun.iterdir())) == len(NODES), "both evaluations")
            asked_s = time.monotonic()
            assert job.start("drain", "b").wait() == 0
            assert job.agents["b"][-1].wait() == DRAINED, job.story()
            assert time.monotonic() - asked_s >= DRAIN_TIMEOUT_S
            job.wait(lambda: job.events("node_lost", node="b"), "the loss of b")
            assert job.agents["a"][-1].process.poll() is None
            assert not job.events("node_quarantined")
            (told,) = job.events("node_drained")
            assert (told["node"], told["machine"]) == ("b", "machine-of-b")
            # The machine is kept out under any name, the name is welcome on any other machine.
            assert job.start_agent("c", "--machine", "machine-of-b").wait() == DRAINED, job.story()
            job.start_agent("b", "--machine", "another")
            job.wait(lambda: len(job.events("node_connected", node="b")) == 2, "b elsewhere")
            late = job.start_agent("b", "--machine", "late", "--state-dir", tmp_path / "late")
            late.wait_for_event("registration_waiting", at_most_s=3.0)
            shown = job.start("nodes", "--output", "json")
            assert shown.wait() == 0
            nodes = json.loads("".join(shown.output))
            states = {(n["node"], n["machine"]): n["state"] for n in nodes}
            assert states["b", "another"] == "ready"
            assert states["b", "machine-of-b"] == "drained"
        finally:
            job.close()
