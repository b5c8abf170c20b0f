"""Processes of a job listen where their node allows it, and nowhere else."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic.settings.tls_files import TlsFiles
from tests.certificates import make_certificates, sign
from tests.chaos.kills import wait_until
from tests.chaos.records import newest_step
from tests.cluster import TRAINER
from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob, TrainingJob, tls_environment
from tests.integration.running import SCRIPTS, Place, wait_for_step
from tests.listening import listens

FIRST = 20_000 + os.getpid() % 500 * 20  # below the kernel's ephemeral ports
LAST = FIRST + 19


@pytest.mark.long
@pytest.mark.timeout(120)
def test_rank_0_listens_at_a_free_port_of_the_worker_port_range(
    place: Place, etcd: EtcdCluster, tmp_path: Path
) -> None:
    free = LAST
    script = (SCRIPTS / "classic.py", "environment", tmp_path)
    with contextlib.ExitStack() as taken, LoopbackJob(place, script, etcd=etcd.endpoints()) as job:
        for port in range(FIRST, free):
            if (one := _taken(port)) is not None:
                taken.enter_context(one)
        job.start_coordinator()
        assert job.start_agent("a", "--worker-port-range", f"{FIRST}-{LAST}").wait() == 0
    assert int(json.loads((tmp_path / "0.json").read_text())["MASTER_PORT"]) == free


def _taken(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:  # the port is taken
        return None


def test_a_job_on_one_machine_listens_only_on_loopback(place: Place) -> None:
    job = place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.02)
    wait_for_step(job, 3)
    _check_only_loopback(place, {"worker"})


@pytest.mark.long
def test_a_script_for_torchrun_listens_only_on_loopback(place: Place, tmp_path: Path) -> None:
    job = place.start("plain_ddp.py", tmp_path / "c", "--steps", 1_000_000, "--pace-s", 0.02)
    wait_for_step(job, 3)
    _check_only_loopback(place, {"worker"})


@pytest.mark.long
def test_a_job_whose_groups_queue_listens_only_on_loopback(place: Place, tmp_path: Path) -> None:
    """As with NCCL; tests/nccl_manners.py."""
    job = place.start(TRAINER, tmp_path, "--nccl-manners", "--epochs", 100_000)
    wait_until(job, lambda: newest_step(tmp_path) >= 3, "step 3")
    _check_only_loopback(place, {"worker"})


@pytest.mark.long
@pytest.mark.parametrize("protected", [False, True], ids=["insecure", "tls"])
def test_nodes_on_loopback_listen_only_there(
    place: Place, etcd: EtcdCluster, tmp_path: Path, protected: bool
) -> None:
    """--insecure allows other addresses. It opens none by itself."""
    environment = {"ELASTIC_INSECURE": "true"}
    if protected:
        made = make_certificates(tmp_path / "made")
        sign(made, "all", names="IP:127.0.0.1,DNS:loopback.job.elastic")
        files = TlsFiles(ca=made.ca, certificate=made.certificate("all"), key=made.key("all"))
        environment = tls_environment(files)
    with TrainingJob(place, etcd=etcd.endpoints(), **environment) as job:
        if protected:
            job.environment["ELASTIC_ETCD"] = f"https://{job.address}"
        job.start_coordinator(*(("--store", "memory") if protected else ()))
        job.start_agents()
        job.wait_for_full_group()
        assert job.address in _check_only_loopback(place, {"worker", "agent", "coordinator"})


def _check_only_loopback(place: Place, kinds: set[str]) -> Mapping[str, str]:
    """Return the addresses at which processes listen, each with its process, which must be of these
    kinds: the group's store and gloo in workers, the probed port of an agent, the coordinator."""
    found = {where: name for pid in place.processes() for where, name in listens(pid).items()}
    assert {name.split()[1] for name in found.values()} == kinds, found
    for where in found:
        assert ipaddress.ip_address(where.rpartition(":")[0]).is_loopback, found
    return found
