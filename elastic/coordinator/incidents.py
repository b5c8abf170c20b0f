"""Records incidents and recoveries, and words the sentences that people read about them.

Records of incidents are stored for later leaders, reported as events and shown to operators. Each
recovery is measured phase by phase (P8). One of the sentences says why the job ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.coordinator.connected_agents import name_of
from elastic.coordinator.leadership import Loss, Stored
from elastic.core.accounting import MOST_INCIDENTS, read_name, read_number
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.coordinator.connections import Unreached
from elastic.core.coordinator.effects import EndJob, Lost, PeersUnreachable, RefuseNewcomers
from elastic.core.coordinator.incidents import (
    Cause,
    Incidents,
    Outcome,
    RankStacks,
    Sign,
    lost_time,
    open_record,
)
from elastic.core.coordinator.machine import Coordinator
from elastic.core.coordinator.slot_accounts import SlotAccounts
from elastic.core.diagnosis import Diagnosis
from elastic.core.membership import Generation, NodeId, WorkerId
from elastic.core.restarts import Verdict
from elastic.errors import ConfigurationError
from elastic.runtime.journal import Journal
from elastic.runtime.loop_watch import LoopPauses
from elastic.store.interface import Guard, GuardFailed, Store
from elastic.store.job_incidents import IncidentKeeper, load_incidents, read_incident
from elastic.store.retries import retry
from elastic.v1 import job_pb2 as pb

_BRIEF = (
    *("number", "unix_s", "cause", "summary", "noticed_by", "outcome", "lasted_s", "committed"),
    *("generation", "followed_by", "nodes", "workers", "samples_given_up", "lost_s", "recovery"),
)
_MOST_BYTES = 64 * 2**10  # of a record in the store: far below etcd's limit
_MOST_NAMED = 10
_POLL_S = 0.02


class IncidentRecords:
    """The run's incidents. An error in here is reported once and never holds up the job: from then
    on nothing more is recorded.

    accounts: they number the incidents and know each one's cost. start: runs a coroutine. pauses:
    of this process.
    """

    def __init__(
        self,
        accounts: SlotAccounts,
        store: Store,
        journal: Journal,
        *,
        job: str,
        run_id: str,
        guard: Guard,
        start: Callable[[Coroutine[Any, Any, None], str], object],
        clock: Callable[[], float] = time.monotonic,
        pauses: LoopPauses | None = None,
    ) -> None:
        self._pauses = pauses if pauses is not None else LoopPauses()
        self._stop_noted_at = 0.0
        self._accounts, self._store, self._journal = accounts, store, journal
        self._job, self._run_id, self._guard = job, run_id, guard
        self._start, self._clock = start, clock
        self._incidents = Incidents(accounts.open_incident, name_of=name_of)
        self._keeper = IncidentKeeper(store, job=job, run_id=run_id, guard=guard)
        self._earlier: dict[int, Mapping[str, Any]] = {}
        """The records of earlier leaders, by number."""
        self._keeping = self._failed = False

    async def load(self, last: Stored | None, recoveries: Sequence[Mapping[str, Any]]) -> None:
        """Take over the incidents of earlier leaders; waits out outages. last: the newest stored
        generation, with the incident that it recovers from. recoveries: the finished ones."""
        found = await retry(
            lambda: load_incidents(self._store, self._job, self._run_id), "load the incidents"
        )
        self._keeper.stored.update(found)
        loss, number = last.loss if last is not None else None, 0
        decided = read_incident(loss.incident) if loss is not None else None
        if decided is not None:  # two copies of one record: the longer one knows more
            number = decided["number"]
            found[number] = max(decided, found.get(number, {}), key=lambda d: len(str(d)))
        self._accounts.number_after(max(found, default=0))
        self._incidents.committed_before = self._accounts.committed
        self._earlier.update(found)
        for document in [found[n] for n in sorted(found)]:
            if document.get("outcome") in (Outcome.UNDER_WAY.value, Outcome.WAITING.value):
                followed_by = (
                    last.generation.number if last and document is found.get(number) else 0
                )
                self._guarded(partial(self._resume, document, followed_by, recoveries))

    def _resume(
        self, document: Mapping[str, Any], followed_by: int, recoveries: Sequence[Mapping[str, Any]]
    ) -> None:
        """Go on with an incident that was not over when the earlier leader stored it."""
        ahead_s, number = time.time() - self._clock(), document["number"]
        self._earlier[number] = {**document, "outcome": Outcome.UNKNOWN.value}
        try:
            record = open_record(document, ahead_s)
            nodes = [read_name(name) for name in document["nodes"]]
            workers = [read_name(name) for name in document["workers"]]
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            return  # the record is malformed
        over = [r for r in recoveries if _follows(r, record.generation)]
        record.cost = self._accounts.resume_incident(
            number, record.at, nodes, workers, followed_by=followed_by, under_way=not over
        )
        self._incidents.resume(record)
        del self._earlier[number]
        if over:  # at the earlier leader's time: there may have been none for long
            self._incidents.recovered(over[0], min(record.at + over[0]["total_s"], self._clock()))

    # ---- what happens

    def observe(
        self, event: ev.Event, effects: Sequence[fx.Effect], machine: Coordinator, now: float
    ) -> None:
        """Call this after the machine and the accounts have handled the event."""
        under_way, pauses = self._accounts.under_way, self._pauses
        if pauses.runs_since > self._stop_noted_at:
            self._stop_noted_at = pauses.runs_since
            self._incidents.stopped(pauses.stopped_s, pauses.runs_since)
        self._guarded(lambda: self._incidents.observe(event, effects, machine, under_way, now))

    def progressed(self, progress: pb.Progress) -> None:
        self._guarded(
            lambda: self._incidents.progressed(
                progress.worker, progress.committed, progress.samples
            )
        )

    def left_late(self, node: str) -> None:
        """A node's workers are ended: they did not leave at a step boundary in time."""
        self._guarded(lambda: self._incidents.left_late(node, self._clock()))

    def explained(self, generation: int, verdict: Diagnosis, stacks: Sequence[RankStacks]) -> None:
        self._guarded(lambda: self._incidents.explained(generation, verdict, stacks))

    def recovered(self, recovery: Mapping[str, Any]) -> None:
        """The first step after a loss is committed."""
        self._guarded(lambda: self._incidents.recovered(recovery, self._clock()))

    def reformed(self, report: pb.Reformed) -> None:
        self._guarded(lambda: self._incidents.reformed(report.generation, report.recomputed))

    def save_failed(self, step: int, generation: int, message: str) -> None:
        """A checkpoint could not be completed, although all its parts were written."""
        self._guarded(lambda: self._incidents.save_failed(step, generation, message, self._clock()))

    def saved(self) -> None:
        self._guarded(self._saved)

    def ended(self, message: str) -> None:
        def end() -> None:
            final = self._of_leaders_before()  # later nobody updates their costs
            self._incidents.changed |= {n for n in final if final[n] != self._keeper.stored.get(n)}
            self._incidents.ended(message)

        self._guarded(end)

    # ---- what is known

    def brief(self) -> list[dict[str, Any]]:
        """Return one short document for each incident, oldest first, for lists."""
        return [{name: d.get(name) for name in _BRIEF} for d in self._documents().values()]

    def document(self, number: int) -> dict[str, Any]:
        """Return an incident's record; 0: the newest one's. Raises ConfigurationError if there is
        none of this number."""
        found = self._documents()
        number = number or max(found, default=0)
        if number in found:
            return found[number]
        known = ", ".join(map(str, sorted(found)[-_MOST_NAMED:]))
        raise ConfigurationError(
            f"there is no incident {number}; known incidents: {known}"
            if known
            else f"there is no incident {number}: none has been recorded"
        )

    def newest_open(self) -> bytes:
        """Return the newest open incident's record, as the store keeps it; empty: none is open."""
        found = b""

        def read() -> None:
            nonlocal found
            if (record := self._incidents.newest_open) is not None:
                document = record.to_document(time.time() - self._clock())
                found = _encode_within_limit(_with_words(document))

        self._guarded(read)
        return found

    def _documents(self) -> dict[int, dict[str, Any]]:
        ahead_s = time.time() - self._clock()
        own = self._incidents.documents(ahead_s)
        found = self._of_leaders_before()
        found.update((number, _with_words(document)) for number, document in own.items())
        return {number: found[number] for number in sorted(found)[-MOST_INCIDENTS:]}

    def _of_leaders_before(self) -> dict[int, dict[str, Any]]:
        """Records of earlier leaders, with the costs that are known now.

        A record was stored before all of its cost was known: a slot may still be empty because of
        it. The accounts pass from leader to leader and go on.
        """
        costs = self._accounts.costs()
        found = {number: dict(document) for number, document in self._earlier.items()}
        for number in found.keys() & costs.keys():
            lost, known = lost_time(costs[number]), found[number].get("lost_s")
            if not isinstance(known, int | float) or lost["lost_s"] > known:
                found[number].update(lost)  # otherwise the record is newer than the accounts
        return found

    async def wait_until_stored(self, within_s: float) -> None:
        """Return when the store has all records, or after this time."""
        ends_at = self._clock() + within_s
        while self._keeping and self._clock() < ends_at:
            await asyncio.sleep(_POLL_S)

    # ---- storing

    def _saved(self) -> None:
        self._incidents.saved()
        for number, document in self._earlier.items():
            if document.get("outcome") == Outcome.TRAINS_ON.value:
                self._earlier[number] = {**document, "outcome": Outcome.SAVED_SINCE.value}
                self._incidents.changed.add(number)

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
            self._tell()
        except Exception as error:  # noqa: BLE001 - the job can do without incidents
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        message = f"incidents are no longer recorded: {type(error).__name__}: {error}"
        self._journal.record("warning", source="incidents", message=message)

    def _tell(self) -> None:
        if self._incidents.changed and not self._keeping:
            self._keeping = True
            self._start(self._keep(), "incidents")
        news, self._incidents.news = self._incidents.news, []
        for number in news:
            document = self._incidents.document(number, time.time() - self._clock())
            if document is None:
                continue
            told = _with_words(document)
            self._journal.record(
                "incident",
                number=number,
                cause=told["cause"],
                summary=told["summary"],
                noticed_by=told["noticed_by"],
                outcome=told["outcome"],
                lasted_s=told["lasted_s"],
                explain=f"elastic explain {number}",
            )

    async def _keep(self) -> None:
        """Store changed records by number, until no more have changed meanwhile."""
        try:
            while self._incidents.changed:
                changed, self._incidents.changed = self._incidents.changed, set()
                before = self._of_leaders_before()
                for number in sorted(changed):
                    document = self._incidents.document(number, time.time() - self._clock())
                    document = _with_words(document) if document else before.get(number)
                    if document is not None:
                        await self._keeper.keep(
                            number, _encode_within_limit(document), most=MOST_INCIDENTS
                        )
                await asyncio.sleep(0)
        except GuardFailed:
            return  # another coordinator leads
        except Exception as error:  # noqa: BLE001 - as in _guarded
            self._give_up(error)
        finally:
            self._keeping = False


