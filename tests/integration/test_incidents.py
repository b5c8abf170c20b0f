"""The incidents of a real job are kept through a change of leader and after the job's end."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chrome_trace import check_trace
from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import NODES, LoopbackJob
from tests.integration.running import SCRIPTS, Place

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LIMITS = {
    "ELASTIC_HANG_TIMEOUT_S": "2",
    "ELASTIC_PAUSE_TIMEOUT_S": "2",
    "ELASTIC_FIRST_STEP_TIMEOUT_S": "5",
    "ELASTIC_JOIN_TIMEOUT_S": "2",
}


class Job(LoopbackJob):
    """A job of two nodes with a leader and a follower; operators' commands tell its incidents."""

    def __init__(self, place: Place, etcd: str) -> None:
        self.folder, self.checkpoints = place.files / "orders", place.files / "checkpoints"
        self.folder.mkdir()
        script = (SCRIPTS / "hangs_when_told.py", self.folder)
        saving = {
            "ELASTIC_CHECKPOINT_DIR": str(self.checkpoints),
            "ELASTIC_CHECKPOINT_EVERY": "20",
        }
        super().__init__(place, script, etcd=etcd, **LIMITS, **saving)

    def is_whole(self) -> bool:
        """Whether all nodes are in one group that has saved a checkpoint since it formed."""
        saved = self.events("checkpoint_committed")
        formed = self.events("generation_formed")
        return (
            self.world() == len(NODES)
            and bool(saved)
            and saved[-1]["time"] > max(e["time"] for e in formed)
        )

    def json_of(self, *command: str) -> Any:
        return json.loads(self.output_of(*command, "--output", "json"))

    def incident(self, number: int) -> dict[str, Any]:
        """Return an incident's record. It must have been told as an event exactly once."""
        self.wait(lambda: self.events("incident", number=number), f"incident {number}")
        assert len(self.events("incident", number=number)) == 1
        found: dict[str, Any] = self.json_of("explain", str(number))
        return found


def traced(job: Job) -> Path:
    """Return the file that `elastic trace` has written."""
    file = job.files / "trace.json"
    job.output_of("trace", str(file))
    return file


@pytest.fixture
def job(place: Place, etcd: EtcdCluster) -> Iterator[Job]:
    with Job(place, etcd.endpoints()) as job:
        job.start_candidate()
        job.wait(lambda: job.events("elected"), "a leader")
        job.start_agents()
        job.start_candidate()
        job.wait(job.is_whole, "a group of all")
        yield job


def put_a_file_at(checkpoints: Path) -> bool:
    """Put a file in place of the directory. False if a save has made a new directory meanwhile."""
    checkpoints.rename(tempfile.mkdtemp(dir=checkpoints.parent))
    try:
        with checkpoints.open("x") as file:
            file.write("no directory")
    except FileExistsError:
        return False
    return True


def test_a_kill_a_failed_save_and_a_hang_are_explained_across_leaders(job: Job) -> None:
    rank = job.events("generation_formed")[-1]["members"]
    os.kill(job.worker_pid("b"), signal.SIGKILL)
    killed = job.incident(1)
    assert (killed["cause"], killed["outcome"]) == ("worker_failed", "recovered")
    assert "was ended by SIGKILL (signal 9)" in killed["summary"]
    (process,) = killed["processes"]
    assert (process["node"], process["worker"]) == ("b", rank[process["rank"]])
    assert killed["noticed_by"]
    assert killed["recovery"]["first_step_s"] > 0.0
    assert (killed["steps_again"], killed["samples_given_up"]) == (1, 4)
    assert killed["committed"] > 0
    assert killed["nodes"] == ["b"]
    job.wait(job.is_whole, "a whole group again")

    job.wait(lambda: put_a_file_at(job.checkpoints), "a file in place of the checkpoints")
    refused = job.incident(2)
    assert (refused["cause"], refused["outcome"]) == ("save_failed", "trains_on")
    assert str(job.checkpoints) in refused["saves"]["message"]
    job.checkpoints.unlink()
    job.wait(lambda: job.json_of("explain", "2")["outcome"] == "saved_since", "a later save")

    leader, follower = job.coordinators
    follower.wait_for_event("standing_by")
    os.kill(leader.process.pid, signal.SIGKILL)
    follower.wait_for_event("elected")
    job.start_candidate()
    job.wait(job.is_whole, "a group under the next leader")
    before = [i["number"] for i in job.json_of("incidents")]
    assert before[:2] == [1, 2]
    kept = job.json_of("explain", "1")
    assert kept | {"lost_s": 0, "seconds": 0} == killed | {"lost_s": 0, "seconds": 0}
    assert kept["lost_s"] >= killed["lost_s"]

    (job.folder / "hang").touch()
    number = before[-1] + 1
    hung = job.incident(number)
    assert (hung["cause"], hung["outcome"]) == ("hang", "recovered")
    assert "in the forward pass, in `forward`, hangs_when_told.py:" in hung["hang"]["verdict"]
    assert hung["noticed_by"].startswith("the coordinator: no step was committed for ")
    assert hung["hang"]["stacks"][0]["rank"] == 1
    assert "in forward" in hung["hang"]["stacks"][0]["text"]
    assert hung["processes"][0]["message"].startswith("hung ")
    assert hung["seconds"]["hang"] > 2 * 2.0, "of both slots"

    trace = traced(job)
    document = json.loads(trace.read_text())
    check_trace(document)
    events = document["traceEvents"]
    shown = [e["name"] for e in events if e["ph"] == "X"]
    assert f"incident {number}: hang" in shown
    assert f"into generation {hung['followed_by']}" in shown
    assert any(name.startswith("generation ") for name in shown)
    assert sum(name.startswith("step ") for name in shown) > 20
    arrows = {e["ph"]: e for e in events if e["ph"] in "sf" and e["name"] == f"incident {number}"}
    assert arrows["f"]["ts"] > arrows["s"]["ts"]

    page = job.start("explain")
    assert page.wait() == 0
    assert page.output[0].startswith(f"incident {number}, ")
    assert any("| " in line and "hangs_when_told.py" in line for line in page.output)
    job.wait(job.is_whole, "a whole group again")
    assert job.start("stop").wait() == 0
    for agent in (job.agents[node][-1] for node in NODES):
        assert agent.wait() == 82
    assert [i["number"] for i in job.json_of("incidents")] == [*before, number]
    assert job.json_of("explain", "1")["summary"] == killed["summary"]


def test_a_script_that_fails_at_once_is_explained_after_its_end(
    place: Place, etcd: EtcdCluster
) -> None:
    script = (SCRIPTS / "raises_in_step.py", "all", place.files / "none")
    with LoopbackJob(place, script, etcd=etcd.endpoints()) as job:
        job.start_coordinator()
        job.start_agents()
        assert job.coordinators[0].wait() == 1, job.story()
        text = job.output_of("explain")
        assert "the job ended with it" in text
        assert "Traceback (most recent call last)" in text
