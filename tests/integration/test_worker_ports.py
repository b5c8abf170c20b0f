"""Workers listen for their group within the range that their node allows."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.etcd_cluster import etcd_cluster
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place

FIRST = 20_000 + os.getpid() % 500 * 20  # below what the kernel gives to others
LAST = FIRST + 19


@pytest.mark.timeout(120)
def test_rank_0_is_met_within_the_range_and_taken_ports_are_passed_over(
    place: Place, tmp_path: Path
) -> None:
    free = LAST
    with etcd_cluster(size=1) as cluster:
        job = LoopbackJob(
            place, (SCRIPTS / "classic.py", "environment", tmp_path), etcd=cluster.endpoints()
        )
        taken = [_taken(port) for port in range(FIRST, free)]
        try:
            job.start_coordinator()
            assert job.start_agent("a", "--worker-port-range", f"{FIRST}-{LAST}").wait() == 0
        finally:
            job.close()
            for one in filter(None, taken):
                one.close()
    assert int(json.loads((tmp_path / "0.json").read_text())["MASTER_PORT"]) == free


def _taken(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:  # by somebody else
        return None