def _follows(recovery: Mapping[str, Any], generation: int) -> bool:
    """Whether a stored recovery, if it can be read, is from the loss of this or a later group."""
    try:
        number, *_ = [read_number(recovery[k]) for k in ("generation", "total_s", "committed")]
    except (ValueError, TypeError, LookupError):
        return False
    return number > generation


def _with_words(document: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary(document), "noticed_by": noticed_by(document), **document}


def _encode_within_limit(document: dict[str, Any]) -> bytes:
    """Return the document's bytes, without the longest texts if it would be too large: characters
    may take four bytes, and control characters six."""
    value = json.dumps(document, ensure_ascii=False).encode()
    processes = document.get("processes", ())
    for name in ("log_tail", "traceback", "message"):
        if len(value) <= _MOST_BYTES:
            break
        processes = [{**p, name: ""} for p in processes]
        document = {**document, "processes": processes}
        value = json.dumps(document, ensure_ascii=False).encode()
    return value


_MOST_NAMES = 4
_PEERS_FAIL_WITHIN_S = 10.0  # a process notices the loss of a peer, and raises, within this time


def summary(document: Mapping[str, Any]) -> str:
    """Say what struck first, in one sentence without a full stop. document: a record's."""
    cause, process = Cause(document["cause"]), _first_process(document)
    if cause is Cause.SAVE_FAILED:
        return _failed_saves(document["saves"])
    if cause is Cause.HANG and document["hang"] is not None:
        return _hang(document["hang"])
    if cause in (Cause.WORKER_FAILED, Cause.WORKER_LEFT_OUT) and process is not None:
        more = len(document["processes"]) - 1 + document["further_processes"]
        others = f"; {more} more {'process' if more == 1 else 'processes'} ended" if more else ""
        verb = "raised " if process["kind"] == "exception" else ""
        return f"{_who(process)} {verb}{process['message']}{others}"
    if cause is Cause.NODE_LOST:
        signs = (Sign.NODE_LOST.value, Sign.NODE_GONE.value, Sign.NODE_ABSENT.value)
        lost = dict.fromkeys(n["node"] for n in document["noticed"] if n["sign"] in signs)
        return f"{_nodes(list(lost))} lost"
    if cause is Cause.LEAVE_TIMED_OUT:
        late = [n["node"] for n in document["noticed"] if n["sign"] == Sign.LEAVE_TIMED_OUT.value]
        return (
            f"node {late[0]} was told to leave, but its workers did not reach a step boundary "
            "in time"
        )
    if cause is Cause.UNREACHABLE:
        found = [n for n in document["noticed"] if n["sign"] == Sign.UNREACHABLE.value]
        told = [f"node {n['node']} did not reach {n['detail']}" for n in found]
        more = f"; {len(told) - _MOST_NAMES} more" if len(told) > _MOST_NAMES else ""
        return f"members do not reach each other: {'; '.join(told[:_MOST_NAMES])}{more}"
    if cause is Cause.GROUP_BROKEN:
        broken = next(n for n in document["noticed"] if n["sign"] == Sign.GROUP_BROKEN.value)
        detail = f": {broken['detail']}" if broken["detail"] else ""
        return f"connections between members broke, as {_who(broken)} noticed{detail}"
    return f"the group lost {', '.join(document['workers'][:_MOST_NAMES]) or 'a member'}"


