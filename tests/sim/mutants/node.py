"""Faults to plant in the machines of agents and workers, and in the rules that they share."""

from __future__ import annotations

AGENT = (
    (
        "slot=slot, pid=own.pid, compiling=own.compiling)",
        "slot=slot, pid=own.pid, compiling=None)",
        "a report makes the agent forget that the worker compiles",
    ),
    (
        "        slot = process.status.slot  # given here: a report sent"
        " before it must not undo it\n",
        "        slot = event.status.slot\n",
        "a report that was sent before the slot was assigned takes the slot back",
    ),
    (
        "process.adopted, slot = False, event.status.slot",
        "process.adopted = False",
        "a worker that a new agent finds loses its slot",
    ),
    (
        "        return self._catch_up(process)\n",
        "        return []\n",
        "a worker that is ready later than others never hears of their generation",
    ),
    (
        "knows = status.acknowledged >= newest.number",
        "knows = status.acknowledged > 0",
        "a worker that has missed a generation is not told of it",
    ),
    (
        "idle = [p for p in self._processes.values() if p.idle and p.ending is None]",
        "idle = [p for p in self._processes.values() if p.idle]",
        "a spare that is being ended gets a slot",
    ),
    (
        "            waiting = process.idle or process.ending is not None\n",
        "            waiting = process.ending is not None\n",
        "spares are ended because they do not ask for a group",
    ),
    (
        "            process.deadline = None\n        if self._settings.classic",
        "            pass\n        if self._settings.classic",
        "workers in a group are ended by the time limit for asking for one",
    ),
    (
        "            yield from self._replace(process.status.worker, "
        "FailureKind.START_TIMEOUT, message)\n",
        "            yield from ()\n",
        "a script that never asks for a group is never ended",
    ),
    (
        "            for name in list(self._processes)\n",
        "            for name in list(self._processes)[1:]\n",
        "a node that is cut off for good does not end all of its workers",
    ),
    (
        "        if not self._processes or overdue:\n            return [fx.SetTimer(at=None), fx.ExitAgent",
        "        if True:\n            return [fx.SetTimer(at=None), fx.ExitAgent",
        "an agent exits before its workers are gone",
    ),
    (
        "return None if self._adopting() else tuple(present)",
        "return tuple(present)",
        "workers that a new agent finds are reported as starting",
    ),
    (
        "        if not self._adopting() and self._loss is None:\n",
        "        if self._loss is None:\n",
        "a new agent starts workers before it knows what the found ones do",
    ),
    (
        "        if self._loss is not None and now >= self._loss.until:\n            self._loss = None\n",
        "",
        "a lost worker is not replaced unless the survivors train on without it",
    ),
    (
        "        self._spawned += 1\n            start =",
        "        start =",
        "names of workers are used again",
    ),
    (
        "                return self._replace(event.status.worker,"
        " FailureKind.LEFT_OUT, message)\n",
        "                pass\n",
        "two workers have the same slot",
    ),
    (
        "        self._generation = newest\n        loss =",
        "        loss =",
        "an agent does not remember the newest generation",
    ),
    (
        "            self._kill_at = now + grace_s\n",
        "            self._kill_at = now + 1000.0\n",
        "scripts that hang at the end of the job are not ended",
    ),
    (
        "        process.ending = Failure(\n            worker=worker,\n",
        "        process.reported = Failure(\n            worker=worker,\n",
        "a worker that the agent ends does not count as ended by the agent",
    ),
)

