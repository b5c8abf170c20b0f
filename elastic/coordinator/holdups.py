"""Finds out which ranks hold up the others, and where.

In hangs and slow steps, the stacks of all workers show it. Agents are asked for them, as they are
for operators and timelines. Constant slowness shows in how long parts of a step take on each rank.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.coordinator.connected_agents import ConnectedAgents, ConnectedNode, name_of
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.diagnosis import Diagnosis, diagnose, doing
from elastic.core.membership import Generation, Member, WorkerId
from elastic.core.stragglers import Part, Straggler, Stragglers, Sums, Verdict
from elastic.core.whereabouts import MOST_STACKS, RankStacks
from elastic.errors import ConfigurationError, TransientError
from elastic.rpc.codec import Codec
from elastic.rpc.stacks import frames_from_pb, stack_lines, whereabouts_from_pb
from elastic.runtime.journal import Journal
from elastic.timeouts import timeout
from elastic.v1 import control_pb2, job_pb2
from elastic.v1 import stacks_pb2 as pb

_ANSWERS_S = 1.0  # for all agents; one takes 0.7 s if a worker does not answer
_BEFORE_GROUP_S = 0.2  # for which a new group waits for them
_MOST_BYTES = 16 * 2**20  # of a reply to an operator; a larger one has only main threads
_MOST_SHOWN = 20  # names in a message

Found = Mapping[str, pb.NodeStacks]
"""The answers of nodes, by node name."""


@dataclass(slots=True)
class _Round:
    waits_for: set[str]
    told: dict[str, pb.NodeStacks]
    done: asyncio.Event


class StackRounds:
    """Asks agents about workers. A round ends when all nodes have answered, or after a second."""

    def __init__(self, nodes: ConnectedAgents) -> None:
        self._nodes = nodes
        self._numbers = itertools.count(1)
        self._rounds: dict[int, _Round] = {}

    def ask(
        self, *, worker: str = "", brief: bool = False, stretches: int = 0
    ) -> asyncio.Task[Found]:
        """Ask all nodes at once, before they get any later message. worker: only about this one.
        brief: only main threads. stretches: instead of stacks, so many of the newest stretches."""
        number, names = next(self._numbers), {node.stream.node for node in self._nodes}
        this = self._rounds[number] = _Round(names, {}, asyncio.Event())
        request = pb.StacksRequest(request=number, worker=worker, brief=brief, stretches=stretches)
        self._nodes.broadcast(stacks=request)
        return asyncio.ensure_future(self._gather(number, this))

    async def log(self, node: ConnectedNode, worker: str) -> str:
        """Return a worker's last log lines. Raises TransientError if its agent does not answer."""
        number, name = next(self._numbers), node.stream.node
        this = self._rounds[number] = _Round({name}, {}, asyncio.Event())
        node.stream.send(stacks=pb.StacksRequest(request=number, worker=worker, log=True))
        found = await self._gather(number, this)
        if name not in found or not found[name].workers:
            raise TransientError(f"the agent of node {name} did not send the log of {worker}")
        return found[name].workers[0].log

    def told(self, node: ConnectedNode, stacks: pb.NodeStacks) -> None:
        """Take a node's answer; one that comes too late is ignored."""
        this = self._rounds.get(stacks.request)
        if this is None or node.stream.node not in this.waits_for:
            return
        this.told[node.stream.node] = stacks
        this.waits_for.discard(node.stream.node)
        if not this.waits_for:
            this.done.set()

    async def _gather(self, number: int, this: _Round) -> Found:
        try:
            if this.waits_for:
                async with timeout(_ANSWERS_S):
                    await this.done.wait()
        except asyncio.TimeoutError:
            pass
        finally:
            del self._rounds[number]
        return this.told


def explain(generation: Generation, found: Found) -> Diagnosis:
    """Say which of the generation's members keep the others waiting."""
    return diagnose(
        [
            whereabouts_from_pb(_of_member(member, found), rank=rank, node=name_of(member.node))
            for rank, member in enumerate(generation.members)
        ]
    )