def noticed_by(document: Mapping[str, Any]) -> str:
    """Say which process noticed first, and how; empty if that is unknown. Says also why the
    coordinator has noticed late, if it was stopped."""
    stopped = Sign.COORDINATOR_STOPPED.value
    signs = [n for n in document["noticed"] if n["sign"] != stopped]
    late = [n["detail"] for n in document["noticed"] if n["sign"] == stopped]
    found = [_noticed_by(signs[0], document)] if signs else []
    return "; ".join([*found, *(f"the coordinator was late: {why}" for why in late)])


def _noticed_by(first: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    sign, node = Sign(first["sign"]), first["node"]
    if sign is Sign.WORKER_ENDED:
        lived = document["cause"] == Cause.WORKER_LEFT_OUT.value
        how = "it declared the process lost" if lived else "the process ended"
        return f"the agent of node {node}: {how}"
    if sign is Sign.GROUP_BROKEN:
        detail = f" ({first['detail']})" if first["detail"] else ""
        return f"{_who(first)}: its collective failed{detail}"
    if sign is Sign.NODE_LOST:
        return f"the coordinator: its connection to the agent of node {node} broke"
    if sign is Sign.NODE_ABSENT:
        return (
            f"the coordinator: the agent of node {node} has not connected since the leader changed"
        )
    if sign is Sign.NODE_GONE:
        return f"the coordinator: all workers of node {node} have ended"
    if sign is Sign.OVERDUE:
        hang = document["hang"]
        since = f" for {hang['standing_s']:.1f} s" if hang is not None else " in time"
        return f"the coordinator: no step was committed{since}"
    if sign is Sign.UNREACHABLE:
        return f"the agent of node {node}: it did not reach {first['detail']}"
    if sign is Sign.LEAVE_TIMED_OUT:
        return f"the agent of node {node}: its time to leave ran out"
    if node:
        return f"{_who(first)}: it could not write its part of the checkpoint"
    return "the coordinator: it could not complete the checkpoint"


def _first_process(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the first process; one that was ended for not answering only if there is no other.

    An exception does not kill another process, but a process that is killed makes others raise, and
    these may report first.
    """
    processes: list[Mapping[str, Any]] = document["processes"]
    found = sorted(processes, key=lambda p: (p["kind"] == "left_out", p["after_s"]))
    if not found:
        return None
    until_s = found[0]["after_s"] + _PEERS_FAIL_WITHIN_S
    killed = [p for p in found if _was_killed(p) and p["after_s"] <= until_s]
    return (killed or found)[0]


def _was_killed(process: Mapping[str, Any]) -> bool:
    """True if the process was ended by a signal that torch, NCCL and agents do not send."""
    return process["kind"] == "signal" and process["code"] not in (signal.SIGABRT, signal.SIGTERM)


def _who(found: Mapping[str, Any]) -> str:
    if found["rank"] is None:
        return f"worker {found['worker']} (node {found['node']})"
    return f"rank {found['rank']} (node {found['node']}, worker {found['worker']})"


def _nodes(names: list[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]} was"
    shown = ", ".join(names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"nodes {shown}{more} were"


def _hang(hang: Mapping[str, Any]) -> str:
    stood = f"the group stood still at step {hang['step']} for {hang['standing_s']:.1f} s"
    return f"{stood}: {hang['verdict']}" if hang["verdict"] else stood


def _failed_saves(saves: Mapping[str, Any]) -> str:
    if saves["count"] == 1:
        which = f"the checkpoint of step {saves['first_step']} was"
    else:
        steps = f"steps {saves['first_step']} to {saves['last_step']}"
        which = f"{saves['count']} checkpoints, of {steps}, were"
    return f"{which} not saved: {saves['message']}"


_KEPT = 20


@dataclass(slots=True)
class _Recovery:
    sign_at: float
    decided_at: float
    reason: str
    lost: tuple[str, ...]
    generation: int | None = None
    """The generation that followed; None while it is not announced."""
    persisted_at: float = 0.0


class Recoveries:
    """Follows a loss until the new group has committed its first step. Instants: monotonic seconds.

    These phases add up to the recovery's total, except abort, which overlaps the others:
    - detect: from the first sign to the decision. In a hang, it starts with the step in which the
      group stood still; for a node that did not leave in time, with the last commit.
    - persist: until a generation is written, perhaps one without members.
    - join, sync, first step: as measured by the member that was first to commit.
    - notify: the rest, messages and waiting for the last member, or for enough workers.
    - abort: members free themselves from the lost group.
    """

    def __init__(
        self,
        finished: Iterable[Mapping[str, Any]] = (),
        *,
        leads_since: float = -math.inf,
        last: Stored | None = None,
    ) -> None:
        """finished: those of earlier leaders, newest last. leads_since: earlier signs of a loss are
        unknown here. last: the newest stored generation."""
        self._heard_since = leads_since
        self._signs: dict[NodeId, float] = {}
        """By the node that is out of contact; signs of other kinds under the empty name."""
        self._under_way: _Recovery | None = None
        self.finished: deque[Mapping[str, Any]] = deque(finished, maxlen=_KEPT)
        self._inherited: Loss | None = None
        """A loss whose recovery an earlier leader has not seen to its end."""
        self._inherited_in = last.generation.number if last is not None else 0
        if not any(r.get("generation", 0) >= self._inherited_in for r in self.finished):
            self._inherited = last.loss if last is not None else None

    def loss(self, incident: bytes) -> Loss | None:
        """Return the loss from which the group recovers, for later leaders."""
        if self._under_way is None:
            return self._inherited
        return Loss(reason=self._under_way.reason, workers=self._under_way.lost, incident=incident)

    @property
    def under_way_since(self) -> float | None:
        """When the first sign of the present loss came; None: no recovery is under way."""
        return self._under_way.sign_at if self._under_way is not None else None

    def agent_connected(self, now: float) -> None:
        """An agent with members has connected: what it saw before, it reports only now."""
        self._heard_since = now

    def sign(self, now: float, *, silent: NodeId = "") -> None:
        """Note a sign of a loss: a broken collective, a dead member, a node's broken stream."""
        self._signs[silent] = min(now, self._signs.get(silent, now))

    def reported(self, node: NodeId, workers: Iterable[WorkerId], current: Generation) -> None:
        """A node reports its workers. If it was silent and still has all its members, the silence
        was no sign of a loss."""
        if node in self._signs and current.workers_on(node).issubset(workers):
            del self._signs[node]

    def left_late(self, since: float, now: float, current: Generation | None) -> None:
        """A member did not leave at a step boundary and is ended; `since`: the last commit.

        The group without it may be planned already; otherwise `lost` follows.
        """
        earlier = self._under_way
        recovery = earlier or _Recovery(since, now, "leave_timed_out", ())
        recovery.sign_at = min(since, recovery.sign_at)
        if earlier is None and current is not None and current.leave_after is not None:
            recovery.generation, recovery.persisted_at = current.number, now
        self._under_way = recovery

    def lost(self, effect: Lost) -> None:
        """The coordinator has decided to go on without these workers."""
        earlier = self._under_way
        sign_at = min(self._signs.values(), default=effect.at)
        if effect.standing_since is not None:
            sign_at = min(sign_at, effect.standing_since)
        if earlier is not None:  # another loss before the first step: one recovery
            sign_at = min(sign_at, earlier.sign_at)
        before = self._inherited.workers if self._inherited is not None else ()
        lost = (*(earlier.lost if earlier else before), *effect.workers)
        self._inherited = None
        self._under_way = _Recovery(sign_at, effect.at, effect.reason.name.lower(), lost)
        self._signs.clear()

    def announced(self, generation: Generation, now: float) -> None:
        self._signs.clear()
        if self._under_way is not None and generation.leave_after is None:
            if self._under_way.generation is None:  # else workers were missing since
                self._under_way.persisted_at = now
            self._under_way.generation = generation.number

    def reformed(self, report: pb.Reformed, now: float) -> dict[str, Any] | None:
        """A member has committed its first step; return the finished record if it was first."""
        recovery = self._under_way
        if recovery is None:
            recovery = self._inherited_as(report, now)
        if recovery is None or recovery.generation is None:
            return None
        if report.generation < recovery.generation:
            return None  # the lost group's, overtaken by the news of its loss
        self._under_way = self._inherited = None
        if (out_since := now - report.out_s) < self._heard_since:
            recovery.sign_at = min(recovery.sign_at, out_since)
        record = _record(recovery, report, now)
        self.finished.append(record)
        return record

    def _inherited_as(self, report: pb.Reformed, now: float) -> _Recovery | None:
        """It is unknown when the earlier leader decided, so the time that the member has not
        measured counts as detection."""
        inherited, generation = self._inherited, self._inherited_in
        if inherited is None or report.generation < generation or not report.out_s:
            return None
        measured_s = report.join_s + report.sync_s + report.first_step_s
        decided_at = now - min(measured_s, report.out_s)
        return _Recovery(
            now - report.out_s,
            decided_at,
            inherited.reason,
            inherited.workers,
            generation,
            decided_at,
        )


def _record(recovery: _Recovery, report: pb.Reformed, now: float) -> dict[str, Any]:
    phases = {
        "detect_s": recovery.decided_at - recovery.sign_at,
        "persist_s": max(0.0, recovery.persisted_at - recovery.decided_at),
        "abort_s": report.abort_s,
        "join_s": report.join_s,
        "sync_s": report.sync_s,
        "first_step_s": report.first_step_s,
    }
    total_s = now - recovery.sign_at
    measured = sum(phases.values()) - report.abort_s  # abort overlaps
    phases["notify_s"] = max(0.0, total_s - measured)
    return {
        "generation": report.generation,
        "reason": recovery.reason,
        "lost": list(recovery.lost),
        "committed": report.committed,
        "total_s": round(total_s, 6),
        **{name: round(value, 6) for name, value in phases.items()},
    }


def ending(effect: EndJob, max_restarts: int, window_s: float) -> str:
    """Say why the job ended and what to do about it; empty for a good end."""
    failure = effect.failure
    if failure is None or effect.verdict is None:
        return effect.message
    what = f"worker {failure.worker}: {failure.message}"
    log = f" Its log: {failure.log}." if failure.log else ""
    if effect.verdict is Verdict.NOT_RETRYABLE:
        return f"{what}.{log}"
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS and failure.place:
        seen = f" {effect.message}." if effect.message else ""
        return (
            f"the script hangs at the same place ({failure.place}) on different nodes before "
            f"another step is committed, so other nodes cannot help; {what}.{seen}{log}"
        )
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS:
        return (
            f"the script fails the same way again before another step is committed, so restarting "
            f"cannot help; {what}.{log}"
        )
    return (
        f"more than {max_restarts} workers failed within {window_s:g} s, the last one: {what}."
        f"{log} Raise --max-restarts if such failures are expected"
    )


def refusal(effect: RefuseNewcomers) -> str:
    """Say why newcomers are not let into the group, and what to do about it."""
    failure = effect.failure
    return (
        "workers that join fail in the same way each time, so none may join for "
        f"{effect.retry_s:.0f} s and the group trains on as it is; the last one, "
        f"{failure.worker}: {failure.message}. Fix the script or the node: the next worker that "
        "starts uses the fixed version"
    )


def unreachable(effect: PeersUnreachable) -> dict[str, Any]:
    """The fields of the event that says who cannot reach whom, and what to do about it."""
    told = [
        {
            "node": name_of(u.by),
            "peer": name_of(u.peer.node),
            "address": u.peer.endpoint,
            "reason": _why(u),
        }
        for u in effect.unreached[:_MOST_PAIRS]
    ]
    out = [name_of(node) for node in effect.left_out]
    return {
        "unreached": told,
        "left_out": out,
        "retry_s": round(effect.retry_s, 1),
        "message": _told_unreached(effect.unreached, out, effect.retry_s),
    }


def why_left_out(effect: PeersUnreachable) -> dict[NodeId, str]:
    """For each node that is left out: whom it does not reach, and who does not reach it."""
    return {
        node: unreached_in_words([u for u in effect.unreached if node in (u.by, u.peer.node)])
        for node in effect.left_out
    }


_MOST_PAIRS = 16


def _why(found: Unreached) -> str:
    if not found.by_port:
        return found.why
    return f"this port answers, but not one that the kernel chose ({found.why}): a firewall"


def _told_unreached(unreached: Sequence[Unreached], out: Sequence[str], retry_s: float) -> str:
    what = unreached_in_words(unreached)
    named = ", ".join(out[:_MOST_NAMES])
    goes_on = (
        f"; node{'s' if len(out) > 1 else ''} {named} cannot take part, which is tried again in "
        f"{retry_s:.0f} s, and the others go on"
        if out
        else ""
    )
    return f"{what}{goes_on}. {_ADVICE}"


_ADVICE = (
    "Workers connect to each other at all ports: open them between these nodes in both directions, "
    "and give an agent whose address is wrong another --node-host. `elastic doctor` on both nodes "
    "shows which ports answer"
)


def unreached_in_words(unreached: Sequence[Unreached]) -> str:
    """Say who has not reached whom, at which address."""
    told = dict.fromkeys(
        f"node {name_of(u.by)} does not reach node {name_of(u.peer.node)} at {u.peer.endpoint} "
        f"({_why(u)})"
        for u in unreached
    )
    shown = list(told)[:_MOST_NAMES]
    more = f", and {len(told) - len(shown)} more" if len(told) > len(shown) else ""
    return f"{', '.join(shown)}{more}" if shown else "members do not reach each other"
