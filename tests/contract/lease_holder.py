"""A process that holds a lease and prints its states: `python -m tests.contract.lease_holder`."""

from __future__ import annotations

import asyncio
import sys

from elastic.store.etcd.endpoints import etcd_options
from elastic.store.etcd.store import EtcdStore
from elastic.store.lease_keeper import LeaseKeeper, LeaseState


async def hold(endpoints: str, key: str, ttl_s: float) -> None:
    """Register, and register again each time the lease is gone. Prints one state a line."""
    async with EtcdStore(etcd_options(endpoints)) as store:
        keeper = LeaseKeeper(store, ttl_s=ttl_s, on_change=_say)
        while True:
            await store.put(key, b"here", lease=await keeper.grant())
            _say(LeaseState.HELD)
            await keeper.keep()


def _say(state: LeaseState) -> None:
    print(state.name, flush=True)


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], sys.argv[2], float(sys.argv[3])))
