"""Faults to plant in a script's way through groups, and in the recovery of state there."""

from __future__ import annotations

RECOVERY = (
    (
        "    newest = max(declarations[rank].age for rank in intact)\n",
        "    newest = min(declarations[rank].age for rank in intact)\n",
        "the state of the least advanced member wins",
    ),
    (
        "        return self.committed_in, self.committed\n",
        "        return self.committed, self.committed_in\n",
        "the longer lineage wins, although a later group went on without it",
    ),
    (
        "        return self.committed_in, self.committed\n",
        "        return self.committed, 0\n",
        "members with equally many steps count as equal, even if the steps differ",
    ),
    (
        "    intact = [rank for rank, d in enumerate(declarations) if d.intact]\n    if",
        "    intact = [r for r, d in enumerate(declarations) if d.intact or not d.committed]\n    if",
        "a member that never took part counts as a holder of the initial state",
    ),
    (
        "    intact = [rank for rank, d in enumerate(declarations) if d.intact]\n    if",
        "    intact = [rank for rank, d in enumerate(declarations) if d.took_part]\n    if",
        "a torn state counts as whole",
    ),
    (
        "        mark = Mark.COMMIT if at_commit else Mark.BEGIN\n",
        "        mark = Mark.BEGIN\n",
        "a member at the end of a block receives a state that others changed below theirs",
    ),
    (
        "        mark = Mark.COMMIT if at_commit else Mark.BEGIN\n",
        "        mark = Mark.COMMIT if can_give_commit else Mark.BEGIN\n",
        "newcomers receive the commit mark instead of the begin mark",
    ),
    (
        "    in_block = receiver.took_part and receiver.in_block\n",
        "    in_block = receiver.took_part\n",
        "a member that is behind at a boundary counts as inside a block",
    ),
    (
        "    return in_block and receiver.committed < holder.committed and receiver",
        "    return in_block and receiver",
        "a member at its begin mark whose state differs receives the commit mark",
    ),
    (
        "receiver.committed < holder.committed",
        "receiver.age != holder.age",
        "a member leaves its block as committed with a state of fewer steps",
    ),
    (
        " and receiver.committed < holder.committed and receiver.loop == holder.state_loop\n",
        " and receiver.committed < holder.committed\n",
        "a member a loop behind takes a block of another loop for its own",
    ),
    (
        "    can_give_commit = [rank for rank in sources if declarations[rank].commit_digest]\n",
        "    can_give_commit = sources\n",
        "a member is asked for a commit mark that it does not have",
    ),
    (
        "        if declared.took_part and inside and rank not in (*in_blocks, *late):\n",
        "        if False:\n",
        "a member inside a call continues the call with another state",
    ),
    (
        "        return None\n    if any(_leaves_block",
        "        return 0\n    if any(_leaves_block",
        "newcomers are admitted while others are inside a call",
    ),
    (
        "        return 0  # it comes to the step's end now, and to what stands below it\n",
        "        return min(d.runs_done for d in holders)\n",
        "members do not repeat a call for one that comes to it from its block",
    ),
    (
        "    return min(d.runs_done for d in holders)\n",
        "    return max(d.runs_done for d in holders)\n",
        "members do not repeat a call that broke on another member",
    ),
    (
        "    return max((d.runs_done for d in _holders(declarations)), default=0)\n",
        "    return 0\n",
        "a member that is one call behind saves and leaves before that call",
    ),
    (
        "        return all(d.runs_done == 0 for d in holders) and _are_at_boundary(holders)\n",
        "        return True\n",
        "members repeat calls with newcomers that are past them",
    ),
    (
        "            begun=any(d.took_part and d.committed > 0 for d in declarations),\n",
        "            begun=False,\n",
        "a job whose state is lost starts again from nothing",
    ),
)