def odd_stacks(generation: Generation, verdict: Diagnosis, found: Found) -> list[RankStacks]:
    """Return the main threads of ranks that keep the others waiting, then of one that waits,
    without the frames outside the script."""
    waiting = [rank for rank in verdict.waiting if rank < generation.world_size][:1]
    ranks = [*(odd.rank for odd in verdict.odd[:MOST_STACKS]), *waiting]
    told = []
    for rank in ranks[:MOST_STACKS]:
        member = generation.members[rank]
        stacks, node = _of_member(member, found), name_of(member.node)
        told.append(
            RankStacks(
                rank=rank,
                node=node,
                worker=member.worker,
                doing=doing(whereabouts_from_pb(stacks, rank=rank, node=node)),
                text="\n".join(stack_lines(_within_script(stacks))),
            )
        )
    return told


def _within_script(stacks: pb.WorkerStacks) -> pb.WorkerStacks:
    """Return a copy with only the main threads, out to the script's outermost frame."""
    inner = pb.WorkerStacks()
    inner.CopyFrom(stacks)
    for process in inner.processes:
        del process.threads[1:]
        for thread in process.threads:
            own = [n for n, frame in enumerate(frames_from_pb(thread)) if frame.is_scripts]
            del thread.frames[max(own, default=len(thread.frames)) + 1 :]
            thread.left_out = 0
    return inner


def asked_for(of: str, generation: Generation | None, workers: Sequence[str]) -> str:
    """Return the worker that `of` means; empty: all. Raises ConfigurationError if it is unknown."""
    members = generation.members if generation is not None else ()
    if of.isdecimal() and int(of) < len(members):
        return members[int(of)].worker
    if of and of not in workers:
        ranks = f"ranks 0 to {len(members) - 1}" if members else "no ranks"
        names = sorted(workers)[:_MOST_SHOWN]
        known = f"and the workers {', '.join(names)}" if names else "and no workers"
        raise ConfigurationError(
            f"there is no rank or worker {of[:80]!r}; there are {ranks}, {known}"
        )
    return of


def reply(generation: Generation | None, found: Found, worker: str) -> pb.JobStacks:
    """Return the reply to operators: members by rank, then others; a verdict if all were asked."""
    members = generation.members if generation is not None else ()
    answer = pb.JobStacks()
    for rank, member in enumerate(members):
        if worker in ("", member.worker):
            stacks = _of_member(member, found)
            node = name_of(member.node)
            answer.ranks.add(rank=rank, node=node, stacks=stacks, is_member=True)
    names = {member.worker for member in members}
    for node, told in sorted(found.items()):
        for stacks in told.workers:
            if stacks.worker not in names:
                answer.ranks.add(node=node, stacks=stacks)
    if generation is not None and not worker:
        answer.verdict = explain(generation, found).text
    if answer.ByteSize() > _MOST_BYTES:
        for one in answer.ranks:
            for process in one.stacks.processes:
                del process.threads[1:]
    return answer


def _of_member(member: Member, found: Found) -> pb.WorkerStacks:
    told = found.get(name_of(member.node))
    for stacks in told.workers if told is not None else ():
        if stacks.worker == member.worker:
            return stacks
    return pb.WorkerStacks(worker=member.worker, answer=pb.ANSWER_ABSENT)


_MOST_TOLD = 16  # ranks in one event


