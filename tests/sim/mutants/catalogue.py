"""Faults to plant in elastic.core: by file, what to replace, by what, and what it breaks.

Each is of a kind that is easily made: an operator changed, a guard dropped, an argument swapped, a
value not reset. What makes no difference to anybody (a patience that is longer, say) does not
belong here, nor what only scripts for torchrun meet, which the simulator does not have.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.sim.mutants.protocol import PARTICIPATION, RECOVERY


class Mutant(NamedTuple):
    """One planted fault."""

    file: str
    """Below elastic/core."""
    find: str
    """Occurs exactly once in the file."""
    replacement: str
    breaks: str

    def plant(self, source: str) -> str:
        """The source with the fault; ValueError if the place is not to be found any more."""
        count = source.count(self.find)
        if count != 1:
            raise ValueError(f"{self.file} has {self.find!r} {count} times, not once")
        return source.replace(self.find, self.replacement)

    def lines(self, source: str) -> tuple[int, int]:
        """The first and the last line of its place."""
        at = source.index(self.find)
        blank = len(self.find) - len(self.find.lstrip())
        first = source.count("\n", 0, at + blank) + 1
        return first, first + self.find.strip().count("\n")


_FORMATION = (
    (
        "if now < until:  # whoever holds the state may not have come back yet",
        "if False:",
        "without a group a new leader does not wait for those that hold the state",
    ),
    (
        "if silent and now < until:  # the same for whoever has lost its agent",
        "if False:",
        "without a group nodes out of contact are not waited for",
    ),
    (
        "return s.phase is WorkerPhase.READY and (hands_over or not w.leaving)",
        "return s.phase is WorkerPhase.READY and not w.leaving",
        "nobody hands over the state that only nodes which leave hold",
    ),
    (
        "    if _nothing_left_to_do(finished, ready + returning):\n        return Complete()\n",
        "",
        "without a group the end of a finished job is begun again",
    ),
    (
        "    if returning:\n        return _await_return(view, policy, now, returning)\n",
        "",
        "a group is formed while members of the last one are on their way out of it",
    ),
    (
        "return Wait(reason=WaitReason.GATHERING, until=deadline)",
        "return Wait(reason=WaitReason.GATHERING)",
        "nobody looks again when the patience with absent nodes has run out",
    ),
    (
        "chosen = sorted(ready, key=_seniority)[: policy.max_workers]",
        "chosen = sorted(ready, key=_seniority)",
        "the first group is larger than the maximum",
    ),
    (
        "return (not s.took_part, -s.committed, worker.node, s.slot or 0)",
        "return (s.took_part, -s.committed, worker.node, s.slot or 0)",
        "newcomers come before holders of the state",
    ),
    (
        "            and w.status.worker not in members\n            and w.silent_since is None\n"
        "            and not w.leaving\n",
        "            and w.status.worker not in members\n            and w.silent_since is None\n",
        "workers of a node that leaves are admitted",
    ),
    (
        "            and w.status.worker not in members\n            and w.silent_since is None\n",
        "            and w.status.worker not in members\n",
        "workers out of contact are admitted",
    ),
    (
        "        if self._now < roll_call_until:\n",
        "        if False:\n",
        "a new leader leaves out members before they can have found it",
    ),
    (
        "        if self._now < (until := self._state_is_away_until()):\n",
        "        if (until := self._state_is_away_until()) < self._now:\n",
        "newcomers begin again while the only holders are out of contact",
    ),
    (
        "self._lost = len(present) < self._current.world_size",
        "self._lost = len(present) < self._current.world_size - 1",
        "the loss of one member is overlooked",
    ),
    (
        "if lost or (self._broken and self._finished) or self._is_stranded():",
        "if self._lost or (self._broken and self._finished):",
        "members wait in a group for one that has finished",
    ),
    (
        "        if self._silent:\n            return self._await_silent()\n",
        "",
        "members out of contact are taken for present",
    ),
    (
        "        if self._view.stalled:\n"
        "            return self._form(self._active, ChangeReason.STALLED)\n",
        "",
        "a step that never ends is noticed by nobody",
    ),
    (
        "        if deaf:\n            return self._leave_out(deaf)\n",
        "",
        "a member that acknowledges nothing is never left out",
    ),
    (
        "        if self._now >= busy_until:\n            return self._leave_out(late)\n",
        "",
        "a member that never comes is never left out",
    ),
    (
        "        return replace(decision, left_out=names)\n",
        "        return decision\n",
        "who is left out is not ended, nor replaced",
    ),
    (
        "rest = [w for w in self._active if w.status.worker not in names]",
        "rest = list(self._active)",
        "who is to be left out is taken along",
    ),
    (
        "workers = [w for w in workers + self._outgoing if w.silent_since is None]",
        "workers = [w for w in workers if w.silent_since is None]",
        "members that a planned change drops do not hand over what only they hold",
    ),
    (
        "workers = [w for w in workers + self._outgoing if w.silent_since is None]",
        "workers = [*workers, *self._outgoing]",
        "members out of contact, who cannot hear of it, are in the next group",
    ),
    (
        "        if not any(w.status.took_part for w in workers):\n"
        "            workers = sorted(workers + self._newcomers, key=_seniority)\n",
        "",
        "members without the state train without the newcomer that holds it",
    ),
    (
        "if not workers or len(workers) + len(finished) < self._policy.min_workers:",
        "if not workers or len(workers) + len(finished) < self._policy.min_workers - 1:",
        "a group of one less than the minimum trains",
    ),
    (
        "if not workers or len(workers) + len(finished) < self._policy.min_workers:",
        "if not workers or len(workers) + len(finished) <= self._policy.min_workers:",
        "a group of just the minimum does not train",
    ),
    (
        "if not self._newcomers or room <= 0:",
        "if not self._newcomers or room < 0:",
        "a full group is changed for newcomers without room for them",
    ),
    (
        "workers = self._active + sorted(self._admissible, key=_seniority)[:room]",
        "workers = self._active + sorted(self._admissible, key=_seniority)",
        "newcomers are admitted beyond the maximum",
    ),
    (
        "        self._admissible = [w for w in self._newcomers"
        " if now >= self._held_back_until(w)]\n",
        "        self._admissible = self._newcomers\n",
        "newcomers like those that have failed are not held back",
    ),
    (
        "    if view.slow:\n",
        "    if False:\n",
        "members in a slow step get no more time to come to its end than others",
    ),
    (
        "            if not self._newcomers:\n                return"
        " Wait(reason=WaitReason.STEADY)\n",
        "",
        "the last holders leave although nobody is there to take over",
    ),
    (
        "            staying = [*staying, *(w for w in self._active if w.leaving)][-1:]\n",
        "",
        "no member that leaves stays to hand over the state",
    ),
    (
        "enough_left = len(workers) + len(self._finished) >= self._policy.min_workers",
        "enough_left = len(workers) + len(self._finished) > self._policy.min_workers",
        "the group is dissolved although just enough members stay",
    ),
    (
        "return max(self._view.formed_at, w.in_contact_since) + self._policy.join_timeout_s",
        "return self._view.formed_at + self._policy.join_timeout_s",
        "a member that comes back is left out before it can have heard of its group",
    ),
    (
        "sorted(view.leaving.worker_ids - current.worker_ids)",
        "sorted(current.worker_ids - view.leaving.worker_ids)",
        "newcomers are taken for members that are dropped",
    ),
    (
        "patience_s = return_patience_s(self._policy) if w.expected else "
        "self._policy.agent_grace_s",
        "patience_s = self._policy.agent_grace_s",
        "a new leader is no more patient with nodes than an old one",
    ),
    (
        "        if len(self._silent) == len(self._active):\n"
        "            return Wait(reason=WaitReason.OUT_OF_CONTACT)\n",
        "",
        "a leader that is cut off from all members dissolves their group",
    ),
)

_VIEW = (
    (
        "    return s.phase is WorkerPhase.READY and s.heard < number\n",
        "    return False\n",
        "a worker that may have got the state since it reported is not waited for",
    ),
    (
        "        and o.generation >= s.generation\n",
        "",
        "who left the group earlier counts as an heir",
    ),
    (
        "        and o.committed >= s.committed\n",
        "",
        "who is behind counts as an heir",
    ),
    (
        "return ready > 0 and ready + finished >= policy.min_workers",
        "return ready > 0 and ready >= policy.min_workers",
        "members that have finished do not count towards the minimum",
    ),
    (
        "return max(policy.agent_grace_s, policy.join_timeout_s)",
        "return 0.0",
        "a new leader waits for nobody",
    ),
)

_PLANNED = (
    (
        "return replace(planned, provisional=False, leave_after=max(first, furthest))",
        "return replace(planned, provisional=False, leave_after=first)",
        "the first estimate of the boundary is settled, however late the news",
    ),
    (
        "furthest = max((s.committed + 1 for s in active), default=first)",
        "furthest = max((s.committed for s in active), default=first)",
        "a member can be one step past the settled boundary",
    ),
    (
        "furthest = max((s.committed + 1 for s in active), default=first)",
        "furthest = min((s.committed + 1 for s in active), default=first)",
        "the boundary is that of the slowest member",
    ),
    (
        "    if any(s.heard < planned.number for s in active):\n        return None\n",
        "",
        "a change is settled before all have heard of it",
    ),
    (
        "if any(s.heard < planned.number for s in active):",
        "if any(s.heard <= planned.number for s in active):",
        "a change is never settled",
    ),
    (
        "leave_after=min(first, *left))",
        "leave_after=max(first, *left))",
        "members wait for a boundary that one has not waited for",
    ),
    (
        "    return not planned.provisional and all(\n",
        "    return not planned.provisional and any(\n",
        "a planned group counts as in place with its first member",
    ),
)

_MACHINE = (
    (
        "        self._since = Clocks(assembling=None if planned else now, is_slow=is_slow)\n",
        "        self._since = Clocks(assembling=now, is_slow=is_slow)\n",
        "the patience with arrivals begins before a planned change takes effect",
    ),
    (
        "        self._leaving = self._current if planned else None\n",
        "        self._leaving = None\n",
        "nobody knows which group a planned change ends",
    ),
    (
        "        self._formed_at, self._adopted_at = now, None\n",
        "        self._formed_at = now\n",
        "a leader counts as new in office for ever",
    ),
    (
        "        check_succession(self._current, generation)\n"
        "        self._lineage.exists(generation)\n",
        "        check_succession(self._current, generation)\n",
        "a new group does not count as one that may train",
    ),
    (
        "        if self._persisting is not None:\n"
        "            return []  # decided again when it is known to exist\n",
        "",
        "a second generation is decided before the first is written",
    ),
    (
        "        for generation in (*may_train, last):\n",
        "        for generation in (last,):\n",
        "a new leader forgets earlier groups that may train",
    ),
    (
        "self._leaving, newest = may_train[-1], WorkerPhase.READY",
        "self._leaving, newest = may_train[-1], WorkerPhase.TRAINING",
        "a new leader takes a planned group for one that trains",
    ),
    (
        "        self._nodes.presumed(last, newest, now)\n",
        "",
        "a new leader expects no node",
    ),
    (
        "        self._number = last.number\n",
        "",
        "a new leader counts generations from 1 again",
    ),
    (
        "        if self._policy.agent_grace_s > 0.0 and"
        " self._nodes.is_needed(event.node, groups):\n",
        "        if False:\n",
        "a node is lost as soon as its stream ends",
    ),
    (
        "        self._lineage.node_gone(event.node)\n",
        "",
        "a group whose node is gone for good may train for ever",
    ),
    (
        "            if not self._lineage.allows(chosen):\n",
        "            if False:\n",
        "a group is formed beside another that may train",
    ),
    (
        "                effects += map(self._replacement,"
        " sorted(decision.left_out | in_the_way))\n",
        "",
        "newcomers stuck in a group that others may not follow are never ended",
    ),
    (
        "            provisional=decision.planned,\n",
        "",
        "planned changes are never provisional",
    ),
    (
        "            purpose=Purpose.TRAIN if self._stop is None else Purpose.SAVE_AND_LEAVE,\n",
        "            purpose=Purpose.TRAIN,\n",
        "the group of a job that stops goes on training",
    ),
    (
        "            save_first=self._checkpoints.abandoned,\n",
        "",
        "no save follows one that was given up",
    ),
    (
        "        self._number += 1\n",
        "        self._number += 0 if self._number == 3 else 1\n",
        "a number is used twice",
    ),
    (
        "        instants = (until, self._stop.deadline if self._stop else None)\n",
        "        instants = (until,)\n",
        "the end of a stop's grace is noticed by chance",
    ),
    (
        "        self._progress.regroup()\n",
        "",
        "a new group is taken for stalled because the one before was",
    ),
    (
        "        self._stop, self._checkpoints.told = stop, False\n",
        "        self._stop = stop\n",
        "members that save on leaving hear that the save was given up, and leave without it",
    ),
    (
        "        self._nodes.left(event.node)\n",
        "",
        "a node that is to leave stays",
    ),
    (
        "        if self._stop is None and self._nodes.all_leave():\n",
        "        if False:\n",
        "nobody saves when every node leaves",
    ),
    (
        "        if in_place(current, workers):\n            self._leaving = None\n",
        "        if in_place(current, workers):\n",
        "the group before a planned change is taken for training for ever",
    ),
)

_STOPPING = (
    (
        "    in_contact = all(w.silent_since is None for w in members.values())\n",
        "    in_contact = True\n",
        "members out of contact are to save, and cannot hear of it",
    ),
    (
        "        return _leave(current, active + others, is_whole=False)  #"
        " these have it to save\n",
        "        return _leave(current, active, is_whole=False)\n",
        "holders outside the group do not save",
    ),
    (
        "replace(policy, min_workers=1), now)\n    if isinstance(decision, Form)",
        "policy, now)\n    if isinstance(decision, Form)",
        "survivors below the minimum do not save",
    ),
    (
        "    if ready and (all_are_here or now >= patient_until):\n",
        "    if ready:\n",
        "the first survivor that is ready saves alone",
    ),
    (
        "    if now < patient_until:\n",
        "    if False:\n",
        "a stop ends before holders that are on their way have come",
    ),
    (
        "        instants.append(max(since) + policy.agent_grace_s)\n",
        "        pass\n",
        "a stop does not wait for holders out of contact",
    ),
    (
        "        instants.append(view.adopted_at + return_patience_s(policy))\n",
        "        pass\n",
        "a leader that is new while the job stops does not wait for nodes to come",
    ),
    (
        "        current.purpose is Purpose.TRAIN\n        and is_whole\n",
        "        current.purpose is Purpose.TRAIN\n",
        "a group that has lost a member is to save at a step boundary",
    ),
    (
        "    return current.purpose is Purpose.TRAIN or view.adopted_at is not None\n",
        "    return current.purpose is Purpose.TRAIN\n",
        "members wait for a save whose reports were lost with a leader",
    ),
    (
        "    if current is not None and current.leave_after is not None and holders:\n"
        "        return Form(members=(), reason=ChangeReason.STOPPING)"
        "  # now, not at the next boundary\n",
        "",
        "holders are waited for that wait for a planned end",
    ),
)

_LINEAGE = (
    (
        "    return status.phase is WorkerPhase.READY\n",
        "    return False\n",
        "a member that is out of its group is taken for training in it",
    ),
    (
        "        return status.heard > generation.number\n",
        "        return True\n",
        "a member that has not come to a group yet is taken for past it",
    ),
    (
        "if w is not None and w.silent_since is None and _is_past(w.status, group.generation):",
        "if w is None or _is_past(w.status, group.generation):",
        "a group is taken for stopped because a member is not known",
    ),
    (
        "return not members or not any(g.workers.isdisjoint(members) for g in self._groups)",
        "return not members or not all(g.workers.isdisjoint(members) for g in self._groups)",
        "one member of one of the groups that may train is enough",
    ),
    (
        "        self._keep(lambda g: g.of_node.get(node, frozenset()).issubset(workers))\n",
        "        pass\n",
        "workers that a node has no more are not known to be gone",
    ),
)

_NODES = (
    (
        "            node.in_contact_since = now\n        seen =",
        "        seen =",
        "a node that comes back gets no time to hear of anything",
    ),
    (
        "node.silent_since is None:\n            node.silent_since = now\n",
        "node.silent_since is None:\n            node.silent_since = 0.0\n",
        "a node that falls silent is given up at once",
    ),
    (
        "        return dissolved and any(s.took_part for s in self.workers_of(name))\n",
        "        return False\n",
        "holders out of contact are forgotten while there is no group",
    ),
    (
        "            if member.worker in known:\n                continue\n",
        "",
        "what is presumed of a member replaces what is known",
    ),
    (
        "node.slots, node.silent_since = slots, None\n",
        "node.slots = slots\n",
        "a node that reports stays out of contact",
    ),
    (
        "        before = frozenset(node.workers)\n",
        "        before = frozenset(seen)\n",
        "saves wait for workers that are missing from a report",
    ),
)

_DEPARTURES = (
    (
        "return may_hold_state(s, current) and not has_heir(s, heirs)",
        "return False",
        "without a group a node goes with the state that only it holds",
    ),
    (
        "return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_heard",
        "return s.phase in _IN_GROUP or not has_heard",
        "a member of the next group may go",
    ),
    (
        "return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_heard",
        "return s.worker in current.worker_ids or not has_heard",
        "a member that is in an earlier group may go",
    ),
)

_CHECKPOINTS = (
    (
        "        if len(save.written) < count:\n",
        "        if len(save.written) < count - 1:\n",
        "a checkpoint is committed with a part missing",
    ),
    (
        "        key = (step, generation.number)\n",
        "        key = (step, 0)\n",
        "parts of saves by different groups make one checkpoint",
    ),
    (
        "return any(w == worker and i not in self.written for i, w in enumerate(self.writers))",
        "return worker in self.writers",
        "a save is given up although the lost member had written its part",
    ),
    (
        "        self.abandoned = self.abandoned or bool(given_up)\n",
        "",
        "it is forgotten that a save was given up",
    ),
)

_CLOCKS = (
    (
        "    return now if since is None else since\n",
        "    return now\n",
        "clocks begin anew at each look",
    ),
    (
        "        can_form = not members and enough(workers, policy)\n",
        "        can_form = bool(members) and enough(workers, policy)\n",
        "the clock of gathering runs while there is a group",
    ),
)

_NEWCOMERS = (
    (
        "        if is_counted or not hopeless:\n            return 0.0\n",
        "        return 0.0\n",
        "newcomers that fail in the same way from slot after slot are never refused",
    ),
    (
        "        self._failures[slot] += 1\n",
        "        self._failures[slot] = 1\n",
        "the delay before the next newcomer of a slot never grows",
    ),
)

_PROGRESS = (
    (
        "        self._in_step_s, self._under_way, self._first_step = in_step_s, committed, first_step\n",
        "        self._under_way, self._first_step = committed, first_step\n",
        "nobody notes how long the step under way has lasted",
    ),
    (
        "        if not self._first_step and self._under_way > self._compiles_in:\n",
        "        if True:\n",
        "steps in which a member compiles are taken for stalled",
    ),
    (
        "        return count if self.committed <= at_step else 0\n",
        "        return count\n",
        "a group that breaks now and then is given up although it makes progress",
    ),
    (
        "        if committed < self.committed:\n            self.committed = committed\n",
        "",
        "after a return to a checkpoint boundaries are planned by steps that are lost",
    ),
)

_AGENT = (
    (
        "slot=slot, pid=own.pid, compiling=own.compiling)",
        "slot=slot, pid=own.pid, compiling=None)",
        "a report makes the agent forget that the worker compiles",
    ),
    (
        "        slot = process.status.slot  # given here: a report sent"
        " before it must not undo it\n",
        "        slot = event.status.slot\n",
        "a report that was sent before the slot was given takes it back",
    ),
    (
        "process.adopted, slot = False, event.status.slot",
        "process.adopted = False",
        "a worker that is found loses its slot",
    ),
    (
        "        return self._catch_up(process)\n",
        "        return []\n",
        "a worker that is ready later than others never hears of their generation",
    ),
    (
        "        if process.status.heard >= newest.number:\n            return []\n",
        "        if process.status.heard > 0:\n            return []\n",
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
        "spares are ended because they ask for no group",
    ),
    (
        "            process.deadline = None\n        if self._settings.classic",
        "            pass\n        if self._settings.classic",
        "workers in a group are ended because they once had to ask for it",
    ),
    (
        "            yield from self._replace(process.status.worker, "
        "FailureKind.START_TIMEOUT, message, now)\n",
        "            yield from ()\n",
        "a script that never asks for a group is never ended",
    ),
    (
        "            for name in list(self._processes)\n",
        "            for name in list(self._processes)[1:]\n",
        "a node that is cut off for good does not end all of its workers",
    ),
    (
        "        if not self._processes:\n            return [fx.SetTimer(at=None), fx.ExitAgent",
        "        if True:\n            return [fx.SetTimer(at=None), fx.ExitAgent",
        "an agent exits before its workers are gone",
    ),
    (
        "return None if self._adopting() else tuple([p.status",
        "return tuple([p.status",
        "workers that were found are reported as starting",
    ),
    (
        "        if not self._adopting():\n            effects +=",
        "        if True:\n            effects +=",
        "others are started before it is known what found workers do",
    ),
    (
        "        self._spawned += 1\n            start =",
        "        start =",
        "names of workers come again",
    ),
    (
        "                return self._replace(event.status.worker,"
        " FailureKind.LEFT_OUT, message, now)\n",
        "                pass\n",
        "two workers have the same slot",
    ),
    (
        "        self._generation = event.generation\n        return [\n",
        "        return [\n",
        "an agent does not remember the newest generation",
    ),
    (
        "            self._kill_at = now + (self._settings.exit_grace_s if"
        " self._all_finished() else 0.0)\n",
        "            self._kill_at = now + 1000.0\n",
        "at the end of the job nobody ends scripts that hang",
    ),
    (
        "        process.ending = Failure(\n            worker=worker, kind=kind,",
        "        process.reported = Failure(\n            worker=worker, kind=kind,",
        "a worker that the agent ends counts as killed by somebody else",
    ),
)

_WORKER = (
    (
        "        if generation.number <= self._status.generation:\n            return None\n",
        "",
        "a member joins again the group that it has left",
    ),
    (
        "return leave_after is None or (not following.provisional and committed >= leave_after)",
        "return leave_after is None or not following.provisional",
        "a member leaves at the next boundary, not at the one that was settled",
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
        "        if self._in_group() and generation.leave_after is None:\n",
        "        if self._in_group():\n",
        "a planned change aborts the group at once",
    ),
    (
        "        if self._in_group() and generation.leave_after is None:\n",
        "        if self._status.phase is WorkerPhase.TRAINING and"
        " generation.leave_after is None:\n",
        "a member that is on its way into a group is not freed",
    ),
    (
        "            self._following = None\n        return self._become(\n",
        "            pass\n        return self._become(\n",
        "a member leaves the group that it has just joined",
    ),
    (
        'WorkerPhase.JOINING, generation=generation.number, broken=False, detail=""',
        "WorkerPhase.JOINING, generation=generation.number",
        "a member reports the break of the last group for the new one",
    ),
    (
        "return self._become(WorkerPhase.TRAINING, committed, took_part=True)",
        "return self._become(WorkerPhase.TRAINING, committed)",
        "a member does not say that it holds the state",
    ),
    (
        "        self._status = replace(self._status, took_part=False)\n",
        "",
        "a member whose state is half overwritten says that it holds it",
    ),
    (
        "        return self._following is not None and self._following.leave_after is None\n",
        "        return False\n",
        "a member does not see that it is to join another group instead",
    ),
    (
        "        self._committed = committed\n\n    def finished",
        "        pass\n\n    def finished",
        "acknowledgements do not tell the steps that were committed",
    ),
    (
        "return self._become(WorkerPhase.READY, committed, broken=True, detail=detail)",
        "return self._become(WorkerPhase.READY, committed, detail=detail)",
        "nobody hears that a group broke",
    ),
)

_MEMBERSHIP = (
    (
        "return self.number == known.number and known.provisional and not self.provisional",
        "return False",
        "the settled form of a planned change is refused",
    ),
)

_DATA_ORDER = (
    (
        "    stop = position.cursor + min(size, left)\n",
        "    stop = position.cursor + min(size, left - 1)\n",
        "the last sample of an epoch is never reached",
    ),
    (
        "    if left < (size if drop_last else 1):\n",
        "    if left < size:\n",
        "what is left of an epoch is dropped",
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

_RESTARTS = (
    (
        "            return failure.worker not in incident.cohort\n",
        "            return True\n",
        "members that fail of the same cause at once end the job",
    ),
    (
        "        if incident is not None and committed <= incident.committed:\n",
        "        if incident is not None and committed < incident.committed:\n",
        "a script that always fails at the same step is started again and again",
    ),
    (
        "    if failure.kind is FailureKind.SIGNAL or failure.kind is FailureKind.LEFT_OUT:\n",
        "    if failure.kind is FailureKind.SIGNAL:\n",
        "workers that are left out twice end the job",
    ),
    (
        "        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 32))\n",
        "        ceiling = self.base_s * 2.0 ** min(10 * failures, 320)\n",
        "the delay of a restart has no bound",
    ),
)

_RANKS = (
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
    (
        "key=lambda m: (m.worker not in holders, old_rank.get(m.worker, size), m.node, m.slot),",
        "key=lambda m: (m.worker in holders, old_rank.get(m.worker, size), m.node, m.slot),",
        "newcomers get the low ranks that are free",
    ),
)

CATALOGUE: tuple[Mutant, ...] = tuple(
    Mutant(file, *fault)
    for file, faults in (
        ("coordinator/formation.py", _FORMATION),
        ("coordinator/view.py", _VIEW),
        ("coordinator/planned.py", _PLANNED),
        ("coordinator/machine.py", _MACHINE),
        ("coordinator/stopping.py", _STOPPING),
        ("coordinator/lineage.py", _LINEAGE),
        ("coordinator/nodes.py", _NODES),
        ("coordinator/departures.py", _DEPARTURES),
        ("coordinator/checkpoints.py", _CHECKPOINTS),
        ("coordinator/clocks.py", _CLOCKS),
        ("coordinator/newcomers.py", _NEWCOMERS),
        ("coordinator/progress.py", _PROGRESS),
        ("agent/machine.py", _AGENT),
        ("worker/machine.py", _WORKER),
        ("membership.py", _MEMBERSHIP),
        ("recovery.py", RECOVERY),
        ("worker/participation.py", PARTICIPATION),
        ("data_order.py", _DATA_ORDER),
        ("restarts.py", _RESTARTS),
        ("ranks.py", _RANKS),
    )
    for fault in faults
)
