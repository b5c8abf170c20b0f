"""Restores the tracked state of a block's start, at the cost of what a block really changes.

A block is given up if its group is lost before the block's last collective. What the script had
changed by then must be undone. Copying all tracked state at every block would cost as much as a
checkpoint, so the set of what to copy is learned:

- Small state (rates, schedulers, scalers, `session.state`, generators) is copied at every block.
- Large state (tensors of modules, of optimizers, large objects) is compared with what it was, in
  the blocks that `_schedule` selects: with a copy if there is little of it, else by its digest,
  which takes a fraction of the time and no memory. What changed before the last collective belongs
  to the *block set*, which every block copies from then on. What changed between the end of a block
  and the start of the next one belongs to the *gap set*, which every commit copies. A worker that
  joins takes over both sets with the state.
- In other blocks, version counters, optimizers' hooks and objects' attributes show changes outside
  of the sets. Of many tensors, each block looks at some in turn: what writes to one mostly writes
  to all. Such a change extends the set from the next block on. If the group is lost in the
  very block that first changes something that was not copied, the state cannot be put back, and
  `put_back` returns False.
- Below a block that does not count, memory is copied when it is about to be written to
  (`copy_on_write`), beside small state, the gap set and other objects.

Version counters alone are not enough: fused optimizers and writes through `.data` do not move them.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch

from elastic.worker.state.cells import (
    Cell,
    Copy,
    DefaultGenerators,
    Digest,
    ModuleTensors,
    OptimizerState,
    RequiresGrad,
    Turn,
    cells_of,
    is_large,
    is_written_by_operations,
)
from elastic.worker.state.copied_tensors import put_content
from elastic.worker.state.copy_on_write import CopyOnWrite, NotedWrites
from elastic.worker.state.job_state import JobState
from elastic.worker.state.signs import is_own, present
from elastic.worker.state.tree import UNCHANGING, copy_tree, trees_equal

_RELEARN_EVERY = 512  # blocks
_SIZES_EVERY = 16  # blocks: small state, such as `session.state`, may grow to hold weights
_LEARNT_AT_ONCE = 3  # blocks
# Later, learning takes at most one part of the time in this many. Members do not always choose the
# same blocks, and all wait for one that learns.
_LEARNING_FACTOR = 300.0
_QUICKLY_LEARNT_BYTES = 2**24  # up to which learning copies, so that first blocks can be undone
_NEW_CALLS = 2  # from a place: the later one of them shows what calls from there write to
_RARE_CALL_FACTOR = 50.0  # calls are rare if this many copies of everything fit between two
_COSTLY_BYTES = 2**20
_SLOW_S = 0.001
_SLOW_PART = 0.01  # of a block, which makes two copies
_NO_COPIES: Mapping[int, Copy] = {}
_NO_DIGESTS: Mapping[int, Digest] = {}


class Undo:
    """Copies of the tracked state, the block set and the gap set.

    wait_for_device: returns when what was queued so far is done.
    on_costly: called with names, bytes and copying time in s of large state copied at every block.
    on_slow: called with names of small state and the time in s that a copy of it takes, if that is
        a noticeable part of a block.
    before_write: called before code below a block that does not count first writes to memory that
        was not known to change there.
    """

    def __init__(
        self,
        state: JobState,
        *,
        device: torch.device,
        wait_for_device: Callable[[], None],
        on_costly: Callable[[list[str], int, float], None],
        on_slow: Callable[[list[str], float], None],
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = state
        self._before_write = before_write
        self._device = device
        self._wait_for_device = wait_for_device
        self._on_costly, self._on_slow = on_costly, on_slow
        self._version = -1
        self._large: list[Cell] = []
        self._small: list[Cell] = []
        self._tensors: list[tuple[int, ModuleTensors]] = []
        """Of the small cells, with their indices: those whose copies have memory to use again."""
        self._copy_small: list[tuple[int, Callable[[], Copy]]] = []
        """What copies the others, with their indices, and what copies them for a commit."""
        self._copy_for_commit: list[tuple[int, Callable[[], Copy]]] = []
        self._holders: dict[int, int] = {}
        """The large cell that has each tensor of a module, by the tensor's id."""
        self._block_set: set[int] = set()
        self._gap_set: set[int] = set()
        self._blocks = 0
        self._large_bytes = 0
        self._attributes: list[dict[str, Any]] = []
        """Those of each module of the script's own classes. A forward pass that registers a buffer
        may note there that it has."""
        self._attributes_at_begin: list[dict[str, Any]] = []
        self._learning = False
        """Whether this block learns."""
        self._learns = True
        """Whether the next one does."""
        self._learning_s = 0.0
        """Seconds that the newest block of those that learn has spent on it."""
        self._learnt_at_s = 0.0
        """When it ended, by time.perf_counter()."""
        self._handed_on: Learnt | None = None
        self._begin = _Mark()
        self._commit: _Mark | None = None
        self._retry: _Mark | None = None
        self._writes = CopyOnWrite(before_write)
        """Those of the code below a block that does not count."""
        self._retry_gradients: Copy = []
        self._call: _Mark | None = None
        self._before_call: list[tuple[_Mark, list[bool]]] = []
        self._call_late = 0  # buffers that were registered before the call
        self._call_attributes: list[dict[str, Any]] = []
        self._call_undo: Undo | None = None
        """The copies of a call, if more is tracked than at the block's start. Marks here stay."""
        self._calls: dict[str, _Calls] = {}
        """By place of the script."""
        self._gradients: Copy = []
        self._collectives_seen = 0  # when the newest reduction was complete
        self._missed = False
        self._reported_names: list[str] = []
        self._cost_unreported = False
        self._slow_names: set[str] = set()
        self._paced_from = (0, 0.0)  # a number of blocks, and when it was reached

    @property
    def holds_commit(self) -> bool:
        """True if the state right after the last commit is available.

        May be asked at any place of the script. False if something has changed whose copy is
        missing, because it changes for the first time and `begin` has not seen that yet.
        """
        commit = self._commit
        return (
            commit is not None
            and self._version == self._state.version
            and self._changed_since(commit) <= commit.large.keys()
        )

    def unwritten(self) -> list[torch.Tensor]:
        """Return the large tensors of modules and optimizers that neither the code between two
        blocks writes to, as far as known, nor a block before its last collective. None of them
        while that is still being learnt."""
        if self._version != self._state.version or self._blocks < _LEARNT_AT_ONCE:
            return []
        written = self._block_set | self._gap_set
        cells = [cell for i, cell in enumerate(self._large) if i not in written]
        return [t for cell in cells if _has_digest(cell) for t in present(cell.tensors())]

    def untouched(self) -> list[torch.Tensor]:
        """Return those of the `unwritten` tensors of modules that no optimizer trains: its steps
        show in no version if they are fused."""
        unwritten = {id(tensor) for tensor in self.unwritten()}
        optimizers = [cell for cell in self._large if isinstance(cell, OptimizerState)]
        trained = {id(p) for cell in optimizers for p in cell.trained()}
        modules = [cell for cell in self._large if isinstance(cell, ModuleTensors)]
        return [
            t for cell in modules for t in present(cell.tensors()) if id(t) in unwritten - trained
        ]

    # ---- in the course of a block

    def begin(self) -> None:
        """A step is handed out: copy what its block may change."""
        began_s = time.perf_counter()
        if self._version != self._state.version:
            self._look_up_parameters()
            self._enumerate(is_new=True)
        signs = self._signs(self._blocks)
        self._learning = self._learns
        wanted, digests = self._block_set, _NO_DIGESTS
        if self._learning:
            compared = self._compared_by_digest(self._block_set)
            wanted = self._all - compared
            since_commit = self._commit.digests.keys() if self._commit is not None else set()
            digests = self._digests(compared | since_commit)
        if self._commit is not None:
            self._note_gap(self._commit, signs, digests)
        if self._cost_unreported and not self._learning and wanted <= self._begin.large.keys():
            self._begin = self._tell_cost(signs)
        else:
            self._begin = self._copy(wanted, reuse=self._begin, signs=signs)
            self._begin.digests = digests
        self._begin.turn = self._blocks
        self._gradients = self._state.gradients.begin()
        self._missed = False
        self._state.late.clear()
        self._state.buffers.late.clear()
        self._attributes_at_begin = list(map(dict.copy, self._attributes))
        if self._learning:
            self._learning_s += time.perf_counter() - began_s

    def before_backward(self) -> None:
        """The block's first backward pass comes."""
        if self._state.gradients.before_backward():
            self._missed = True

    def reduced(self, collectives: int) -> None:
        """A reduction is complete: what has changed so far changed before a collective.
        collectives: the group's count now."""
        self._collectives_seen = collectives
        self._note_block()

    def collectives_since_reduction(self, collectives: int) -> bool:
        """Whether the block has begun collectives after its reductions, by the group's count."""
        return collectives != self._collectives_seen

    def end(self, *, collectives_since_reduction: bool) -> None:
        """The block has ended and its step counts.

        Raises ConfigurationError for a state that could not be sent to other members. Checked now
        and then, because at the first loss of a group it would be too late.
        """
        if collectives_since_reduction:
            self._note_block()  # changes since the reductions may precede these
        self._blocks += 1
        self._state.buffers.made.clear()
        if self._blocks % _SIZES_EVERY == 0:
            self._look_up_parameters()
            if any(map(is_large, self._small)):
                self._blocks = 0  # learn, since some state has grown
        if self._blocks % _RELEARN_EVERY == 0:
            self._enumerate(is_new=self._version != self._state.version)
        if self._learning:
            self._learnt_at_s = time.perf_counter()
        self._learns = self._schedule()
        self._mark_commit()
        if self._is_scheduled():
            self._state.capture()
            self._tell_slow()

    def received(self, *, at_commit: bool) -> None:
        """Another member's state, or a checkpoint, is in place. at_commit: it is a commit mark."""
        self._commit = self._call = self._call_undo = None
        if at_commit:
            self._mark_commit()

    # ---- what has been learnt, between members

    def learnt(self) -> Learnt | None:
        """Return what is known for a worker that joins; None if this one still learns itself."""
        if self._version != self._state.version or self._blocks < _LEARNT_AT_ONCE:
            return None
        names = [cell.name for cell in self._large]
        return Learnt(
            blocks=self._blocks,
            learning_s=self._learning_s,
            cells=names,
            block_set=[names[index] for index in sorted(self._block_set)],
            gap_set=[names[index] for index in sorted(self._gap_set)],
        )

    def take_over(self, learnt: Learnt | None) -> None:
        """Take over what another member knows, so that the first blocks of a worker that joins need
        not copy everything while all wait for it. This applies if it tracks the same objects, and
        has had no block yet."""
        if self._blocks == 0 and self._commit is None:
            self._handed_on, self._version = learnt, -1

    # ---- when a block is given up

    def put_back(self) -> bool:
        """Undo what the block has changed; return whether that was possible."""
        self._remove_late(self._attributes_at_begin)
        changed = self._changed_since(self._begin)
        self._restore(self._begin)
        self._state.gradients.put_back(self._gradients)
        self._state.put_back_late()
        self._renew_commit_signs()
        return not self._missed and changed <= self._begin.large.keys()

    def keep_for_retry(self) -> None:
        """Prepare to undo what the script does below a block that does not count.

        Parameters and optimizers' states are copied when that code writes to them; what it is known
        to change, and any other object, now.
        """
        self._writes.end()
        self._writes = CopyOnWrite(self._before_write)
        self._retry = self._copy(set())
        for index, cell in enumerate(self._large):
            if index not in self._gap_set and is_written_by_operations(cell):
                self._retry.large[index] = cell.copy(writes=self._writes)
            else:
                self._retry.large |= self._copy_large({index})
        self._retry_gradients = self._state.gradients.copy()
        self._attributes_at_begin = list(map(dict.copy, self._attributes))
        self._writes.begin()

    def put_back_for_retry(self) -> bool:
        """The same step is handed out again: undo what the script has done since `keep_for_retry`.
        Returns whether that was possible: compiled code, NumPy and threads write unseen."""
        if self._retry is None:
            return True
        self._writes.end()
        whole = not self._writes.has_missed()
        self._remove_late(self._attributes_at_begin)
        self._state.put_back_late()
        self._restore(self._retry)
        self._state.gradients.put_back(self._retry_gradients)
        self._retry, self._retry_gradients = None, []
        self._renew_commit_signs()
        return whole

    def _remove_late(self, at_begin: list[dict[str, Any]], since: int = 0) -> None:
        """Remove the buffers that were registered meanwhile, and put back numbers of their modules,
        such as `self.is_ready = True`."""
        modules = self._state.buffers.remove_late(since)
        changed = {id(vars(module)) for module in modules}
        for now, before in zip(self._attributes, at_begin, strict=True):
            if id(now) in changed:
                for key in [k for k in now if k not in before]:
                    if type(now[key]) in UNCHANGING:
                        del now[key]
                now.update((k, v) for k, v in before.items() if type(v) in UNCHANGING)

    # ---- calls outside of blocks

    def begin_call(self, place: str) -> None:
        """Copy what a call of all members may change: it is made again if the group is lost in it.

        Copies everything at the first two calls from a place of the script, and if calls are so
        rare that it costs little. Otherwise copies what earlier calls from that place have written.
        """
        self._call, self._call_undo = None, None
        self._before_call = self._still_marked()
        if self._version != self._state.version:
            self._call_undo = Undo(
                self._state,
                device=self._device,
                wait_for_device=self._wait_for_device,
                on_costly=self._on_costly,
                on_slow=self._on_slow,
            )
            self._call_undo._enumerate(is_new=True)
            self._call_undo.begin_call(place)
            return
        self._call_late = len(self._state.buffers.late)
        self._call_attributes = list(map(dict.copy, self._attributes))
        known = self._calls.setdefault(place, _Calls())
        began_s = time.perf_counter()
        is_rare = began_s - known.at_s >= _RARE_CALL_FACTOR * known.copy_s
        is_new = known.count < _NEW_CALLS
        wanted = self._all if is_rare or is_new else known.changes
        self._call = self._copy(wanted, signs=self._signs(None))
        known.count += 1
        known.at_s = time.perf_counter()
        if is_rare or is_new:
            known.copy_s = known.at_s - began_s

    @contextlib.contextmanager
    def watch_call(self, place: str) -> Iterator[None]:
        """Within, the call is made. Watches each operation of the second one from a place: it may
        write to weights through `.data`, and put them back at its end, which shows in no version.
        (Not of the first one, in which torch.compile is likely to be busy.)"""
        known = self._calls.get(place)
        if self._call is None or known is None or known.count != _NEW_CALLS:
            yield
            return
        writes = NotedWrites()
        writes.begin()
        try:
            yield
        finally:
            writes.end()
            known.changes |= {
                index
                for index, cell in enumerate(self._large)
                if not is_written_by_operations(cell) or writes.include(present(cell.tensors()))
            }

    def end_call(self, place: str) -> None:
        """Note what the call has changed. The copies stay: other members may have to repeat it."""
        if self._call is not None and place in self._calls:
            self._calls[place].changes |= self._changed_since(self._call)

    def put_back_call(self) -> bool:
        """The group was lost in the call: undo its changes; return whether that was possible."""
        if self._call_undo is not None:
            undone = self._call_undo.put_back_call()
            self._renew_signs(self._before_call)
            return undone
        call = self._call
        if call is None:
            return True
        self._remove_late(self._call_attributes, self._call_late)
        whole = self._changed_since(call) <= call.large.keys()
        self._restore(call)
        self._renew_signs(self._before_call)
        return whole

    @contextlib.contextmanager
    def as_of_call(self) -> Iterator[None]:
        """Within, the state is that of the last call's start, as far as it was copied: for a call
        that is made again only for members that have not completed it."""
        call = self._call
        before = self._still_marked()
        if self._call_undo is not None:
            try:
                with self._call_undo.as_of_call():
                    yield
            finally:
                self._renew_signs(before)
            return
        now = self._copy(self._all)
        late = self._state.buffers.late[self._call_late :]
        contents = [copy_tree(each.tensor) for each in late]
        if call is not None:
            self._restore(call)
        try:
            put_content([e.tensor for e in late], [e.content for e in late])
            yield
        finally:
            self._restore(now)
            put_content([e.tensor for e in late], contents)
            self._renew_signs(before)

    def forget_call(self) -> None:
        """Drop the call's copies: no member will have to make it again."""
        self._call = self._call_undo = None
        self._before_call = []

    def _still_marked(self) -> list[tuple[_Mark, list[bool]]]:
        """Return the commit and begin marks, and of which cells the state is still that of each:
        to put back what follows moves their signs, which `_renew_signs` then makes good."""
        marks = [m for m in (self._commit, self._begin) if m and len(m.signs) == len(self._large)]
        return [(m, list(map(operator.eq, self._signs(m.turn), m.signs))) for m in marks]

    def _renew_signs(self, marked: list[tuple[_Mark, list[bool]]]) -> None:
        for mark, still in marked:
            now = self._signs(mark.turn) if len(still) == len(self._large) else mark.signs
            mark.signs = [
                sign if same else before
                for sign, before, same in zip(now, mark.signs, still, strict=True)
            ]

    # ---- the commit mark

    @contextlib.contextmanager
    def as_of_commit(self) -> Iterator[None]:
        """Within, the state is the one right after the last commit; needs `holds_commit`."""
        commit = self._commit
        assert commit is not None, "there is no commit mark"
        if not self.changed_since_commit():
            yield
            return
        now = self._copy(set(commit.large))
        if self._retry is not None:  # this may be another thread than that whose writes are seen
            for index in commit.large:
                if is_written_by_operations(cell := self._large[index]):
                    self._writes.keep(cell.tensors())
        self._restore(commit)
        try:
            yield
        finally:
            self._restore(now)

    def changed_since_commit(self) -> bool:
        """Whether the state is known to differ from the one right after the last commit."""
        commit = self._commit
        if commit is None:
            return True
        small = zip(self._small, commit.small, strict=True)
        return any(cell.differs(copy) for cell, copy in small) or any(
            self._large[index].differs(copy) for index, copy in commit.large.items()
        )

    # ---- learning

    def _is_scheduled(self) -> bool:
        """Whether the next block learns, unless that takes too long: the first ones, and then fewer
        and fewer."""
        count = self._blocks % _RELEARN_EVERY
        return count < _LEARNT_AT_ONCE or count & (count - 1) == 0

    def _schedule(self) -> bool:
        """Return whether the next block learns. To copy a GPU's gigabytes to the host may take as
        long as a hundred steps."""
        if not self._is_scheduled():
            return False
        if self._blocks >= _LEARNT_AT_ONCE and self._large_bytes > _QUICKLY_LEARNT_BYTES:
            since_s = time.perf_counter() - self._learnt_at_s
            if since_s < _LEARNING_FACTOR * self._learning_s:
                return False
        self._learning_s = 0.0
        return True

    def _mark_commit(self) -> None:
        began_s = time.perf_counter()
        wanted, digests = self._gap_set, _NO_DIGESTS
        if self._learns:
            compared = self._compared_by_digest(self._gap_set)
            wanted, digests = self._all - compared, self._digests(compared)
        signs = self._signs(self._blocks)
        self._commit = self._copy(wanted, reuse=self._commit, signs=signs, for_commit=True)
        self._commit.digests, self._commit.turn = digests, self._blocks
        if self._learns:
            self._learning_s += time.perf_counter() - began_s

    def _note_gap(self, commit: _Mark, signs: list[object], digests: Mapping[int, Digest]) -> None:
        """Add what has changed since the commit to the gap set: the next commits copy it."""
        if len(commit.large) + len(commit.digests) == len(self._large):  # compare the content
            changed = {i for i, copy in commit.large.items() if self._large[i].differs(copy)}
            changed |= _differing_digests(commit.digests, digests)
        elif signs == commit.signs:
            return
        else:
            changed = self._differing(signs, commit.signs)
        self._gap_set |= changed
        if changed - commit.large.keys():
            self._commit = None  # this time, that mark cannot be given to others

    def _renew_commit_signs(self) -> None:
        """Renew the commit mark's signs, which putting back has moved. The content is that of the
        block's start: `begin` has found that it equals the commit's, or is copied there."""
        commit = self._commit
        if commit is not None and len(commit.signs) == len(self._large):
            commit.signs = self._signs(commit.turn)

    def _note_block(self) -> None:
        """Add what has changed since the block's start to the block set: the next ones copy it."""
        if not self._learning and not self._looks_changed():
            return
        began_s = time.perf_counter()
        changed = self._changed_since(self._begin)
        if self._learning:
            changed |= {i for i, c in self._begin.large.items() if self._large[i].differs(c)}
            self._learning_s += time.perf_counter() - began_s
        if changed - self._begin.large.keys():
            self._missed = True
        changed -= self._block_set
        if changed:
            self._block_set |= changed
            self._cost_unreported = True

    def _looks_changed(self) -> bool:
        """Look at large state outside of the block set, as every reduction does."""
        turn, signs = self._begin.turn, self._begin.signs
        for index, cell in enumerate(self._large):
            if index not in self._block_set and cell.sign(turn) != signs[index]:
                return True
        return False

    def _changed_since(self, earlier: _Mark) -> set[int]:
        """Return the cells that signs show to have changed, or digests where the mark has them."""
        now = self._signs(earlier.turn)
        changed = set() if now == earlier.signs else self._differing(now, earlier.signs)
        if not earlier.digests:
            return changed
        unseen = {i: d for i, d in earlier.digests.items() if i not in changed}
        return changed | _differing_digests(unseen, self._digests(unseen))

    def _differing(self, now: list[object], before: list[object]) -> set[int]:
        """Return the cells whose signs differ, and what an optimizer among them trains: a fused
        step moves no version."""
        changed = {index for index, sign in enumerate(now) if sign != before[index]}
        for index in tuple(changed):
            cell = self._large[index]
            if isinstance(cell, OptimizerState) and cell.shows_step(now[index], before[index]):
                holders = self._holders
                changed.update(holders[id(p)] for p in cell.trained() if id(p) in holders)
        return changed

    def _tell_cost(self, signs: list[object]) -> _Mark:
        """Copy the block set, into memory of an earlier copy, and report how long that takes."""
        self._wait_for_device()
        began_s = time.perf_counter()
        mark = self._copy(self._block_set, reuse=self._begin, signs=signs)
        self._wait_for_device()
        took_s = time.perf_counter() - began_s
        costly = [self._large[i] for i in sorted(self._block_set)]
        names = [cell.name for cell in costly]
        total = sum(cell.size_bytes() for cell in costly)
        self._cost_unreported = False
        if names != self._reported_names and total >= _COSTLY_BYTES:
            self._reported_names = names
            self._on_costly(names, total, took_s)
        return mark

    def _tell_slow(self) -> None:
        """Report small state that takes long to copy, such as many objects, or large arrays."""
        blocks, at_s = self._paced_from
        self._paced_from = self._blocks, time.perf_counter()
        if not 0 < blocks < self._blocks:
            return
        block_s = (self._paced_from[1] - at_s) / (self._blocks - blocks)
        least_s = max(_SLOW_S, _SLOW_PART * block_s)
        others = [cell for cell in self._small if cell.name not in self._slow_names]
        slow = {cell.name: took_s for cell in others if (took_s := _copy_s(cell)) > least_s}
        if slow:
            self._slow_names.update(slow)
            self._on_slow([*slow], sum(slow.values()))

    # ---- signs, copies and digests

    def _signs(self, turn: Turn) -> list[object]:
        return list(map(operator.methodcaller("sign", turn), self._large))

    def _look_up_parameters(self) -> None:
        """Raises ConfigurationError if modules have lost some, as by pruning."""
        for cell in self._small:
            if isinstance(cell, RequiresGrad):
                cell.look_up()

    @property
    def _all(self) -> set[int]:
        return set(range(len(self._large)))

    def _compared_by_digest(self, known: set[int]) -> set[int]:
        """Return the large cells that learning compares by digests. known: those copied anyway."""
        if self._large_bytes <= _QUICKLY_LEARNT_BYTES:
            return set()
        return {i for i, cell in enumerate(self._large) if _has_digest(cell)} - known

    def _digests(self, indices: Iterable[int]) -> dict[int, Digest]:
        cells = ((index, self._large[index]) for index in indices)
        return {index: cell.digest() for index, cell in cells if _has_digest(cell)}

    def _copy(
        self,
        wanted: set[int],
        *,
        reuse: _Mark | None = None,
        signs: list[object] | None = None,
        for_commit: bool = False,
    ) -> _Mark:
        small: list[Copy] = [None] * len(self._small)
        for index, copy in self._copy_for_commit if for_commit else self._copy_small:
            small[index] = copy()
        for index, cell in self._tensors:
            small[index] = cell.copy(reuse.small[index] if reuse and reuse.small else None)
        large = self._copy_large(wanted, reuse.large if reuse is not None else {}) if wanted else {}
        return _Mark(small=small, large=large, signs=signs or [])

    def _copy_large(
        self, wanted: set[int], reuse: Mapping[int, Copy] = _NO_COPIES
    ) -> dict[int, Copy]:
        copies = {}
        known = self._block_set | self._gap_set
        for index in sorted(wanted):
            cell = self._large[index]
            if isinstance(cell, (ModuleTensors, OptimizerState)):
                # Copies that serve only to learn must not fill a device's memory.
                on_host = self._device.type != "cpu" and index not in known
                copies[index] = cell.copy(reuse.get(index), on_host=on_host)
            else:
                copies[index] = cell.copy()
        return copies

    def _restore(self, mark: _Mark) -> None:
        for index, copy in mark.large.items():
            self._large[index].put_back(copy)
        for cell, copy in zip(self._small, mark.small, strict=True):
            cell.put_back(copy)

    def _enumerate(self, *, is_new: bool) -> None:
        """List the cells of all that is tracked. is_new: learn, since something is new."""
        self._version = self._state.version
        names = [cell.name for cell in self._large]
        block = {names[i] for i in self._block_set}
        gap = {names[i] for i in self._gap_set}
        self._large, self._small = cells_of(self._state.undoable, self._device)
        inside = {m for each in self._state.modules().values() for m in each.modules()}
        self._attributes = [vars(module) for module in inside if is_own(module)]
        self._large_bytes = sum(cell.size_bytes() for cell in self._large)
        if is_new:
            known, self._handed_on = self._handed_on, None
            self._blocks, self._learns = 0, True
            if known is not None and known.cells == [cell.name for cell in self._large]:
                block.update(known.block_set)
                gap.update(known.gap_set)
                self._blocks, self._learns = known.blocks, False
                self._learning_s, self._learnt_at_s = known.learning_s, time.perf_counter()
        cells = list(enumerate(self._small))
        self._tensors = [(i, cell) for i, cell in cells if isinstance(cell, ModuleTensors)]
        others = [(i, cell) for i, cell in cells if not isinstance(cell, ModuleTensors)]
        self._copy_small = [(i, cell.copy) for i, cell in others]
        self._copy_for_commit = [  # torch's own generators are not sent to others
            (i, cell.copy) for i, cell in others if not isinstance(cell, DefaultGenerators)
        ]
        self._holders = {
            id(tensor): index
            for index, cell in enumerate(self._large)
            if isinstance(cell, ModuleTensors)
            for tensor in cell.tensors()
        }
        self._block_set = {i for i, cell in enumerate(self._large) if cell.name in block}
        self._gap_set = {i for i, cell in enumerate(self._large) if cell.name in gap}
        self._commit = self._call = None
        self._calls = {}
        self._begin = _Mark()


