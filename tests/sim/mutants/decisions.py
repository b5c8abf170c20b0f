"""Faults to plant in the decisions about the group, and in what they look at."""

from __future__ import annotations

FORMATION = (
    (
        "            if w.status.worker in previous.worker_ids\n",
        "",
        "newcomers that wait in a planned group hide the loss of a member that it drops",
    ),
    (
        "        if most_steps(self._active) <= most_steps(here):\n            return hurried_until\n",
        "        return hurried_until\n",
        "a stop ends the only holder of the last step while that member evaluates",
    ),
    (
        "            for w in self._out_of_contact + left_behind + outgoing\n",
        "            for w in self._out_of_contact + left_behind\n",
        "a new leader does not wait for members that a planned change drops",
    ),
    (
        "-math.inf if view.adopted_at is None else view.adopted_at + return_patience_s(policy)",
        "-math.inf",
        "without a group a new leader does not wait for holders of the state",
    ),
    (
        "max([until, *(since + policy.agent_grace_s for since in away)])",
        "until",
        "without a group the leader does not wait for nodes out of contact",
    ),
    (
        "return s.phase is WorkerPhase.READY and (hands_over or not w.on_leaving_node)",
        "return s.phase is WorkerPhase.READY and not w.on_leaving_node",
        "workers do not hand over a state that only leaving nodes hold",
    ),
    (
        "    if nothing_left_to_do(finished, ready + returning):\n        return Complete()\n",
        "",
        "without a group the end of a finished job is repeated",
    ),
    (
        "    if returning:\n        return _await_return(view, policy, now, returning)\n",
        "",
        "a group is formed while members of the last one are on their way out of it",
    ),
    (
        "return Wait(reason=WaitReason.GATHERING, until=deadline)",
        "return Wait(reason=WaitReason.GATHERING)",
        "the leader does not decide again when the time to gather has run out",
    ),
    (
        "chosen = sorted(ready, key=_seniority)[: policy.max_workers]",
        "chosen = sorted(ready, key=_seniority)",
        "the first group is larger than the maximum",
    ),
    (
        "return (not s.has_state, -s.committed, worker.node, s.slot or 0)",
        "return (s.has_state, -s.committed, worker.node, s.slot or 0)",
        "newcomers come before holders of the state",
    ),
    (
        "            and w.out_of_contact_since is None\n            and not w.on_leaving_node\n",
        "            and w.out_of_contact_since is None\n",
        "workers of a node that leaves are admitted",
    ),
    (
        "            and w.out_of_contact_since is None\n            and not w.on_leaving_node\n",
        "            and not w.on_leaving_node\n",
        "workers out of contact are admitted",
    ),
    (
        "        if self._now < roll_call_until:\n",
        "        if False:\n",
        "a new leader leaves out members before they have had time to find it",
    ),
    (
        "        if self._now < (until := self._state_is_away_until()):\n",
        "        if (until := self._state_is_away_until()) < self._now:\n",
        "newcomers start the job again while the only holders are out of contact",
    ),
    (
        "self._lost = len(present) < self._current.world_size",
        "self._lost = len(present) < self._current.world_size - 1",
        "the loss of one member is overlooked",
    ),
    (
        "if lost or (self._broken and self._finished) or self._is_stranded():",
        "if self._lost or (self._broken and self._finished):",
        "members wait in a group for a member that has finished",
    ),
    (
        "        if self._out_of_contact:\n            return self._await_contact()\n",
        "",
        "members out of contact count as present",
    ),
    (
        "        if self._view.stalled:\n"
        "            return self._form(self._active, ChangeReason.STALLED)\n",
        "",
        "nobody notices a step that never ends",
    ),
    (
        "        if overdue:\n            return self._leave_out(overdue)\n",
        "",
        "a member that acknowledges nothing is never left out",
    ),
    (
        "        if self._now >= busy_until:\n            return self._leave_out(late)\n",
        "",
        "a member that never joins is never left out",
    ),
    (
        "        return replace(decision, left_out=names)\n",
        "        return decision\n",
        "a member that is left out is neither ended nor replaced",
    ),
    (
        "rest = [w for w in self._active if w.status.worker not in names]",
        "rest = list(self._active)",
        "a member that should be left out is in the next group",
    ),
    (
        "workers = [w for w in workers + self._outgoing if w.out_of_contact_since is None]",
        "workers = [w for w in workers if w.out_of_contact_since is None]",
        "members that a planned change drops do not hand over a state that only they hold",
    ),
    (
        "workers = [w for w in workers + self._outgoing if w.out_of_contact_since is None]",
        "workers = [*workers, *self._outgoing]",
        "members out of contact are in the next group, which they cannot hear of",
    ),
    (
        "            everyone = workers + self._newcomers + holders\n",
        "            everyone = workers\n",
        "members without the state train without the newcomer that holds it",
    ),
    (
        "        here = self._newcomers + self._leaving_holders + self._returned\n",
        "        here = self._newcomers + self._leaving_holders\n",
        "a holder that comes back while a group without the state is written is passed over",
    ),
    (
        "if not workers or len(workers) + len(self._done) < self._policy.min_workers:",
        "if not workers or len(workers) + len(self._done) < self._policy.min_workers - 1:",
        "a group with one member less than the minimum trains",
    ),
    (
        "if not workers or len(workers) + len(self._done) < self._policy.min_workers:",
        "if not workers or len(workers) + len(self._done) <= self._policy.min_workers:",
        "a group with exactly the minimum of members does not train",
    ),
    (
        "if not self._newcomers or room <= 0:",
        "if not self._newcomers or room < 0:",
        "a full group is changed for newcomers that do not fit in",
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
        "    if view.is_slow:\n",
        "    if False:\n",
        "members in a slow step get no extra time to complete it",
    ),
    (
        "            if not self._newcomers:\n                return"
        " Wait(reason=WaitReason.STEADY)\n",
        "",
        "the last holders leave although there is no newcomer to take over",
    ),
    (
        "            staying = [*staying, *(w for w in self._active if w.on_leaving_node)][-1:]\n",
        "",
        "no leaving member stays to hand over the state",
    ),
    (
        "enough_left = len(workers) + len(self._finished) >= self._policy.min_workers",
        "enough_left = len(workers) + len(self._finished) > self._policy.min_workers",
        "the group is dissolved although exactly enough members stay",
    ),
    (
        "return max(self._view.formed_at, w.in_contact_since) + self._policy.join_timeout_s",
        "return self._view.formed_at + self._policy.join_timeout_s",
        "a member that comes back is left out before it has had time to hear of its group",
    ),
    (
        "sorted(view.previous_group.worker_ids - current.worker_ids)",
        "sorted(current.worker_ids - view.previous_group.worker_ids)",
        "newcomers count as dropped members",
    ),
    (
        "patience_s = return_patience_s(self._policy) if w.expected else "
        "self._policy.agent_grace_s",
        "patience_s = self._policy.agent_grace_s",
        "a new leader waits no longer for nodes than an old one",
    ),
    (
        "        if len(self._out_of_contact) == len(self._active) and not answered:\n"
        "            return Wait(reason=WaitReason.OUT_OF_CONTACT)\n",
        "",
        "a leader that is cut off from all members dissolves their group",
    ),
    (
        "        if len(self._out_of_contact) == len(self._active) and not answered:\n",
        "        if len(self._out_of_contact) == len(self._active):\n",
        "members out of contact are waited for without end although others have finished",
    ),
)

