"""Which checkpoints are being written, and when one is whole or can never be."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.core.coordinator import effects as fx
from elastic.core.membership import Generation, WorkerId, WorkerStatus


@dataclass(slots=True)
class _Save:
    """One checkpoint on its way; `writers` by shard index."""

    writers: tuple[WorkerId, ...]
    written: set[int] = field(default_factory=set)

    def waits_for(self, worker: WorkerId) -> bool:
        return any(w == worker and i not in self.written for i, w in enumerate(self.writers))


@dataclass(slots=True)
class CheckpointTracker:
    """Collects the members' reports; keyed by (step, generation), so a late report of an older
    generation can never complete the save of a newer one."""

    _saves: dict[tuple[int, int], _Save] = field(default_factory=dict)
    _whole: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _given_up: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    _told: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=16))
    abandoned: bool = False
    """A save was given up since the last commit: another should follow soon."""
    newest: tuple[Generation, int] | None = None
    """The group that has saved the newest one that can be loaded, and its step; as far as known."""
    told: bool = True
    """Members are to hear of saves that wait for a lost member. While the job stops they would
    leave without a checkpoint: there the next group saves the same step, or the lost member comes
    back and completes this save."""

    def written(self, generation: Generation, step: int, index: int, count: int) -> bool:
        """Record a part; True when the checkpoint is now whole."""
        key = (step, generation.number)
        if count != generation.world_size or not 0 <= index < count:
            return False
        if key in self._given_up or key in self._whole:  # a member has missed what became of it
            return False
        save = self._saves.setdefault(key, _Save(tuple(m.worker for m in generation.members)))
        save.written.add(index)
        if len(save.written) < count:
            return False
        self._forget_up_to(step)
        self._whole.append(key)
        self.abandoned = False
        return True

    def committed(self, generation: Generation, step: int) -> None:
        """It can be loaded."""
        if self.newest is None or (self.newest[0].number, self.newest[1]) < (
            generation.number,
            step,
        ):
            self.newest = generation, step

    def is_beyond(self, holder: WorkerStatus) -> bool:
        """The newest checkpoint is of a group that has gone on without the worker, and of no
        earlier step than it holds."""
        if self.newest is None:
            return False
        generation, step = self.newest
        return 0 < holder.trained_in < generation.number and holder.committed <= step

    def is_given_up(self, step: int, generation: int) -> bool:
        """It was, and not long ago."""
        return (step, generation) in self._given_up

    def is_told(self, step: int, generation: int) -> bool:
        """It was given up, and members were told: they wait for it no longer."""
        return (step, generation) in self._told

    def lost(self, worker: WorkerId) -> list[tuple[int, int]]:
        """Give up the saves that wait for a worker that is gone; their (step, generation). Those
        that nobody is to hear of are kept."""
        waiting = [key for key, save in self._saves.items() if save.waits_for(worker)]
        self.abandoned = self.abandoned or bool(waiting)
        given_up = waiting if self.told else []
        for key in given_up:
            self._forget(key)
        return given_up

    def abandon(self, workers: Iterable[WorkerId]) -> list[fx.Effect]:
        """The same for several, as effects."""
        if not self._saves:
            return []
        lost = [(worker, key) for worker in sorted(workers) for key in self.lost(worker)]
        self._told.extend(key for _, key in lost)
        return [
            fx.AbandonCheckpoint(
                generation=generation, step=step, message=f"{worker} was lost while saving"
            )
            for worker, (step, generation) in lost
        ]

    def refused(self, step: int, generation: int) -> bool:
        """Storage refused a part: at once again would not help. False if that was known."""
        if (step, generation) in self._given_up:
            return False
        self._forget((step, generation))
        self._told.append((step, generation))
        return True

    def _forget(self, key: tuple[int, int]) -> None:
        self._saves.pop(key, None)
        self._given_up.append(key)

    def _forget_up_to(self, step: int) -> None:
        for key in [key for key in self._saves if key[0] <= step]:
            del self._saves[key]