def _has_digest(cell: Cell) -> TypeGuard[ModuleTensors | OptimizerState]:
    return isinstance(cell, (ModuleTensors, OptimizerState)) and all(
        t.device.type != "meta" for t in present(cell.tensors())
    )


def _differing_digests(some: Mapping[int, Digest], others: Mapping[int, Digest]) -> set[int]:
    """Return the cells of `some` whose digests differ, or are gone with their memory."""
    return {i for i, digest in some.items() if not trees_equal(digest, others.get(i))}


def _copy_s(cell: Cell) -> float:
    """Return the seconds of processor time that a copy takes: the least of three, if it is long."""
    least_s = math.inf
    for _ in range(3):
        began_s = time.thread_time()
        cell.copy()
        least_s = min(least_s, time.thread_time() - began_s)
        if least_s < _SLOW_S:
            break
    return least_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Learnt:
    """What a member has learnt about large state: names of all of it, of the block set, and of the
    gap set; its number of blocks, after which it learns again; seconds that this last took."""

    blocks: int
    learning_s: float
    cells: list[str]
    block_set: list[str]
    gap_set: list[str]


@dataclass(slots=True)
class _Mark:
    """Copies of the small cells and of some large ones, digests of others, by index, and signs of
    all large ones. A mark without signs serves only to put its copies back."""

    small: list[Copy] = field(default_factory=list)
    large: dict[int, Copy] = field(default_factory=dict)
    digests: Mapping[int, Digest] = field(default_factory=dict)
    signs: list[object] = field(default_factory=list)
    turn: Turn = None
    """That of the signs."""


@dataclass(slots=True)
class _Calls:
    """The calls from one place of the script."""

    count: int = 0
    at_s: float = -math.inf
    """When the last one began, by time.perf_counter()."""
    copy_s: float = 0.0
    """Seconds that a copy of everything took."""
    changes: set[int] = field(default_factory=set)
