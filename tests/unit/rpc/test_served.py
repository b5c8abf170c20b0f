"""A server notices when connections to it are no longer accepted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.rpc import control, handshake_probe
from elastic.rpc.control import ControlServer
from elastic.rpc.handshake_probe import is_served
from elastic.rpc.security import PLAINTEXT, Plaintext, Security
from tests.certificates import make_certificates, sign_for_job
from tests.unit.rpc.conversation import Recorder, Reports
from tests.unit.rpc.test_tls import tls


@pytest.fixture
def nobody_accepts() -> Iterator[str]:
    """The address of a socket whose connections only the kernel accepts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(params=["plain text", "TLS"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> Security:
    if request.param == "plain text":
        return PLAINTEXT
    made = make_certificates(tmp_path / "made")
    sign_for_job(made, "digits")
    return tls(made)


@pytest.mark.parametrize("where", ["unix", "127.0.0.1:0", "0.0.0.0:0"])
async def test_a_working_server_is_found_served_and_its_checks_leave_no_reports(
    where: str, security: Security, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LOOK_EVERY_S", 0.01)
    looks = 0

    async def look(address: str, security: Security) -> bool:
        nonlocal looks
        found = await is_served(address, security)
        assert found
        looks += 1
        return found

    monkeypatch.setattr(control, "is_served", look)
    reports = Reports()
    address = f"unix:{tmp_path}/c.sock" if where == "unix" else where
    open_to_all = Plaintext(insecure=True) if security is PLAINTEXT else security
    server = ControlServer(Recorder(), address, security=open_to_all, report=reports)
    await server.start()
    said = len(reports.all)
    watching = asyncio.ensure_future(server.until_unreachable())
    try:
        while looks < 3:
            assert not watching.done()
            await asyncio.sleep(0.01)
        assert len(reports.all) == said
    finally:
        watching.cancel()
        await server.stop(0)


async def test_a_server_whose_connections_nobody_accepts_is_unreachable(
    nobody_accepts: str, security: Security, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(handshake_probe, "_SERVED_WITHIN_S", 0.2)
    assert not await is_served(nobody_accepts, security)
    await ControlServer(Recorder(), nobody_accepts, security=security).until_unreachable()


async def test_a_check_without_a_free_descriptor_assumes_a_working_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(23, "Too many open files in system")

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    assert await is_served("127.0.0.1:1", PLAINTEXT)
