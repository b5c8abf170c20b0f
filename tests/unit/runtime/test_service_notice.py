"""A daemon sends notices to its service manager, and never waits for it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.cli.launch import worker_environment
from elastic.runtime.service_notice import NOTICE_VARIABLES, Condition, ServiceNotice
from tests.service_manager import DEADLINE_S, FakeServiceManager, service_manager


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeServiceManager]:
    with service_manager(tmp_path / "notify", watchdog_s=0.1) as manager:
        yield manager


class Daemon:
    def __init__(self, notice: ServiceNotice, *, ready: bool = True) -> None:
        self.notice = notice
        self.ready, self.status = ready, "waits"

    def condition(self) -> Condition:
        return Condition(ready=self.ready, status=self.status)


async def until(condition: Callable[[], object]) -> None:
    ends_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.005)


async def test_ready_and_status_are_sent_once_and_beats_go_on(manager: FakeServiceManager) -> None:
    daemon = Daemon(ServiceNotice(manager.environment), ready=False)
    with daemon.notice.telling(daemon.condition):
        await until(lambda: manager.count("WATCHDOG=1") >= 3)
        assert manager.count("READY=1") == 0
        assert len(manager.all_of("EXTEND_TIMEOUT_USEC")) >= 3
        daemon.ready, daemon.status = True, "generation 1,\nstep 2"
        await until(lambda: manager.count("READY=1"))
        seen = len(manager.messages)
        await until(lambda: len(manager.messages) >= seen + 3)
    assert manager.count("READY=1") == 1
    assert manager.all_of("STATUS") == ["waits", "generation 1, step 2"]
    assert manager.messages[-1] == ["WATCHDOG=1"]


async def test_a_loop_that_hangs_sends_no_beat(manager: FakeServiceManager) -> None:
    daemon = Daemon(ServiceNotice(manager.environment))
    with daemon.notice.telling(daemon.condition):
        await until(lambda: manager.count("WATCHDOG=1") >= 2)
        time.sleep(0.05)  # until what was sent has arrived
        before = manager.count("WATCHDOG=1")
        time.sleep(0.5)
        assert manager.count("WATCHDOG=1") == before
        await until(lambda: manager.count("WATCHDOG=1") > before)


async def test_a_daemon_that_stops_at_once_sends_ready_first(
    manager: FakeServiceManager,
) -> None:
    """A unit of Type=notify that ends without READY=1 has failed, and is started again."""

    daemon = Daemon(ServiceNotice(manager.environment), ready=False)
    with daemon.notice.telling(daemon.condition):
        daemon.ready, daemon.status = True, "the run has ended"
        daemon.notice.stopping(7.0)
    await until(lambda: len(manager.messages) == 2)
    assert manager.messages == [
        ["READY=1", "STATUS=the run has ended"],  # of its own: STOPPING=1 would override it
        ["EXTEND_TIMEOUT_USEC=7000000", "STOPPING=1"],
    ]


async def test_notices_that_were_not_received_are_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "late"
    daemon = Daemon(ServiceNotice({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "20000"}))
    with daemon.notice.telling(daemon.condition):
        await asyncio.sleep(0.1)
        with service_manager(path) as late:
            await until(lambda: late.count("READY=1"))
            assert "STATUS=waits" in late.messages[0]


async def test_a_manager_that_does_not_read_delays_nothing(tmp_path: Path) -> None:
    path = tmp_path / "full"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread:
        unread.bind(str(path))

        daemon = Daemon(ServiceNotice({"NOTIFY_SOCKET": str(path)}))
        with daemon.notice.telling(daemon.condition):
            for _ in range(10_000):  # more than the socket holds
                daemon.notice.stopping(1.0)


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative", "/no/such/socket", "@no-such"])
async def test_without_a_manager_nothing_happens(address: str) -> None:
    daemon = Daemon(ServiceNotice({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1"}))
    with daemon.notice.telling(daemon.condition):
        await asyncio.sleep(0.03)
        daemon.notice.stopping(1.0)


def test_an_abstract_address_is_reached() -> None:
    name = f"elastic-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        listening.settimeout(DEADLINE_S)
        ServiceNotice({"NOTIFY_SOCKET": f"@{name}"}).stopping(1.0)
        assert listening.recv(100) == b"EXTEND_TIMEOUT_USEC=1000000\nSTOPPING=1"


@pytest.mark.parametrize(
    ("variables", "beats"),
    [
        ({"WATCHDOG_USEC": "40000"}, True),
        ({"WATCHDOG_USEC": "40000", "WATCHDOG_PID": "77"}, True),
        ({"WATCHDOG_USEC": "40000", "WATCHDOG_PID": "78"}, False),
        ({"WATCHDOG_USEC": "0"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
async def test_beats_need_a_valid_interval_and_the_process_that_is_meant(
    tmp_path: Path, variables: dict[str, str], beats: bool
) -> None:
    with service_manager(tmp_path / "notify") as manager:
        daemon = Daemon(ServiceNotice({**manager.environment, **variables}, pid=77))
        with daemon.notice.telling(daemon.condition):
            await until(lambda: manager.messages)
        assert ("WATCHDOG=1" in manager.messages[0]) == beats


def test_children_inherit_no_notice_variables() -> None:
    given = {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "1", "HOME": "/"}
    environment = dict(given)
    ServiceNotice.of_environment(environment)
    assert environment == {"HOME": "/"}


def test_workers_do_not_inherit_notice_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NOTICE_VARIABLES:
        monkeypatch.setenv(name, "1")
    assert not set(NOTICE_VARIABLES) & set(worker_environment(1, "127.0.0.1", classic=False))