class Hangs:
    """Collects stacks when a group stands still, or when an operator asks.

    post: takes events for the machine. start: runs a coroutine in the background. on_explained:
    called with the generation, verdict and stacks of each hang.
    """

    def __init__(
        self,
        rounds: StackRounds,
        journal: Journal,
        *,
        post: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, Any], str], object],
        on_explained: Callable[[int, Diagnosis, Sequence[RankStacks]], None] = lambda *_: None,
    ) -> None:
        self._rounds = rounds
        self._journal = journal
        self._post = post
        self._start = start
        self._on_explained = on_explained
        self._newest = (-1, "", 0.0)
        """Step, verdict and Unix time of the newest hang or slow step."""
        self._asking: asyncio.Task[Found] | None = None

    def verdict(self, committed: int) -> tuple[str, float]:
        """Return what holds up the step under way, and when that was found (Unix time); an empty
        text once that step is committed."""
        step, text, unix_s = self._newest
        return (text, unix_s) if committed <= step else ("", 0.0)

    async def answered(self) -> None:
        """Wait until all members have said where they hang, 0.2 s at most: one that learns of a new
        group cuts its connections, and so frees others from the place where they hang."""
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=_BEFORE_GROUP_S)

    def explain(self, effect: fx.ExplainHang) -> None:
        """Explain a hang. Members are asked at once, before they learn of a new group."""
        asking = self._asking = self._rounds.ask(brief=True)

        async def told() -> None:
            found = await asking
            verdict = self._verdict(effect, found)
            self._on_explained(
                effect.generation.number, verdict, odd_stacks(effect.generation, verdict, found)
            )
            self._journal.record(
                "hang",
                step=effect.step,
                generation=effect.generation.number,
                standing_s=round(effect.standing_s, 3),
                verdict=verdict.text,
                ranks=_ranks(verdict),
            )
            self._post(ev.HangExplained(generation=effect.generation.number, verdict=verdict))

        self._start(told(), "explain-hang")

    def explain_slow_step(self, effect: fx.ExplainSlowStep, committed: Callable[[], int]) -> None:
        """Explain a slow step, unless it has ended when the answers come."""
        asking = self._rounds.ask(brief=True)

        async def told() -> None:
            found = await asking
            if committed() > effect.step:
                return
            verdict = self._verdict(effect, found)
            self._journal.record(
                "slow_step",
                step=effect.step,
                lasts_s=round(effect.lasts_s, 3),
                usual_s=round(effect.usual_s, 6),
                verdict=verdict.text,
                ranks=_ranks(verdict),
            )

        self._start(told(), "explain-slow-step")

    async def stacks(
        self, of: str, generation: Generation | None, workers: Sequence[str]
    ) -> pb.JobStacks:
        """Return an operator's reply: the main threads of all ranks, or all threads of one. Raises
        ConfigurationError if there is no such rank or worker."""
        worker = asked_for(of, generation, workers)
        found = await self._rounds.ask(worker=worker, brief=not worker)
        return reply(generation, found, worker)

    def _verdict(self, effect: fx.ExplainHang | fx.ExplainSlowStep, found: Found) -> Diagnosis:
        verdict = explain(effect.generation, found)
        self._newest = effect.step, verdict.text, time.time()
        return verdict


def _ranks(verdict: Diagnosis) -> list[dict[str, Any]]:
    """The ranks that the others wait for, and where they are."""
    return [
        {
            "rank": odd.rank,
            "worker": odd.worker,
            "node": odd.node,
            "doing": odd.doing,
            "place": odd.frame.place if odd.frame is not None else "",
            "place_s": round(odd.place_s, 3),
        }
        for odd in verdict.odd[:_MOST_TOLD]
    ]


_MOST_REPLACED, _WITHIN_S = 2, 3600.0
"""The most replacements in one slot within a time: if the next worker is slow, too, the cause is
the machine, and no replacement helps."""

_MOST_SLOTS = 1000  # whose replacements are remembered