VIEW = (
    (
        "    return s.acknowledged < current.number or s.worker in current.worker_ids\n",
        "    return False\n",
        "the leader does not wait for a worker that may have got the state since its report",
    ),
    (
        "        and o.generation >= s.generation\n",
        "",
        "a worker that left the group earlier counts as an heir",
    ),
    (
        "        and o.committed >= s.committed\n",
        "",
        "a worker that is behind counts as an heir",
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

PLANNED = (
    (
        "return replace(planned, provisional=False, leave_after=max(first, furthest))",
        "return replace(planned, provisional=False, leave_after=first)",
        "the first estimate of the boundary is settled, even if the news comes late",
    ),
    (
        "furthest = max((s.committed + 1 for s in active), default=first)",
        "furthest = max((s.committed for s in active), default=first)",
        "a member can be one step past the settled boundary",
    ),
    (
        "furthest = max((s.committed + 1 for s in active), default=first)",
        "furthest = min((s.committed + 1 for s in active), default=first)",
        "the settled boundary is that of the slowest member",
    ),
    (
        "    if any(s.acknowledged < planned.number for s in active):\n        return None\n",
        "",
        "a change is settled before all have heard of it",
    ),
    (
        "if any(s.acknowledged < planned.number for s in active):",
        "if any(s.acknowledged <= planned.number for s in active):",
        "a change is never settled",
    ),
    (
        "provisional=False, leave_after=None)",
        "provisional=False, leave_after=first)",
        "members wait for a boundary before which one of them has left",
    ),
    (
        "    return not planned.provisional and all(\n",
        "    return not planned.provisional and any(\n",
        "a planned group counts as complete with its first member",
    ),
    (
        "        and not planned.is_due(w.status.committed)\n",
        "        and planned.provisional\n",
        "a planned change takes place although its group broke before the settled boundary",
    ),
)

STOPPING = (
    (
        "(left_behind | members).items()",
        "members.items()",
        "a stop does not wait for a member that was left behind with the state",
    ),
    (
        "{name: replace(w, on_leaving_node=False) for",
        "{name: w for",
        "a node that is drained while the job stops leaves first",
    ),
    (
        "    in_contact = all(w.out_of_contact_since is None for w in members.values())\n",
        "    in_contact = True\n",
        "members out of contact are asked to save, which they cannot hear",
    ),
    (
        "        return _leave(current, active + others, is_whole=False)  #"
        " these have it to save\n",
        "        return _leave(current, active, is_whole=False)\n",
        "holders outside the group do not save",
    ),
    (
        "replace(policy, min_workers=1, join",
        "replace(policy, join",
        "survivors below the minimum do not save",
    ),
    (
        "if can_leave and view.formed_at < stop.give_up_at <= now and",
        "if can_leave and view.formed_at < stop.give_up_at <= now < 0 and",
        "a step that outlasts the grace of a stop is not given up",
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
        "a leader that is elected while the job stops does not wait for nodes to connect",
    ),
    (
        "        current.purpose is Purpose.TRAIN\n        and is_whole\n",
        "        current.purpose is Purpose.TRAIN\n",
        "a group that has lost a member is asked to save at a step boundary",
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
        "a stop waits for holders that wait for a planned end",
    ),
)
