"""The metrics and page of a real job while a worker is killed and the leader changes."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.browser import Tab, browser
from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import NODES, TrainingJob
from tests.integration.running import Place
from tests.job_process import CommandProcess
from tests.waiting import eventually

Samples = dict[tuple[str, ...], float]


class Job(TrainingJob):
    """A job whose daemons all serve HTTP."""

    def start_candidate(self, *options: str | Path) -> CommandProcess:
        most = ("--max-workers", str(len(NODES)))  # else the first group waits for more
        return super().start_candidate("--http-address", "127.0.0.1:0", *most, *options)


def ask(process: CommandProcess, path: str) -> tuple[int, str]:
    address = process.wait_for_event("http_started")["address"]
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=10.0) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(process: CommandProcess) -> Samples:
    """Return the values by name and label values, without the labels `job` and `le`."""
    status, text = ask(process, "/metrics")
    assert status == 200, text
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in ("job", "le"))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def accounted(job: Job) -> dict[str, Any]:
    """Return `elastic report`. Checks that all time of all slots is accounted for, within 1%."""
    connected = job.events("node_connected")
    since = [min(e["time"] for e in connected if e["node"] == node) for node in NODES]
    least_s = sum(time.time() - at for at in since)
    report: dict[str, Any] = json.loads(job.output_of("report", "--output", "json"))
    most_s = sum(time.time() - at for at in since)
    total_s = sum(report["kinds"].values())
    assert report["wanted_slots"] == len(NODES)
    assert abs(total_s - report["slot_seconds"]) <= 0.01 * total_s, report
    assert 0.99 * least_s <= total_s <= 1.01 * most_s, report
    return report


def settled(process: CommandProcess, *name: str, deadline_s: float = 30.0) -> float:
    """Wait until the value is not 0, and return it."""
    return eventually(
        lambda: scrape(process).get(name, 0.0),
        lambda: f"{name} is 0\n{ask(process, '/metrics')[1]}",
        deadline_s,
        every_s=0.2,
    )


def look_at_the_page(tab: Tab, leader: CommandProcess) -> None:
    """Open the leader's page in a browser; it must show the training job without an error."""
    tab.open(leader.wait_for_event("http_started")["address"] + "/")
    tab.wait_for("document.getElementById('state')?.textContent === 'Training'")
    tab.wait_for(f"document.querySelectorAll('.slot[data-p=T]').length >= {len(NODES)}")
    assert tab.errors == []


def shows(tab: Tab, text: str) -> None:
    tab.wait_for(f"document.body.innerText.includes({text!r})")


@pytest.fixture
def tab() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.fixture
def job(place: Place, etcd: EtcdCluster) -> Iterator[Job]:
    with Job(place, etcd=etcd.endpoints()) as job:
        job.start_candidate()
        job.wait(lambda: job.events("elected"), "a leader")
        job.start_agents("--http-address", "127.0.0.1:0")
        job.wait_for_full_group()
        yield job


def test_metrics_and_page_show_a_loss_and_keep_it_across_leaders(job: Job, tab: Tab) -> None:
    (leader,) = job.coordinators
    standby = job.start_candidate()
    before = scrape(leader)
    assert before["elastic_leader",] == 1
    assert before["elastic_world_size",] == before["elastic_wanted_world_size",] == len(NODES)
    assert abs(before["elastic_last_commit_timestamp_seconds",] - time.time()) < 30.0
    assert before["elastic_store_errors_total", "put"] == 0
    look_at_the_page(tab, leader)
    with open(f"/proc/{job.worker_pid('b')}/fd/1", "a") as output:
        output.write("".join(f"line {n}\n" for n in range(200)))
    status, text = ask(leader, f"/page/log/{job.worker('b')}")
    assert (status, text.splitlines()) == (200, [f"line {n}" for n in range(100, 200)])
    assert ask(leader, "/page/log/0")[0] == 200, "by its rank"
    assert ask(leader, "/page/log/9")[0] == 404
    os.kill(job.worker_pid("b"), signal.SIGKILL)
    shows(tab, "SIGKILL (signal 9)")
    job.wait(lambda: job.events("recovered"), "a recovery")
    shows(tab, "recovered in")
    shows(tab, "(node b, worker")
    assert tab.errors == []
    job.wait(lambda: job.world() == len(NODES), "a whole group again")
    job.wait_for_more_steps()
    reason = job.events("recovered")[0]["reason"]
    assert settled(leader, "elastic_recovery_duration_seconds_count", reason) == 1
    after = scrape(leader)
    assert after["elastic_recovery_phase_duration_seconds_count", "join"] == 1
    assert after["elastic_worker_failures_total", "signal"] == 1
    assert after["elastic_steps_committed_total",] > before["elastic_steps_committed_total",]
    assert after["elastic_step_duration_seconds_count",] > 0
    assert after["elastic_samples_committed_total",] > 0
    (lost,) = [i for i in accounted(job)["incidents"] if i["reason"] == reason]
    assert lost["nodes"] == ["b"]
    assert {"recomputed", "join", "start_up"} <= set(lost["seconds"]), lost
    of_b = ("elastic_slot_seconds_lost_total", "b")
    job.wait(lambda: scrape(leader)[of_b] >= lost["lost_s"], "the same as a metric")

    assert ask(standby, "/readyz") == (200, "ready\n")
    followed = scrape(standby)
    assert followed["elastic_leader",] == 0
    assert ("elastic_world_size",) not in followed
    followed_page = json.loads(ask(standby, "/page/state")[1])["sections"]["head"]
    assert followed_page["state"] == "standby"
    assert followed_page["leader_page"] == leader.wait_for_event("http_started")["address"]
    agent = job.agents["a"][0]
    assert ask(agent, "/")[0] == 404
    assert ask(agent, "/readyz") == (200, "ready\n")
    assert scrape(agent)["elastic_agent_connected", "a"] == 1

    os.kill(leader.process.pid, signal.SIGKILL)
    job.wait(lambda: standby.named("elected"), "the next leader")
    assert settled(standby, "elastic_leader") == 1
    assert settled(standby, "elastic_step_duration_seconds_count") > 0
    job.wait_for_more_steps()
    shows(tab, "Lost contact")
    look = json.loads(ask(standby, "/page/state")[1])["sections"]
    assert look["head"]["state"] == "training"
    assert [i.get("cause") for i in look["incidents"].values()].count("worker_failed") == 1
    taken_over = scrape(standby)
    assert taken_over["elastic_elections_total",] == 2
    assert taken_over["elastic_worker_failures_total", "signal"] == 1
    assert taken_over["elastic_recovery_duration_seconds_count", reason] == 1
    assert settled(standby, "elastic_world_size") == len(NODES)
    committed = "elastic_steps_committed_total"
    assert settled(standby, committed) > after[committed,], "they go on"
    (known,) = [i for i in accounted(job)["incidents"] if i["number"] == lost["number"]]
    assert known["nodes"] == ["b"]
    assert known["lost_s"] >= lost["lost_s"] - 1e-5  # each part is kept in microseconds

    os.kill(standby.process.pid, signal.SIGKILL)
    job.wait(lambda: ask(agent, "/readyz")[0] == 503, "an agent without a coordinator")
    assert ask(agent, "/readyz") == (503, "no coordinator answers\n")
    assert ask(agent, "/healthz") == (200, "ok\n")
    connected = ("elastic_agent_connected", "a")
    eventually(lambda: scrape(agent)[connected] == 0, "it is 1", 10.0, every_s=0.2)
    job.wait_for_more_steps()
