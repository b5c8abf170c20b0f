"""What each slot did in the last minutes: the workers' own stretches of time, and its periods."""

from __future__ import annotations

import time

from elastic.coordinator.stacks import StackRounds
from elastic.core.coordinator.slot_accounts import SlotAccounts
from elastic.v1 import timeline_pb2 as pb

TRAINING = "training"
_MOST_STEPS = 1000  # of one worker
_MOST_TOLD = 100_000  # stretches of all workers: some 7 MB


async def timeline(
    rounds: StackRounds, accounts: SlotAccounts, workers: int, steps: int
) -> pb.JobTimeline:
    """So many of the newest steps of each of the workers, fewer where there are many of these."""
    most = max(1, min(steps or _MOST_STEPS, _MOST_STEPS, _MOST_TOLD // max(1, workers)))
    found = await rounds.ask(stretches=most)
    now = time.monotonic()
    ahead_s, told = time.time() - now, pb.JobTimeline()
    for node, answers in sorted(found.items()):
        for answer in answers.workers:
            told.ranks.add(node=node, worker=answer.worker, stretches=answer.stretches[-most:])
    for period in accounts.periods(now):
        told.periods.add(
            node=period.node,
            slot=period.slot,
            worker=period.worker,
            kind=period.kind.value if period.kind is not None else TRAINING,
            began_unix_s=period.began + ahead_s,
            ended_unix_s=period.ended + ahead_s,
        )
    told.silent = max(0, workers - len(told.ranks))
    return told
