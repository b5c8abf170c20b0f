"""A minute of strangers at the coordinator's port costs a training job nothing.

Without certificates and with another job's, all at once: connections that stay, calls that are
refused, the largest messages. `print` gives the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from elastic.rpc.control_client import ControlClient
from elastic.rpc.security import Tls
from elastic.settings.tls_files import TlsFiles
from tests.certificates import Certificates, make_certificates, sign
from tests.integration.loopback_job import TrainingJob, tls_environment
from tests.integration.running import Place
from tests.job_process import CommandProcess

LASTS_S = 60.0
CONNECTIONS, CALLS, MESSAGES = 2000, 10_000, 40
CALLERS, LARGEST = 8, 39 << 20
HANDSHAKE_MIB = 46 / 1024
"""What gRPC needs for a connection that has not shown a certificate yet, for 10 s."""

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    made = make_certificates(tmp_path / "made")
    sign(made, "ours", names="DNS:loopback.job.elastic,IP:127.0.0.1")
    sign(made, "theirs", names="DNS:theirs.job.elastic")
    return made


@pytest.fixture
def job(place: Place, made: Certificates) -> Iterator[TrainingJob]:
    with TrainingJob(place, etcd="", **tls_environment(papers(made, "ours"))) as job:
        job.environment["ELASTIC_ETCD"] = f"https://{job.address}"
        job.start_coordinator("--store", "memory", "--http-address", "off")
        job.start_agents()
        job.wait_for_full_group()
        yield job


def papers(made: Certificates, name: str) -> TlsFiles:
    return TlsFiles(ca=made.ca, certificate=made.certificate(name), key=made.key(name))


class Strangers:
    """All that strangers do in a minute; `refused` counts their calls."""

    def __init__(self, address: str, made: Certificates) -> None:
        self._address, self._made = address, made
        self._ends_at = time.monotonic() + LASTS_S
        self.refused = 0

    async def come(self) -> None:
        calls = [self._calls(CALLS // CALLERS, b"") for _ in range(CALLERS)]
        messages = [self._calls(MESSAGES // 4, bytes(LARGEST)) for _ in range(4)]
        await asyncio.gather(self._connect(), *calls, *messages)

    async def _connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        writers = []
        for _ in range(CONNECTIONS):
            with contextlib.suppress(OSError):
                writers.append((await asyncio.open_connection(host, int(port)))[1])
        await asyncio.sleep(self._ends_at - time.monotonic())
        for writer in writers:
            writer.close()

    async def _calls(self, count: int, message: bytes) -> None:
        """Call evenly over the minute."""
        began, theirs = time.monotonic(), papers(self._made, "theirs")
        assert theirs.ca is not None
        assert theirs.key is not None
        assert theirs.certificate is not None
        credentials = grpc.ssl_channel_credentials(
            theirs.ca.read_bytes(), theirs.key.read_bytes(), theirs.certificate.read_bytes()
        )
        options = [
            ("grpc.ssl_target_name_override", "loopback.job.elastic"),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
        ]
        async with grpc.aio.secure_channel(self._address, credentials, options) as channel:
            for number in range(count):
                call = channel.unary_unary("/elastic.v1.Control/Stop")
                try:
                    await call(message, timeout=30.0)
                except grpc.aio.AioRpcError as error:
                    # gRPC may hide the refusal that came before the end of a large message.
                    is_denied = error.code() is grpc.StatusCode.PERMISSION_DENIED
                    self.refused += bool(message) or is_denied
                due = began + LASTS_S * (number + 1) / count
                await asyncio.sleep(max(0.0, due - time.monotonic()))


def test_a_minute_of_strangers_costs_a_job_nothing(job: TrainingJob, made: Certificates) -> None:
    (coordinator,) = job.coordinators
    pid, generation, steps = coordinator.process.pid, job.generation(), job.steps.newest()
    log, memory = len(coordinator.events), _resident_mib(pid)
    command = [
        sys.executable,
        "-m",
        "tests.integration.test_strangers_under_load",
        job.address,
        str(made.directory),
    ]
    with CommandProcess(command) as strangers:  # their work is not this process's
        status_s, peak_mib = asyncio.run(_watched(strangers, job, made, pid))
        assert strangers.wait() == 0, strangers.story()
        refused = int(strangers.output[-1])
    told = coordinator.events[log:]
    refusals = [e for e in told if e["event"] == "peer_refused"]
    log_bytes = sum(len(json.dumps(e)) + 1 for e in told)
    usual_s = sorted(status_s)[len(status_s) // 2]
    print(
        f"{refused} refused calls; status: median {usual_s:.3f} s, longest "
        f"{max(status_s):.3f} s; memory of the coordinator + {peak_mib - memory:.0f} MiB; "
        f"{len(refusals)} events of refusals in {log_bytes} bytes of log; "
        f"{job.steps.newest() - steps} steps"
    )
    job.wait_for_more_steps()
    assert (job.generation(), coordinator.process.poll()) == (generation, None)
    assert job.events("node_lost") == job.events("worker_failed") == []
    assert refused >= CALLS
    assert usual_s < 0.2
    assert peak_mib - memory < 50 + CONNECTIONS * HANDSHAKE_MIB
    assert len(refusals) <= 20
    assert log_bytes < 1_000_000
    assert not coordinator.messages, "something other than events was written"


async def _watched(
    strangers: CommandProcess, job: TrainingJob, made: Certificates, pid: int
) -> tuple[list[float], float]:
    """How long each look at the status took, and the coordinator's largest memory meanwhile."""
    client = ControlClient(job.address, security=Tls(job="loopback", files=papers(made, "ours")))
    took, peak = list[float](), 0.0
    while strangers.process.poll() is None:
        began = time.monotonic()
        assert (await client.status(30.0)).phase == "running"
        took.append(time.monotonic() - began)
        peak = max(peak, _resident_mib(pid))
        await asyncio.sleep(0.5)
    await client.close()
    return took, peak


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def _come() -> None:
    strangers = Strangers(sys.argv[1], Certificates(Path(sys.argv[2])))
    await strangers.come()
    print(strangers.refused)


if __name__ == "__main__":
    asyncio.run(_come())
