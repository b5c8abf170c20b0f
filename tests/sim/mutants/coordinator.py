"""Faults to plant in the memory of the coordinator."""

from __future__ import annotations

MACHINE = (
    (
        "Clocks(assembling=now if moves else None, is_slow=is_slow)",
        "Clocks(assembling=now, is_slow=is_slow)",
        "the time limit for joining starts before a planned change takes effect",
    ),
    (
        "        self._previous_group = self._current if planned else None\n",
        "        self._previous_group = None\n",
        "the leader forgets which group a planned change ends",
    ),
    (
        "        self._formed_at, self._adopted_at = now, None\n",
        "        self._formed_at = now\n",
        "a leader counts as newly elected for ever",
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
        "self._previous_group, newest = may_train[-1], WorkerPhase.READY",
        "self._previous_group, newest = may_train[-1], WorkerPhase.TRAINING",
        "a new leader takes a planned group for one that already trains",
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
        " self._nodes.is_needed(event.node, groups, trained):\n",
        "        if False:\n",
        "a node counts as lost as soon as its stream ends",
    ),
    (
        "        self._lineage.node_gone(event.node)\n",
        "",
        "a group whose node is gone counts for ever as one that may train",
    ),
    (
        "            if not self._lineage.allows(chosen):\n",
        "            if False:\n",
        "a group is formed beside another that may train",
    ),
    (
        "                effects += self._replace(decision.left_out | blocking, now)\n",
        "",
        "newcomers stuck in a group that no other group may follow are never ended",
    ),
    (
        "        return workers if self._policy.restart_all else others\n",
        "        return workers\n",
        "workers that are being ended are taken into groups",
    ),
    (
        "            provisional=decision.planned or (self._freezing.queues and previous is not None),\n",
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
        "a generation's number is used twice",
    ),
    (
        "if now < give_up_at else None, self._stop.deadline]\n",
        "if now < give_up_at else None]\n",
        "the end of a stop's grace is noticed only by chance",
    ),
    (
        "        self._progress.regroup()\n",
        "",
        "a new group counts as stalled because the previous one was",
    ),
    (
        "        self._stop, self._checkpoints.gives_up_on_loss = stop, False\n",
        "        self._stop = stop\n",
        "members that save as the job stops hear that it was given up, and leave unsaved",
    ),
    (
        "        self._nodes.left(event.node)\n",
        "",
        "a node that is ordered to leave stays",
    ),
    (
        "        if self._stop is None and self._nodes.all_leave():\n",
        "        if False:\n",
        "nobody saves when every node leaves",
    ),
    (
        "            self._previous_group = None\n            self._newcomers.arrived(current, workers)\n",
        "            self._newcomers.arrived(current, workers)\n",
        "the group before a planned change counts as training for ever",
    ),
)

LINEAGE = (
    (
        "    return status.phase is WorkerPhase.READY\n",
        "    return False\n",
        "a member that has left its group counts as training in it",
    ),
    (
        "        return status.acknowledged > generation.number\n",
        "        return True\n",
        "a member that has not joined a group yet counts as past it",
    ),
    (
        "            w is not None\n"
        "            and w.out_of_contact_since is None\n"
        "            and _is_past(w.status, group.generation)\n",
        "            w is None or _is_past(w.status, group.generation)\n",
        "a group counts as stopped because one of its members is unknown",
    ),
    (
        "return not members or not any(g.workers.isdisjoint(members) for g in self._groups)",
        "return not members or not all(g.workers.isdisjoint(members) for g in self._groups)",
        "a new group needs a member of only one of the groups that may train",
    ),
    (
        "        self._keep(lambda g: g.of_node.get(node, frozenset()).issubset(workers))\n",
        "        pass\n",
        "workers that a node no longer has do not count as gone",
    ),
)

NODES = (
    (
        "            node.in_contact_since = now\n        seen =",
        "        seen =",
        "a node that comes back gets no time to hear the news",
    ),
    (
        "if node is not None:\n            node.out_of_contact_since = now\n",
        "if node is not None:\n            node.out_of_contact_since = 0.0\n",
        "a node that falls silent is given up at once",
    ),
    (
        "        return dissolved and any(s.has_state for s in self.workers_of(name))\n",
        "        return False\n",
        "holders out of contact are forgotten while there is no group",
    ),
    (
        "            if member.worker in known:\n                continue\n",
        "",
        "what a new leader assumes of a member replaces what it knows",
    ),
    (
        "node.slots, node.out_of_contact_since = slots, None\n",
        "node.slots = slots\n",
        "a node that reports stays out of contact",
    ),
    (
        "        before = frozenset(node.workers)\n",
        "        before = frozenset(seen)\n",
        "saves wait for workers that are missing from a report",
    ),
)

DEPARTURES = (
    (
        "return may_hold_state(s, current) and not has_successor(s, successors)",
        "return False",
        "without a group a node leaves with a state that only it holds",
    ),
    (
        "return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_acknowledged",
        "return s.phase in _IN_GROUP or not has_acknowledged",
        "a node may leave with a member of the next group",
    ),
    (
        "return s.worker in current.worker_ids or s.phase in _IN_GROUP or not has_acknowledged",
        "return s.worker in current.worker_ids or not has_acknowledged",
        "a node may leave with a member that is in an earlier group",
    ),
)

CHECKPOINTS = (
    (
        "return 0 < holder.trained_in < generation.number and holder.committed <= step",
        "return False",
        "survivors with fewer steps go on in place of the newest checkpoint",
    ),
    (
        "return 0 < holder.trained_in < generation.number and holder.committed <= step",
        "return holder.committed <= step",
        "members that went back on purpose are ended for a checkpoint that is given up",
    ),
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
        "        self.abandoned = self.abandoned or bool(waiting)\n",
        "",
        "the leader forgets that a save was given up",
    ),
    (
        "        given_up = waiting if self.gives_up_on_loss else []\n",
        "        given_up = waiting\n",
        "a save is given up while the job stops, although members do not hear of it",
    ),
)

CLOCKS = (
    (
        "    return now if since is None else since\n",
        "    return now\n",
        "clocks start again at each look",
    ),
    (
        "        can_form = not members and enough(workers, policy)\n",
        "        can_form = bool(members) and enough(workers, policy)\n",
        "the clock of gathering runs while there is a group",
    ),
)

NEWCOMERS = (
    (
        "        if is_counted or not hopeless:\n            return 0.0\n",
        "        return 0.0\n",
        "newcomers that fail in the same way in slot after slot are never refused",
    ),
    (
        "        self._failures[slot] += 1\n",
        "        self._failures[slot] = 1\n",
        "the delay before the next newcomer of a slot never grows",
    ),
)

PROGRESS = (
    (
        "        self._in_step_s, self._under_way, self._first_step = in_step_s, committed, first_step\n",
        "        self._under_way, self._first_step = committed, first_step\n",
        "the leader does not record how long the step under way has lasted",
    ),
    (
        "        if not self._first_step and self._under_way > self._compiles_in:\n",
        "        if True:\n",
        "steps in which a member compiles count as stalled",
    ),
    (
        "        return count if self.committed <= at_step else 0\n",
        "        return count\n",
        "a group that breaks now and then is given up although it makes progress",
    ),
    (
        "        self.committed = min(committed, self.committed)\n",
        "        pass\n",
        "after a return to a checkpoint, boundaries are planned from steps that are lost",
    ),
)
