"""A process that was stopped for longer than its lease learns that the lease is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process

import pytest

from elastic.store.etcd.store import EtcdStore
from tests.etcd_cluster import EtcdCluster

TTL_S = 1.0


@pytest.mark.timeout(30.0)
async def test_a_holder_stopped_beyond_its_lease_learns_of_it(shared_cluster: EtcdCluster) -> None:
    arguments = [shared_cluster.endpoints(), "holder/node", str(TTL_S)]
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.contract.lease_holder", *arguments, stdout=PIPE
    )
    try:
        async with EtcdStore(shared_cluster.options()) as store:
            await _stop_and_go_on(store, holder)
    finally:
        holder.kill()
        await holder.wait()


async def _stop_and_go_on(store: EtcdStore, holder: Process) -> None:
    assert await _line(holder) == "HELD"
    registered = await store.get("holder/node")
    assert registered is not None
    changes = store.watch("holder/", after=registered.modified)
    holder.send_signal(signal.SIGSTOP)
    gone = await anext(changes)
    assert gone.entry is None
    holder.send_signal(signal.SIGCONT)
    going_on_at = time.monotonic()
    said = [await _line(holder)]
    suspected_after_s = time.monotonic() - going_on_at
    while said[-1] != "HELD":
        said.append(await _line(holder))
    assert said in (["SUSPECT", "GONE", "HELD"], ["GONE", "HELD"])
    assert suspected_after_s < TTL_S
    again = await anext(changes)
    assert again.entry is not None
    assert again.entry.lease != registered.lease
    print(f"told {suspected_after_s * 1000:.0f} ms after SIGCONT: {said}")


async def _line(holder: Process) -> str:
    assert holder.stdout is not None
    return (await holder.stdout.readline()).decode().strip()