_IN_WORDS = {
    Part.DATA: "loading data",
    Part.TRANSFER: "copying samples to the device",
    Part.COMPUTE: "the forward and backward pass",
    Part.OPTIMIZER: "the part after the backward pass: the optimizer",
    Part.BETWEEN: "the script between two steps",
    Part.CORES: "waiting for a core that other processes use",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that is slow now."""

    found: Straggler
    node: str
    """The node's name, not its id."""
    slot: int

    @property
    def text(self) -> str:
        found = self.found
        return (
            f"rank {found.rank} (node {self.node}) holds up every step by "
            f"{found.late_s * 1000:.3g} of {found.step_s * 1000:.3g} ms, since step {found.since}, "
            f"by {_IN_WORDS[found.part]}"
        )


class SlowRanks:
    """Compares what ranks report, names slow ones, and has them replaced if `replaces`.

    may_replace: whether the job can do without a worker for now.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        replaces: bool,
        post: Callable[[ev.Event], None],
        current: Callable[[], Generation | None],
        may_replace: Callable[[str], bool] = lambda _worker: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._replaces, self._may_replace = replaces, may_replace
        self._post = post
        self._current = current
        self._clock = clock
        self._stragglers = Stragglers()
        self._failed = False
        self._generation: Generation | None = None
        self._members: dict[WorkerId, Member] = {}
        self._replaced: dict[tuple[str, int], deque[float]] = {}

    def heard(self, worker: WorkerId, pace: job_pb2.Pace) -> None:
        sums = _sums(pace)
        if sums is None or self._failed:
            return
        try:
            self._follow_group()
            verdict = self._stragglers.heard(worker, pace.generation, sums)
        except Exception as error:  # noqa: BLE001 - the job can do without
            self._failed = True
            message = f"ranks are no longer compared: {type(error).__name__}: {error}"
            self._journal.record("warning", source="stragglers", message=message)
            return
        self._tell(verdict)

    @property
    def now(self) -> Sequence[SlowRank]:
        """The slow ranks, by rank."""
        self._follow_group()
        return [self._slow(found) for found in self._stragglers.named]

    @property
    def worst(self) -> float:
        """The share of a step by which the slowest rank has held up the others most recently."""
        return self._stragglers.worst

    def to_pb(self) -> list[control_pb2.SlowRank]:
        return [
            control_pb2.SlowRank(
                rank=slow.found.rank,
                worker=slow.found.worker,
                node=slow.node,
                slow_in=slow.found.part.value,
                late_s=round(slow.found.late_s, 6),
                step_s=round(slow.found.step_s, 6),
                since_step=slow.found.since,
                verdict=slow.text,
            )
            for slow in self.now
        ]

    # ---- inside

    def _follow_group(self) -> None:
        current = self._current()
        if current is None or current is self._generation:
            return
        known, self._generation = self._generation, current
        if known is not None and known.number == current.number:
            return  # the same generation in another form
        before, self._members = self._members, {m.worker: m for m in current.members}
        verdict = self._stragglers.regroup(current.number, [m.worker for m in current.members])
        for found in verdict.over:
            self._over(found, before.get(found.worker), "it is no longer a member of the group")

    def _tell(self, verdict: Verdict) -> None:
        for found in verdict.slow:
            self._named(self._slow(found))
        for found in verdict.over:
            self._over(found, self._members.get(found.worker), "it keeps up with the others again")

    def _named(self, slow: SlowRank) -> None:
        found = slow.found
        replaced = self._replaces and self._is_to_be_replaced(slow)
        self._journal.record(
            "straggler",
            rank=found.rank,
            worker=found.worker,
            node=slow.node,
            slow_in=found.part.value,
            since_step=found.since,
            step=found.at,
            late_s=round(found.late_s, 6),
            step_s=round(found.step_s, 6),
            action="replace" if replaced else "report",
            verdict=slow.text,
        )
        if replaced:
            self._post(ev.StragglerFound(worker=found.worker, message=f"was slow: {slow.text}"))

    def _is_to_be_replaced(self, slow: SlowRank) -> bool:
        now, key = self._clock(), (slow.node, slow.slot)
        before = self._replaced.setdefault(key, deque(maxlen=_MOST_REPLACED))
        often = len(before) == _MOST_REPLACED and now - before[0] < _WITHIN_S
        if often or not self._may_replace(slow.found.worker):
            return False
        if len(self._replaced) > _MOST_SLOTS:
            del self._replaced[next(iter(self._replaced))]
        before.append(now)
        return True

    def _over(self, found: Straggler, member: Member | None, reason: str) -> None:
        self._journal.record(
            "straggler_over",
            rank=found.rank,
            worker=found.worker,
            node=name_of(member.node) if member is not None else "",
            reason=reason,
        )

    def _slow(self, found: Straggler) -> SlowRank:
        member = self._members[found.worker]
        return SlowRank(found=found, node=name_of(member.node), slot=member.slot)


_SUMS = Codec(Sums, job_pb2.Pace)


def _sums(pace: job_pb2.Pace) -> Sums | None:
    """Return None if a value is not finite, or if the sums belong to no group or no step."""
    values = [value for _, value in pace.ListFields()]
    if not pace.generation or not pace.committed or not all(map(math.isfinite, values)):
        return None
    return _SUMS.from_pb(pace)
