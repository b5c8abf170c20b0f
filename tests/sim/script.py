"""The training script of a simulated worker, which drives the same protocol as production.

It does with values, in simulated time, what Session, Step and Training do with tensors, processes
and sockets. The way through groups is core/worker/participation.py in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic.core.recovery import Declaration, Mark
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Participation, Progress, Seat, Steps
from elastic.errors import ConfigurationError, GroupLost, StepMisused, Stranded
from tests.sim.group import GARBAGE, RENDEZVOUS, STEP
from tests.sim.node import LEASE_IS_OVER
from tests.sim.plan import EVALUATED, GIVES, LAST_REDUCED
from tests.sim.replica import (
    BLANK,
    Content,
    Loop,
    Replica,
    Samples,
    at_bottom,
    at_top,
    below,
    evaluation,
    further_below,
    kept,
    optimized,
    result_of,
    stepped,
    turned,
    valued,
)
from tests.sim.thread import Body, ScriptError, Wait
from tests.sim.undo import Undo

if TYPE_CHECKING:
    from tests.sim.process import Process

_ASK_AFTER_S = 0.5


class JobStopping(BaseException):
    """The script must leave the job: this unwinds it."""


class Call(NamedTuple):
    """Something that every member calls at the same place."""

    what: str
    number: int = 0
    """Distinguishes evaluations."""


END_OF_LOOP = Call("ends its loop")
END_OF_SCRIPT = Call("ends the script")


class Script:
    """One worker's script. Its points are named, so that a fault can strike there."""

    participation: Callable[..., Participation] = Participation

    def __init__(self, process: Process) -> None:
        self.process, self.clock = process, process.clock
        job = self.job = process.world.job
        self.style = job.style
        save_every = job.save_every if job.saves else 0
        self.part = type(self).participation(
            process.worker, save_every=save_every, receives_in_place=job.in_place
        )
        if job.style.scaling is not None:
            self.part.rules.append(job.style.scaling)
        self.content = BLANK
        self.undo = Undo()
        self.postponed: Replica | None = None
        """A state that waits until the script reaches the loop of that state."""
        self.left_call_at = -math.inf
        self.can_be_given_up = False
        """It is in a block that has not come to its reduction."""
        self._prepared = False
        self._digests: tuple[int, int] | None = None
        self._rest = 0
        self._at_once: dict[type, Callable[[Any], Any]] = {
            act.DropState: self._drop_state,
            act.ReadCheckpoint: self._read_checkpoint,
            act.TakePostponed: self._take_postponed,
            act.TellDifference: self._tell_difference,
            act.TearDown: self._tear_down,
            act.TellJoined: self._tell_joined,
            act.Entered: self._entered,
            act.Leave: self._leave,
            act.Break: self._break,
            act.PutBack: self._put_back,
            act.KeepForRetry: lambda _: self.undo.keep_for_retry(self.content),
            act.PutBackForRetry: self._put_back_for_retry,
            act.Save: self._save,
            act.LeaveJob: self._leave_job,
        }
        self._in_time: dict[type, Callable[[Any], Body]] = {
            act.Join: self._join,
            act.Declare: self._declare,
            act.Send: self._send,
            act.Receive: self._receive,
            act.Restore: self._restore,
            act.SetUp: self._set_up,
            act.AwaitSettlement: self._await_settlement,
            act.AwaitSuccessor: self._await_successor,
            act.CompareReplicas: self._compare_replicas,
            act.CompareUnread: self._compare_unread,
            act.SaveAndWait: self._save_and_wait,
            act.MeetForCall: self._meet_for_call,
            act.Perform: self._perform,
        }

    def run(self) -> Body:
        process, worker = self.process, self.process.worker
        yield self._takes(process.world.pace.start_s)
        process.tell(worker.attached())
        process.reach("attached")
        while process.slot is None:
            yield Wait.NEWS
        process.reach("assigned")
        yield self._takes(process.world.pace.prepare_s)
        try:
            yield from self._train()
            yield from self._finish()
        except JobStopping:  # in production training.JobStopping unwinds the script
            try:
                yield from self._finish()
            except JobStopping:
                raise ScriptError("the job was left a second time") from None
        yield from self._end()

    def leave_early(self) -> Body:
        """What another thread does while the script's has stopped for good in its block."""
        if not (yield from self._drive(self.part.leave_early(END_OF_SCRIPT, whole=True))):
            raise Stranded("the block that was given up cannot be undone")
        yield from self._end()

    def _end(self) -> Body:
        process, worker = self.process, self.process.worker
        process.done = True
        process.reach("done")
        process.leave_group()
        yield self._takes((0.0, 0.05))
        process.tell(worker.finished(process.committed))
        process.world.journal.finished_at[process.name] = self.clock.now
        process.reach("finished")
        while not process.dismissed:
            yield Wait.NEWS
        process.end(exit_code=0)

    # ---- what the user has written

    def _train(self) -> Body:
        loops = self.job.loops()
        for number, loop in enumerate(loops):
            yield from self._loop(loop)
            if number + 1 < len(loops):
                yield from self._between(number)

    def _loop(self, loop: Loop) -> Body:
        """`for step in session.steps(...)` with its body."""
        part, style = self.part, self.style
        loader = self.job.loaders()[loop.loader]
        yield from self._drive(part.begin_loop(loop.loader, loader))
        if part.skips:
            return
        while True:
            if not part.passes_boundary():
                yield from self._drive(part.boundary())
            if part.skips:
                break
            assert part.seat is not None
            samples = loader.samples_after(
                part.progress.position(loop.loader), part.seat.generation.world_size, loop.epochs
            )
            if samples is None:
                break
            self._begin_undo()
            counts = yield from self._step(Samples(loop.loader, samples))
            ends_epoch = part.progress.position(loop.loader).cursor == loader.length
            self.content = below(style, self.content, committed=counts)
            if style.uneven and ends_epoch and counts:
                yield from self._call_unevenly()
            if style.evaluates and ends_epoch and counts:
                result = yield from self._evaluate(Call("evaluates"))
                self.content = valued(self.content, result)
            self.process.reach("below")
            self.content = further_below(style, self.content, committed=counts)
        yield from self._drive(part.end_loop(END_OF_LOOP))
        self.left_call_at = self.clock.now
        self.process.reach("loop ended")

    def _step(self, samples: Samples) -> Body:
        """`with step:`; returns whether the step counts."""
        process, part, style = self.process, self.part, self.style
        if not process.node.may_train(process):
            yield from self._await_lease()
        part.begin_block()
        process.begin_step()
        process.reach("step")
        try:
            self.content = at_top(style, self.content)
            process.reach("top")
            self.can_be_given_up = True
            yield self._takes(process.world.pace.step_s)
            slow_s, process.slow_s = process.slow_s, 0.0
            if slow_s:
                yield slow_s
            yield from self._compile()
            self.can_be_given_up = False
            reduced = yield from self._reduce(part.progress.committed)
            process.reach("reduced")
            if samples.range.stop == self.job.loaders()[samples.loader].length:
                process.reach(LAST_REDUCED)
            if part.unread:
                part.read(same=(yield from self._compare_unread(act.CompareUnread())))
            self.content = optimized(self.content, *samples, self._factor())
            if reduced is GARBAGE:
                process.has_garbage = True
                self.content = self.content._replace(weights=hash((self.content.weights, -2)))
            if style.logs:
                yield self._takes((0.0, 0.01))
                yield from process.group.collective(("log", part.progress.committed), process)
                process.group.check(process)
                process.reach("logged")
            self.content = at_bottom(style, self.content)
        except GroupLost as lost:
            counts: bool = yield from self._drive(part.give_up_block(lost))
            if counts:  # it was at no boundary, so until now it was reported to be inside a call
                self.left_call_at = self.clock.now
            return counts
        if not process.node.may_train(process):
            yield from self._await_lease()
        self._commit(samples)
        return True

    def _await_lease(self) -> Body:
        """Park while the node's lease to train is not valid."""
        process = self.process
        process.note("parks", self.part.progress.committed)
        while not process.node.may_train(process):
            if process.epoch != process.node.epoch:
                raise Stranded(LEASE_IS_OVER)
            yield self._takes((0.01, 0.02))

    def _compile(self) -> Body:
        process, compile_s = self.process, self.process.world.pace.compile_s
        if compile_s is not None and process.begins_to_compile():
            yield self._takes(compile_s)
            process.report_compiling(None)

    def _call_unevenly(self) -> Body:
        """Make a call that depends on the rank, as a faulty script does."""
        seat = self.part.seat
        assert seat is not None
        if self.style.uneven == "other":
            yield from self._drive(self.part.run(Call("evaluates", 100 + seat.rank % 2)))
        elif seat.rank == 0:
            yield from self._drive(self.part.run(Call("evaluates", 100)))

    def _between(self, loop: int) -> Body:
        if self.style.between:
            yield self._takes((0.0, 0.1))
            self.process.reach("between")
        for call in range(self.style.between):
            if self.part.holds_back:
                assert self.postponed is not None
                found = result_of(self.postponed.content, loop, call)
                if found is None:
                    raise ConfigurationError("the script calls session.run() where others had not")
                result = found
            else:
                result = yield from self._evaluate(Call(f"between {loop}", call + 1))
                self.content = kept(self.content, loop, call, result)
            self.content = valued(self.content, result)
        self.content = turned(self.style, self.content, loop)

    def _evaluate(self, call: Call) -> Body:
        part = self.part
        number = part.runs_done
        result: int = yield from self._drive(part.run(call))
        self.left_call_at = self.clock.now
        self.process.world.called(self.process, self.content, number, call.number, result)
        self.process.reach(EVALUATED)
        return result

    # ---- what Session, Step and Training do

    def _finish(self) -> Body:
        if self.part.holds_back:
            raise ConfigurationError("the job's state is of a loop that the script does not have")
        yield from self._drive(self.part.run(END_OF_SCRIPT))

    def _reduce(self, committed: int) -> Body:
        group = self.process.group
        reduced = yield from group.collective((STEP, committed), self.process)
        group.check(self.process)
        return reduced

    def _begin_undo(self) -> None:
        style, clock = self.style, self.clock
        misses_gap = style.misses_gap > 0.0 and clock.chance(style.misses_gap)
        misses_block = style.misses_block > 0.0 and clock.chance(style.misses_block)
        self.undo.begin(self.content, misses_gap=misses_gap, misses_block=misses_block)
        if self.undo.missed:
            self.process.world.journal.undo_missed = True

    def _commit(self, samples: Samples) -> None:
        process, part = self.process, self.part
        assert part.seat is not None
        before = self.content.lineage
        number = part.seat.generation.number
        self.content = stepped(self.content, samples.loader, number, samples.range)
        part.commit(samples.range)
        self.undo.end(self.content)
        process.commit(samples, before, Replica(part.progress, self.content))
        process.reach("committed")

    def _factor(self) -> float:
        ramp = self.part.ramps.get("0")
        return ramp.factor(self.part.progress.committed) if ramp is not None else 1.0

    def _drive(self, protocol: Steps) -> Body:
        """Carry out the protocol's actions until it returns, like Training."""
        at_once, in_time = self._at_once, self._in_time
        resume: Callable[[Any], act.Action] = protocol.send
        value: Any = None
        while True:
            try:
                action = resume(value)
            except StopIteration as end:
                return end.value
            try:
                kind = type(action)
                if kind in at_once:
                    value = at_once[kind](action)
                else:
                    value = yield from in_time[kind](action)
                resume = protocol.send
            except Exception as error:  # noqa: BLE001 - the protocol decides what follows
                resume, value = protocol.throw, error

    # ---- into a group

    def _join(self, join: act.Join) -> Body:
        process, worker = self.process, self.process.worker
        if not self._prepared:
            self._prepared = True
            process.tell(worker.prepared(process.endpoint, queues=self.job.queues))
            process.reach("prepared")
        if join.held and self._digests is None:
            begin = _digest(self.content) if join.at_begin else 0
            self._digests = (_digest(self.undo.commit), begin)
        while (generation := worker.joinable()) is None:
            yield Wait.NEWS
        process.tell(worker.join_began(generation))
        group = process.enter(generation)
        process.reach("join")
        yield from group.collective(RENDEZVOUS, process, at_store=True)
        rank = generation.rank_of(process.name)
        assert rank is not None
        return Seat(generation=generation, rank=rank)

    def _declare(self, declare: act.Declare) -> Body:
        process = self.process
        process.reach("agree")
        group = process.group
        process.world.declared(process, group.generation)
        commit, begin = self._digests or (0, 0)
        journal = process.world.journal
        if declare.mine.took_part and declare.mine.committed and not declare.mine.intact:
            journal.torn_in.add(group.generation.number)
        journal.declared_last[process.name] = group.generation.number
        if declare.mine.in_run:
            journal.inside_in.add(group.generation.number)
        unread = self.style.reads_later and begin != 0 and not declare.whole
        self._rest = begin
        if unread:
            commit, begin = int(commit != 0), 1
        mine = replace(declare.mine, commit_digest=commit, begin_digest=begin, unread=unread)
        if mine.intact:
            held = journal.at_commit_in.setdefault(group.generation.number, [])
            held.append((mine.age, commit != 0))
        found: dict[str, Declaration] = yield from group.collective("declare", process, mine)
        return tuple(found[m.worker] for m in group.generation.members)

    def _send(self, send: act.Send) -> Body:
        content: Content | None = self.content
        if send.mark is Mark.COMMIT:
            content = self.undo.commit
        elif self.postponed is not None:
            content = self.postponed.content
        assert content is not None, "asked for a mark that it does not have"
        members = self.process.group.generation.members
        self.process.reach(GIVES)
        yield from self._transfer(
            self.process.name, members[send.rank].worker, Replica(send.progress, content)
        )

    def _receive(self, receive: act.Receive) -> Body:
        source = self.process.group.generation.members[receive.rank].worker
        if self.job.in_place:
            self._tear()
        given = (yield from self._transfer(source, self.process.name, None))[source]
        if receive.then is not None:
            then = self.process.group.generation.members[receive.then].worker
            yield from self._transfer(self.process.name, then, given)
        return self._take_or_postpone(given, receive.loop, at_commit=receive.mark is Mark.COMMIT)

    def _transfer(self, source: str, target: str, contribution: Replica | None) -> Body:
        self.process.reach("transfer")
        name, parties = ("transfer", source, target), (source, target)
        return (
            yield from self.process.group.collective(
                name,
                self.process,
                contribution,
                took_s=self.process.world.pace.transfer_s,
                parties=parties,
            )
        )

    def _restore(self, restore: act.Restore) -> Body:
        yield self._takes((0.01, 0.1))
        newest = self.process.world.storage.newest
        if newest.committed == 0:
            return None
        progress = self._take_or_postpone(newest, restore.loop, at_commit=False)
        self.process.replica = None  # before the group agrees on it, it is only what is stored
        return progress

    def _read_checkpoint(self, read: act.ReadCheckpoint) -> bool:
        """It may be another one than rank 0 finds."""
        newest = self.process.world.storage.newest
        if newest.committed == 0 or newest.progress.loop > read.loop:
            return False
        self.content = self.content._replace(weights=hash((self.content.weights, -2)))
        return True

    def _take_or_postpone(self, replica: Replica, loop: int, *, at_commit: bool) -> Progress:
        self.postponed = replica if replica.progress.loop > loop else None
        if self.postponed is None:
            self._put_in_place(replica, at_commit=at_commit)
        return replica.progress

    def _put_in_place(self, replica: Replica, *, at_commit: bool) -> None:
        self._digests = None
        self.content = replica.content
        self.undo.received(self.content, at_commit=at_commit)
        self.process.replica = replica

    def _take_postponed(self, _: act.TakePostponed) -> None:
        postponed, self.postponed = self.postponed, None
        assert postponed is not None, "no state waits"
        self._put_in_place(postponed, at_commit=False)

    def _drop_state(self, _: act.DropState) -> None:
        self._tear()
        self.process.world.journal.dropped.append((self.clock.now, self.process.name))
        self.process.tell(self.process.worker.state_dropped())

    def _tear(self) -> None:
        """The state that the worker holds must not be used any more."""
        if self.process.replica is not None:
            self.content = self.content._replace(weights=hash((self.content.weights, -1)))
        self.process.drop()

    def _tell_difference(self, difference: act.TellDifference) -> None:
        self.process.world.journal.differed.append(
            f"{self.process.name} at step {self.part.progress.committed}: {difference}"
        )

    def _tell_joined(self, joined: act.TellJoined) -> None:
        process = self.process
        process.group.check(process)
        replica = self.postponed or Replica(self.part.progress, self.content)
        process.agreed(process.group.generation, replica._replace(progress=self.part.progress))
        if self.postponed is None:
            process.replica = replica
        process.tell(process.worker.joined(process.group.generation, joined.committed))
        process.sets_up(process.group.generation)
        process.reach("joined")

    def _set_up(self, _: act.SetUp) -> Body:
        if self.process.set_up_since is None:  # at the start of a later loop
            self.process.set_up_since = self.clock.now
        self.process.reach("set up")
        yield self._takes((0.0, 0.01))
        self.process.set_up_since = None

    def _entered(self, _: act.Entered) -> None:
        if not self.part.unread:
            self._digests = None
        self.process.set_up_since = None  # in case there was nothing to set up

    # ---- out of it

    def _tear_down(self, _: act.TearDown) -> None:
        self.process.in_step_since = self.process.set_up_since = None

    def _leave(self, _: act.Leave) -> None:
        self.process.leave_group()
        self.process.tell(self.process.worker.group_left(self.part.progress.committed))

    def _break(self, broken: act.Break) -> None:
        process, worker = self.process, self.process.worker
        superseded = worker.superseded()
        process.world.journal.broke.add(worker.status.generation)
        process.leave_group(broken=True)
        committed = self.part.progress.committed
        if superseded:
            process.tell(worker.group_left(committed, held=broken.held))
        else:
            process.tell(worker.group_broke(committed, str(broken.error), held=broken.held))

    def _await_settlement(self, wait: act.AwaitSettlement) -> Body:
        worker, until = self.process.worker, self.clock.now + wait.timeout_s
        self.process.note("holds", wait.committed)
        self.clock.at(until, self.process.thread.nudge)
        while worker.must_wait(wait.committed):
            if self.clock.now >= until:
                self.process.held_in_vain()
                return False
            yield Wait.NEWS
        return True

    def _await_successor(self, wait: act.AwaitSuccessor) -> Body:
        worker, until = self.process.worker, math.inf
        if wait.timeout_s is not None:
            until = self.clock.now + wait.timeout_s
            self.clock.at(until, self.process.thread.nudge)
        while worker.following is None and self.clock.now < until:
            yield Wait.NEWS

    # ---- the state

    def _put_back(self, _: act.PutBack) -> bool:
        self._digests = None
        self.content, whole = self.undo.put_back(self.content)
        if not whole:
            self.process.world.journal.undo_missed = True
            self.process.drop()
        self.process.reach("undone")
        return whole

    def _put_back_for_retry(self, _: act.PutBackForRetry) -> bool:
        self.content, whole = self.undo.put_back_for_retry(self.content)
        if not whole:
            self.process.world.journal.undo_missed = True
            self.process.drop()
        return whole

    def _compare_replicas(self, _: act.CompareReplicas) -> Body:
        process, committed = self.process, self.part.progress.committed
        if process.group.generation.world_size == 1:
            return
        process.compares_since = self.clock.now
        try:
            found = yield from process.group.collective(
                ("compare", committed), process, self.content.weights
            )
        finally:
            process.compares_since = None
        if len(set(found.values())) > 1:
            raise StepMisused(f"the replicas differ at step {committed}")

    def _compare_unread(self, _: act.CompareUnread) -> Body:
        process = self.process
        if process.group.generation.world_size == 1:
            return True
        self._digests = None
        name = ("state", self.part.progress.committed)
        found = yield from process.group.collective(name, process, self._rest, at_store=True)
        return len(set(found.values())) == 1

    def _save(self, save: act.Save) -> None:
        process, step = self.process, save.progress.committed
        if not self.job.saves or step == 0:
            return  # nobody would wait for this save
        generation = process.group.generation
        if not process.has_begun_to_save(step, generation):
            process.save(generation, Replica(save.progress, self.content))

    def _save_and_wait(self, save: act.SaveAndWait) -> Body:
        """Like Checkpointing.save_and_wait."""
        process, step, group = self.process, save.progress.committed, self.process.group
        if step == 0 or process.is_saved(step):
            return
        if not process.has_begun_to_save(step, group.generation) or process.is_settled(step):
            process.save(group.generation, Replica(save.progress, self.content))
        while not process.is_settled(step):
            if process.worker.must_leave(step):
                raise GroupLost("superseded while saving")
            group.check(process)
            yield Wait.NEWS

    def _leave_job(self, _: act.LeaveJob) -> None:
        raise JobStopping

    # ---- calls

    def _meet_for_call(self, meeting: act.MeetForCall) -> Body:
        """Meet at the store like meet() of worker/group/membership.py, which detects different
        calls and members that are elsewhere."""
        ends = meeting.call is END_OF_SCRIPT
        if ends:
            self.process.reach("meet")
        if self.process.group.generation.world_size > 1:
            yield from self._meet(meeting)
        if ends:
            self.process.reach("met")

    def _meet(self, meeting: act.MeetForCall) -> Body:
        process, call = self.process, meeting.call
        group = process.group
        name = ("call", meeting.committed, meeting.number)
        self.clock.after(_ASK_AFTER_S, self._look_for_others, group, name, meeting)
        found = yield from group.collective(name, process, call, took_s=0.002, at_store=True)
        if len(set(found.values())) > 1:
            raise StepMisused(f"members call different things after step {meeting.committed}")

    def _look_for_others(self, group: Any, name: Any, meeting: act.MeetForCall) -> None:
        """While this member waits, look for one that is on its way to the next step instead."""
        process = self.process
        if not process.alive or process.frozen or not group.waits_at(name, process):
            return
        if process.world.members_elsewhere(group.generation, meeting.committed, _ASK_AFTER_S):
            error = StepMisused(f"others do not come to a call after step {meeting.committed}")
            group.free_from_store(process, error)
        else:
            self.clock.after(_ASK_AFTER_S, self._look_for_others, group, name, meeting)

    def _perform(self, perform: act.Perform) -> Body:
        self._digests = None
        process, call = self.process, perform.call
        if call is END_OF_LOOP or (call is END_OF_SCRIPT and not self.job.saves):
            return None
        if call is END_OF_SCRIPT:
            return (yield from self._save_and_wait(act.SaveAndWait(progress=self.part.here)))
        group = process.group
        process.reach("run")
        yield self._takes((0.1, process.world.pace.evaluation_s / (1 + self.style.between)))
        mine = evaluation(self.content, call.number)
        found = yield from group.collective(
            ("run", self.part.progress.committed, call), process, mine
        )
        group.check(process)
        results = set(found.values())
        return mine if len(results) == 1 else hash(tuple(sorted(results)))

    def _takes(self, bounds: tuple[float, float]) -> float:
        return self.clock.between(*bounds)


def _digest(content: Content | None) -> int:
    return (hash(content) or 1) if content is not None else 0
