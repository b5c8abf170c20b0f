"""Gives the state to members of a new group, and takes it from a member or from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from elastic.checkpoint.documents import Json
from elastic.core.recovery import Mark
from elastic.core.worker import participation as act
from elastic.core.worker.participation import Progress
from elastic.errors import ConfigurationError
from elastic.worker.group.process_group import Backend, Group
from elastic.worker.group.transfer import (
    receive_json,
    receive_tensors,
    send_json,
    send_tensors,
)
from elastic.worker.optimizers import require_same_kind
from elastic.worker.state.checkpointing import Checkpointing
from elastic.worker.state.generators import Noise, seed_at
from elastic.worker.state.job_state import JobState, progress_of
from elastic.worker.state.shards import NotNeeded, Structure
from elastic.worker.state.state_digests import StateDigests
from elastic.worker.state.tensor_specs import describe, from_table, to_table
from elastic.worker.state.tree import unflatten
from elastic.worker.state.undo import Learnt, Undo


@dataclass(slots=True)
class Outcome:
    """How this member came to its state in the present group."""

    source: str = ""
    """"initial" or the checkpoint's name, if no member held the state."""
    bytes_received: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _FlatState:
    """A state that was received or restored."""

    skeleton: Any
    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    noise: Noise | None = None
    """What the default generators become; None: they stay as they are."""


