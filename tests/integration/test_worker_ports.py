"""Workers listen for their group within the range that their node allows."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from tests.etcd_cluster import EtcdCluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place

FIRST = 20_000 + os.getpid() % 500 * 20  # below the kernel's ephemeral ports
LAST = FIRST + 19


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
