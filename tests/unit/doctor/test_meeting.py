"""Doctors of several nodes, here on loopback, find each other, compare, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic.doctor.findings import Peer
from elastic.doctor.meeting import (
    Meeting,
    NodeReport,
    Protection,
    Stage,
    UnexpectedPeer,
    decode,
    encode,
)
from elastic.errors import ConfigurationError
from elastic.settings.limits import PortRange
from tests.certificates import make_certificates, sign_for_job
from tests.etcd_cluster import free_ports
from tests.listening import listens

PATIENCE_S = 10.0


def report(**fields: Any) -> NodeReport:
    good = {"identity": "i", "node": "n", "job": "j", "elastic": "0.1.0", "torch": "2.13"}
    return NodeReport(**(good | {"worker_port": 1, "store_port": 2, "stage": 0} | fields))


def test_a_report_survives_encoding_and_decoding() -> None:
    sent = report(marker="m", met=("a", "b"), unix_s=1.5)
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1}',
        b"[" * 10_000,
        encode(report(marker="../x")),
        encode(report(worker_port=70_000)),
        encode(report(worker_port=True)),
        encode(report(node="n" * 301)),
        encode(report(met=(1,))),
        json.dumps({"format": 1, **json.loads(encode(report())), "met": 7}).encode(),
        json.dumps({"format": 1, **json.loads(encode(report())), "node": "\ud800"}).encode(),
    ],
)
def test_a_line_that_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(UnexpectedPeer):
        decode(line)


def test_additional_fields_of_a_later_version_are_ignored() -> None:
    fields = json.loads(encode(report())) | {"more": [1]}
    assert decode(json.dumps(fields).encode()) == report()


@contextlib.asynccontextmanager
async def doctors(
    *names: str,
    ports: Sequence[int],
    peers: Sequence[str] | None = None,
    protections: Sequence[Protection | None] = (),
    jobs: Sequence[str] = (),
    timeout_s: float = PATIENCE_S,
) -> AsyncIterator[list[Meeting]]:
    everyone = [f"127.0.0.1:{port}" for port in ports]
    met = []
    for n, name in enumerate(names):
        met.append(
            Meeting(
                everyone if peers is None else peers,
                own_address=f"127.0.0.1:{ports[n]}",
                node=name,
                job=jobs[n] if jobs else "j",
                elastic="0.1.0",
                torch="2.13.0",
                timeout_s=timeout_s,
                ports=None,
                protection=protections[n] if protections else None,
            )
        )
    try:
        for one in met:
            await one.start()
        yield met
    finally:
        for one in met:
            await one.close()


async def to_the_end(one: Meeting, marker: str, seen: set[str]) -> None:
    await one.meet()
    await one.barrier(Stage.MET, marker=marker)
    one.check_markers(seen.__contains__)
    await one.barrier(Stage.LOOKED)
    await one.barrier(Stage.DONE)


async def test_three_nodes_find_each_other_and_agree_on_a_group() -> None:
    async with doctors("a", "b", "c", ports=free_ports(3)) as met:
        ways = [to_the_end(one, f"m{n}", {"m0", "m1"}) for n, one in enumerate(met)]
        await asyncio.gather(*ways)
        found, groups = [one.peers for one in met], [one.group() for one in met]
    for n, peers in enumerate(found):
        assert [peer.is_self for peer in peers] == [m == n for m in range(3)]
        others = [peer for m, peer in enumerate(peers) if m != n]
        assert not any(peer.error or peer.worker_port_error for peer in others)
        assert all(abs(peer.clock_ahead_s) <= peer.clock_error_s + 0.05 for peer in others)
        seen = {peer.node: peer.sees_checkpoint for peer in others}
        assert seen == {name: name != "c" for name in seen}
    assert sorted(rank for rank, *_ in groups) == [0, 1, 2]
    assert len({(tuple(members), port) for _, members, _, port in groups}) == 1


async def alone(timeout_s: float = 0.5, **options: Any) -> Peer:
    """What a single doctor finds at the last of its peers."""
    async with doctors("a", ports=free_ports(1), timeout_s=timeout_s, **options) as (one,):
        await one.meet()
        assert isinstance(one.group(), str)
        return one.peers[-1]


async def test_a_port_at_which_nothing_listens_is_reported_as_refused() -> None:
    (port,) = free_ports(1)
    found = await alone(peers=[f"127.0.0.1:{port}"])
    assert (found.refused, found.error) == (True, f"nothing listens at 127.0.0.1:{port}")


async def test_an_unknown_host_name_is_an_error_but_not_a_refusal() -> None:
    found = await alone(peers=[f"{'n' * 64}.example"])
    assert found.error
    assert not found.refused


async def test_another_service_at_a_peers_address_is_reported() -> None:
    async def http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(http, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    peers = [f"127.0.0.1:{port}"]
    async with server, doctors("a", ports=free_ports(1), peers=peers, timeout_s=0.3) as (one,):
        await one.meet()
        assert "something other than `elastic doctor` answers" in one.peers[0].error


async def test_a_doctor_of_another_job_is_not_a_peer() -> None:
    ports = free_ports(2)
    async with doctors("a", "b", ports=ports, jobs=["j", "k"], timeout_s=0.3) as met:
        await asyncio.gather(*(one.meet() for one in met))
        (_, other) = met[0].peers
    assert "job 'k'" in other.error


async def test_doctors_meet_only_with_certificates_of_the_same_job(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "a")
    ours = Protection.of(sign_for_job(made, "j"), "j")
    theirs = Protection.of(sign_for_job(made, "k"), "k")
    stranger = Protection.of(sign_for_job(make_certificates(tmp_path / "b"), "j"), "j")

    async def scenario(one: Protection | None, other: Protection | None) -> list[str]:
        protections = [one, other]
        ports = free_ports(2)
        async with doctors("a", "b", ports=ports, protections=protections, timeout_s=0.3) as met:
            await asyncio.gather(*(each.meet() for each in met))
            return [peer.error for each in met for peer in each.peers if not peer.is_self]

    assert await scenario(ours, ours) == ["", ""]
    for wrong in (theirs, stranger, None):
        assert all(await scenario(ours, wrong))


async def test_an_address_in_use_is_named() -> None:
    ports = free_ports(1)
    with pytest.raises(ConfigurationError, match="--doctor-address"):
        async with doctors("a", ports=ports), doctors("b", ports=ports):
            pass


async def test_a_range_without_two_free_ports_is_named() -> None:
    port, own = free_ports(2)
    one = Meeting(
        [],
        own_address=f"127.0.0.1:{own}",
        node="a",
        job="j",
        elastic="0",
        torch="0",
        timeout_s=1.0,
        ports=PortRange(port, port),
        protection=None,
    )
    try:
        with pytest.raises(ConfigurationError, match="--worker-port-range"):
            await one.start()
    finally:
        await one.close()


async def test_a_doctor_that_has_left_is_not_waited_for() -> None:
    async with doctors("a", "b", ports=free_ports(2)) as (a, b):
        await asyncio.gather(a.meet(), b.meet())
        await b.close()
        began = asyncio.get_running_loop().time()
        await a.barrier(Stage.MET)
        assert asyncio.get_running_loop().time() - began < PATIENCE_S


async def test_a_doctor_listens_only_at_its_own_address() -> None:
    before = set(listens(os.getpid()))
    async with doctors("a", ports=free_ports(1)) as (one,):
        opened = set(listens(os.getpid())) - before
        assert f"127.0.0.1:{one._report.worker_port}" in opened
    assert {where.rpartition(":")[0] for where in opened} == {"127.0.0.1"}