class StateExchange:
    """Carries out the protocol's actions on whole states.

    A state of a later loop than the script's is postponed: it waits here until the script has come
    to that loop. reads: nothing may change the state before it has been read.
    """

    def __init__(
        self,
        state: JobState,
        undo: Undo,
        reads: StateDigests,
        checkpoints: Checkpointing,
        backend: Backend,
    ) -> None:
        self._state = state
        self._undo = undo
        self._reads = reads
        self._checkpoints = checkpoints
        self._backend = backend
        self.outcome = Outcome()
        self.seed: int | None = None
        """The one that the script gave torch above its first loop."""
        self._postponed: _FlatState | None = None
        self._read: Mapping[str, torch.Tensor] = {}
        """What this member has read of the checkpoint that rank 0 restores."""
        self._restored_noise: list[Json] | None = None
        """The generators of each rank, if this member has restored a checkpoint for the group that
        forms; empty if they are those of a group of another size."""

    def begin(self) -> None:
        """The members of a new group are about to find out who needs the state."""
        self.outcome, self._restored_noise, self._read = Outcome(), None, {}

    def send(self, send: act.Send, group: Group) -> None:
        self._reads.wait()
        with self._undo.as_of_commit() if send.mark is Mark.COMMIT else contextlib.nullcontext():
            if self._postponed is not None:
                skeleton, tensors = self._postponed.skeleton, self._postponed.tensors
                extra = dict(self._postponed.extra)
            else:
                flat = self._state.capture()
                skeleton, tensors = flat.skeleton, flat.tensors
                extra = self._state.extra(send.progress)
            specs = describe(tensors)
            learnt = self._undo.learnt()
            document = {
                "tensors": to_table(specs),
                "skeleton": skeleton,
                "extra": extra,
                "learnt": asdict(learnt) if learnt is not None else None,
                "restored": self._restored_noise is not None,
                "generators": self._restored_noise,
            }
            send_json(group, document, send.rank)
            send_tensors(group, {spec.name: tensors[spec.name] for spec in specs}, send.rank)

    def receive(self, receive: act.Receive, group: Group, *, survives: bool) -> Progress:
        """survives: this member has trained, so its generators go on."""
        self._reads.another_state_comes()
        document = receive_json(group, receive.rank)
        if receive.then is not None:
            send_json(group, document, receive.then)
        if document["learnt"] is not None:
            self._undo.take_over(Learnt(**document["learnt"]))
        in_place = self._backend.queues  # a device has no room for a second state
        later = progress_of(document["extra"]).loop > receive.loop
        read, self._read = self._read, {}
        tensors, self.outcome.bytes_received = receive_tensors(
            group,
            from_table(document["tensors"]),
            receive.rank,
            into=self._state.receivable() if in_place and not later else {},
            known={} if later else read or self._state.comparable(),
            then=receive.then,
        )
        extra = document["extra"]
        # The generators of a worker that begins the job are the script's.
        renews = document["restored"] or (not survives and progress_of(extra).committed > 0)
        flat = _FlatState(
            skeleton=document["skeleton"],
            tensors=tensors,
            extra=extra,
            noise=self._noise(extra, document["generators"], group.rank) if renews else None,
        )
        return self._take_or_postpone(flat, receive.loop, at_commit=receive.mark is Mark.COMMIT)

    def restore(self, restore: act.Restore, group: Group) -> Progress | None:
        self._reads.another_state_comes()
        loaded, self.outcome.source = self._checkpoints.load(
            lambda s: {} if _is_later(s, restore.loop) else self._state.comparable()
        )
        if loaded is None:
            return None
        extra = loaded.structure.extra
        states = unflatten(loaded.structure.skeleton, loaded.tensors)
        require_same_kind(self._state.tracked, states)
        fits = len(loaded.generators) == group.world_size
        self._restored_noise = list(loaded.generators) if fits else []
        flat = _FlatState(
            skeleton=loaded.structure.skeleton,
            tensors=loaded.tensors,
            extra=extra,
            noise=self._noise(extra, self._restored_noise, group.rank),
        )
        return self._take_or_postpone(flat, restore.loop, at_commit=False)

    def read_checkpoint(self, read: act.ReadCheckpoint, group: Group) -> bool:
        if self._backend.queues:  # rank 0 sends to devices from its device
            return False
        self._reads.another_state_comes()
        rooms: list[Mapping[str, torch.Tensor]] = []

        def room(structure: Structure) -> Mapping[str, torch.Tensor]:
            if _is_later(structure, read.loop):
                raise NotNeeded("the script has not come to the checkpoint's loop")
            rooms.append(self._state.comparable())
            return rooms[-1]

        self._read = self._checkpoints.read(room, lambda: not group.lost)
        return any(rooms)

    def take_postponed(self) -> None:
        flat, self._postponed = self._postponed, None
        assert flat is not None, "no state waits"
        self._put_in_place(flat, at_commit=False)

    def postponed_result(self, *keys: str) -> Any:
        """The result that a call of `session.run` between two loops returned to the others, under
        the first of `keys` that the postponed state has. Raises ConfigurationError if it has
        none."""
        postponed = self._postponed
        assert postponed is not None, "no state waits"
        results = unflatten(postponed.skeleton, postponed.tensors)["session.results"]
        key = next((k for k in keys if k in results), None)
        if key is None:
            raise ConfigurationError(
                f"the script calls session.run() between loop {self._state.progress.loop + 1} and "
                "the next one, but the worker that sent or saved the state did not; use the script "
                "that saved the checkpoint, or another checkpoint directory"
            )
        return results[key]

    # ---- inside

    def _noise(self, extra: Mapping[str, Any], restored: Sequence[Json] | None, rank: int) -> Noise:
        """Return this rank's generators. restored: those that a checkpoint has for the ranks of a
        group of this size."""
        assert self.seed is not None, "a state is received in a loop"
        seed = seed_at(self.seed, rank, progress_of(extra).committed)
        return Noise(seed=seed, saved=restored[rank] if restored else None)

    def _take_or_postpone(self, flat: _FlatState, loop: int, *, at_commit: bool) -> Progress:
        progress = progress_of(flat.extra)
        self._checkpoints.went_on_from(progress.committed)
        self._postponed = flat if progress.loop > loop else None
        if self._postponed is None:
            self._put_in_place(flat, at_commit=at_commit)
        return progress

    def _put_in_place(self, flat: _FlatState, *, at_commit: bool) -> None:
        self._reads.forget()
        if flat.noise is not None:  # first: a tracked object may put generators back itself
            flat.noise.put_in_place(self._backend.device)
        self._state.restore(flat.skeleton, flat.tensors, flat.extra)
        self._undo.received(at_commit=at_commit)


def _is_later(structure: Structure, loop: int) -> bool:
    """Whether a checkpoint was saved in a later loop, to which the script has not come yet."""
    return progress_of(structure.extra).loop > loop