WORKER = (
    (
        "(generation.provisional or not at_boundary)",
        "generation.provisional",
        "a member that lost its group before the settled boundary joins the planned change",
    ),
    (
        "if generation.number <= self._status.generation or generation.freezes:",
        "if generation.freezes:",
        "a member joins a group again that it has left",
    ),
    (
        "        return not following.provisional and committed >= leave_after\n",
        "        return not following.provisional\n",
        "a member leaves at the next boundary, not at the settled one",
    ),
    (
        "        return following.provisional and committed >= following.leave_after\n",
        "        return following.provisional and committed > following.leave_after\n",
        "a member passes the boundary at which it has to wait",
    ),
    (
        "        if generation.number > self._status.generation:\n            self._following",
        "        if generation.number > self._status.generation + 1:\n            self._following",
        "the generation right after its own is overlooked",
    ),
    (
        "        if self._has_group() and (generation.leave_after is None or self._is_behind(generation)):"
        "\n",
        "        if self._has_group():\n",
        "a planned change aborts the group at once",
    ),
    (
        "        if self._has_group() and (generation.leave_after is None or self._is_behind(generation)):"
        "\n",
        "        if self._status.phase is WorkerPhase.TRAINING and"
        " generation.leave_after is None:\n",
        "a member that is on its way into a group is not freed",
    ),
    (
        "        return self._status.generation < following.number - 1\n",
        "        return False\n",
        "a member does not leave a join for a planned change of a later group",
    ),
    (
        "            self._following = None\n        me =",
        "            pass\n        me =",
        "a member leaves the group that it has just joined",
    ),
    (
        '            broken=False,\n            detail="",\n',
        "",
        "a member reports the last group's break as one of the new group",
    ),
    (
        "WorkerPhase.TRAINING, committed, has_state=True, trained_in=trained_in",
        "WorkerPhase.TRAINING, committed, trained_in=trained_in",
        "a member does not report that it holds the state",
    ),
    (
        "        self._status = replace(self._status, has_state=False)\n",
        "",
        "a member whose state is half overwritten reports that it holds the state",
    ),
    (
        "        self._committed = committed\n\n    def finished",
        "        pass\n\n    def finished",
        "acknowledgements do not carry the number of committed steps",
    ),
    (
        "committed, broken=True, detail=detail, has_state=has_state",
        "committed, detail=detail, has_state=has_state",
        "members do not report that a group broke",
    ),
)

MEMBERSHIP = (
    (
        "return known.provisional or (known.leave_after is not None and self.leave_after is None)",
        "return False",
        "the settled form of a planned change is refused",
    ),
)

DATA_ORDER = (
    (
        "    stop = position.cursor + min(size, left)\n",
        "    stop = position.cursor + min(size, left - 1)\n",
        "the last sample of an epoch is never reached",
    ),
    (
        "    if left < (size if drop_last else 1):\n",
        "    if left < size:\n",
        "the last samples of an epoch are dropped",
    ),
    (
        "        size -= 1\n",
        "        pass\n",
        "an epoch's last step has a single sample",
    ),
    (
        "    least = 1 if batch_size <= 2 else _LEAST_SAMPLES\n",
        "    least = 1\n",
        "a rank gets a single sample",
    ),
    (
        "    return DataPosition(epoch=samples.epoch, cursor=samples.stop)\n",
        "    return DataPosition(epoch=samples.epoch, cursor=samples.stop - 1)\n",
        "a sample is taken twice",
    ),
    (
        "return self.batch_size * self.accumulate * world_size",
        "return self.batch_size * self.accumulate",
        "the batch does not grow with the group",
    ),
    (
        "    first = index * size + min(index, larger)\n",
        "    first = index * size\n",
        "shares overlap where they are not equal",
    ),
    (
        "    return first, first + size + (index < larger)\n",
        "    return first, first + size\n",
        "shares leave out samples where they are not equal",
    ),
)

RESTARTS = (
    (
        "            return failure.worker not in incident.cohort\n",
        "            return True\n",
        "members that fail at the same time for the same reason end the job",
    ),
    (
        "        if incident is not None and committed <= incident.committed:\n",
        "        if incident is not None and committed < incident.committed:\n",
        "a script that always fails at the same step is started again and again",
    ),
    (
        "(FailureKind.SIGNAL, FailureKind.LEFT_OUT, FailureKind.SLOW)\n",
        "(FailureKind.SIGNAL, FailureKind.SLOW)\n",
        "workers that are left out twice end the job",
    ),
    (
        "        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 32))\n",
        "        ceiling = self.base_s * 2.0 ** min(10 * failures, 320)\n",
        "the delay of a restart has no bound",
    ),
)

RANKS = (
    (
        "    _put_holder_first(dense, holders)\n",
        "",
        "a newcomer gets rank 0",
    ),
    (
        "            ranks[rank] = members.pop(worker)\n",
        "            pass\n",
        "members that stay do not keep their ranks",
    ),
)
