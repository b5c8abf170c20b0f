"""Workers listen for their group within the range that their node allows."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place, wait_for_step

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
    places = {where for pid in place.processes() for where in _listens(pid)}
    assert places, "the group's store listens, and so does gloo"
    assert all(ipaddress.ip_address(where).is_loopback for where in places), places


def _listens(pid: int) -> Iterator[str]:
    """The addresses at which a process accepts connections from the network."""
    found = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found[f"socket:[{inode}]"] = socket.inet_ntop(family, packed)
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            where = found.get(os.readlink(descriptor))
            if where is not None:
                yield where
