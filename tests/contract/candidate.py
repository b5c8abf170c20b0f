"""A candidate process: campaigns, prints each change of its state, and takes commands on stdin.

`python -m tests.contract.candidate ENDPOINTS JOB ADDRESS TTL_S`; one command a line, "save NUMBER"
or "resign".
"""

from __future__ import annotations

import asyncio
import sys

from elastic.coordinator.leadership import Election, Leadership, save_generation
from elastic.core.membership import ChangeReason, Generation
from elastic.store.etcd.endpoints import etcd_options
from elastic.store.etcd.store import EtcdStore
from elastic.store.interface import GuardFailed
from elastic.store.lease_keeper import LeaseState


class Candidate:
    def __init__(self, store: EtcdStore, job: str, address: str, ttl_s: float) -> None:
        self.store = store
        self.election = Election(
            store, job=job, address=address, on_change=self._changed, ttl_s=ttl_s
        )
        self.leadership: Leadership | None = None

    async def run(self) -> None:
        campaigning = asyncio.create_task(self._campaign())
        commands = await _stdin()
        _print("READY")
        while line := (await commands.readline()).decode().strip():
            command, _, argument = line.partition(" ")
            if command == "save":
                await self._save(int(argument))
            elif command == "resign":
                campaigning.cancel()
                await self.election.resign()
                _print("RESIGNED")

    async def _campaign(self) -> None:
        while True:
            self.leadership = await self.election.campaign()
            _print(f"LEADS {self.leadership.incarnation} {self.leadership.last_number}")
            await self.election.hold()

    async def _save(self, number: int) -> None:
        """Save under the last leadership, even if it was lost since."""
        assert self.leadership is not None
        generation = Generation(
            number=number,
            incarnation=self.leadership.incarnation,
            members=(),
            reason=ChangeReason.STARTED,
        )
        try:
            await save_generation(self.store, self.leadership, generation)
        except GuardFailed:
            _print(f"REFUSED {number}")
        else:
            _print(f"SAVED {number}")

    def _changed(self, state: LeaseState) -> None:
        _print(state.name)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _print(line: str) -> None:
    print(line, flush=True)


async def main(endpoints: str, job: str, address: str, ttl_s: float) -> None:
    async with EtcdStore(etcd_options(endpoints)) as store:
        await Candidate(store, job, address, ttl_s).run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