PARTICIPATION = (
    (
        "            if not self.unread or agree_so_far(declarations):\n",
        "            if True:\n",
        "state moves by digests of parts of it",
    ),
    (
        "        if plan.stranded:\n            yield AwaitSuccessor(timeout_s=_TOLD_S)\n",
        "        if plan.stranded:\n",
        "members close their group at once if one of them cannot go on",
    ),
    (
        "        whole = yield PutBack()\n",
        "        whole = (yield PutBack()) or True\n",
        "a block that could not be undone leaves a state that counts as whole",
    ),
    (
        "        whole = yield PutBack()\n",
        "        whole = True\n        yield from ()\n",
        "a lost block is not undone",
    ),
    (
        "        if self.intact and not whole:\n",
        "        if False:\n",
        "a member whose block could not be undone still counts as a holder",
    ),
    (
        "        if not counts:\n            self._last_block_discarded = True\n",
        "        if not counts:\n",
        "changes below a lost block are not undone",
    ),
    (
        "            yield KeepForRetry()\n",
        "            yield from ()\n",
        "no copy is kept to undo changes below a lost block",
    ),
    (
        "        counts = self.progress.committed > index and not self._at_begin\n",
        "        counts = False\n",
        "a step that others completed does not count for a member that lost it",
    ),
    (
        "        counts = self.progress.committed > index and not self._at_begin\n",
        "        counts = self.progress.committed > index\n",
        "a step counts with a state that already has the changes below the block",
    ),
    (
        "            ramps=self.ramps,\n",
        "            ramps=self.progress.ramps,\n",
        "a ramp starts again with every group",
    ),
    (
        "                    self.progress.ramps.get(str(number)),\n",
        "                    self.ramps.get(str(number)),\n",
        "a ramp follows from a group that has committed nothing",
    ),
    (
        "                self.intact, self._overwritten = False, True  # until all of it is here\n",
        "",
        "a state that is half overwritten counts as whole",
    ),
    (
        "        if restored is None and begun:\n",
        "        if False:\n",
        "members that never took part take a torn state for the initial one",
    ),
    (
        "        if restored is None and (self.took_part or overwritten):\n",
        "        if False:\n",
        "a torn first state is taken for the initial one",
    ),
    (
        "        self.holds_back = progress.loop > self.loop\n",
        "        self.holds_back = False\n",
        "a newcomer trains a later loop's state in its first loop",
    ),
    (
        "                held = self.intact and not self.holds_back\n",
        "                held = self.intact\n",
        "a member declares digests of another state than the one that it holds back",
    ),
    (
        "        yield TakePostponed()\n        self.holds_back = False\n",
        "        self.holds_back = False\n",
        "a state that was held back is forgotten",
    ),
    (
        "            elif not self.holds_back:\n"
        "                yield from self._set_up(self.seat)\n",
        "",
        "a new loop goes on with the learning rate of the previous loop",
    ),
    (
        "        self.runs_done, self._last_call = 0, None\n        self._calls_of_others = 0\n",
        "        self._calls_of_others = 0\n",
        "the count of calls is not reset by a commit",
    ),
    (
        "            self.runs_done, self._last_call = repeat_from, None\n",
        "            self.runs_done, self._last_call = 0, None\n",
        "a newcomer counts calls from its own first call",
    ),
    (
        "                    yield from self._repeat_call()\n",
        "",
        "members never repeat a call",
    ),
    (
        "                    if not behind:  # else the others are to leave from a later place\n"
        "                        yield",
        "                    if True:\n                        yield",
        "a member that is one call behind saves another state than the others",
    ),
    (
        "            yield SaveAndWait(progress=self.here)\n",
        "",
        "a job that stops saves nothing",
    ),
    (
        "                self.runs_done += 1\n",
        "",
        "calls are not counted",
    ),
    (
        "            if not settled:\n                return True\n",
        "",
        "members wait for ever for a change that is never settled",
    ),
    (
        "        return worker.must_leave(committed)\n",
        "        return False\n",
        "no member leaves a group at a boundary",
    ),
    (
        "            self._save_owed = seat.generation.save_first\n",
        "",
        "members do not repeat a save that was given up",
    ),
    (
        "        if progress.committed < self._saved_step:\n            self._saved_step = -1\n",
        "",
        "a step that is trained a second time is not saved again",
    ),
    (
        "        if self.took_part and progress.loop < self.loop:\n",
        "        if False:\n",
        "a script in a later loop trains the state of an earlier loop",
    ),
    (
        "        if self.progress.committed > 0 and not behind:",
        "        if self.progress.committed > 0:",
        "a member that is one call behind saves at another place than the others",
    ),
    (
        "                if not self._is_behind:  # else the others have these behind them\n"
        "                    yield",
        "                if True:\n                    yield",
        "a member whose script is behind the others' compares and saves at its own place",
    ),
    (
        "if not self._at_begin:  # until the script has come to the next boundary\n",
        "if False:\n",
        "newcomers join a member that is still at the end of its block",
    ),
)
