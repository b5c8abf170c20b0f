"""The member's side of checkpoints: saves its share of the state, and restores a checkpoint.

The bytes of the replicated state are divided among the members. Each writes its share in the
background.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory, LocalDirectory
from elastic.checkpoint.layout import (
    group_name,
    path_in_step,
    shard_name,
    structure_name,
)
from elastic.errors import ElasticError, GroupLost
from elastic.rpc.codec import Codec
from elastic.v1 import job_pb2, local_pb2
from elastic.worker.group.process_group import Group
from elastic.worker.state import generators
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import (
    HostShare,
    Loaded,
    Room,
    Structure,
    copy_share,
    load_latest,
    plan_shards,
    write_share,
)
from elastic.worker.state.tensor_specs import describe

_DIGEST = Codec(FileDigest, job_pb2.FileDigest)
_RETRY_S = 1.0
_PATIENCE_S = 2.0
"""How long training waits for the save before, once for each save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This member's place in the group that saves."""

    run: str
    generation: int
    rank: int
    world_size: int
    began_at: int
    """The committed steps from which the group went on."""


class Checkpointing:
    """Saves at step boundaries, where every member does; restores where no member has the state.

    Training goes on while a share is written. If the next save is due before it is written, that
    one is left out after a short wait. No directory: does nothing.

    every: steps between two checkpoints; 0: none are saved at intervals.
    send: sends `shard_saved=`, `save_failed=` or `notice=` to the agent; called on the writing
    thread, too.
    """

    def __init__(
        self,
        directory: CheckpointDirectory | None = None,
        *,
        worker: str = "",
        every: int = 0,
        send: Callable[..., None] = lambda **_: None,
    ) -> None:
        self._directory = directory
        self._worker = worker
        self.every = every
        self._send = send
        self._writing: threading.Thread | None = None
        self._share: HostShare | None = None
        self._changed = threading.Condition()
        self._settled: dict[int, bool] = {}
        self._reports: dict[int, dict[str, Any]] = {}  # those that are not settled, by step
        self._last: tuple[int, Place] | None = None
        self._write_last: Callable[[], None] | None = None
        self._insists = False
        self._again_at: float | None = None
        self._patience_s = _PATIENCE_S

    @property
    def has_directory(self) -> bool:
        return self._directory is not None

    # ---- restoring

    def load(self, room: Room) -> tuple[Loaded | None, str]:
        """Return the newest intact checkpoint, None if there is none, and where the state comes
        from, in words. Raises CheckpointDamaged if checkpoints exist and none is intact. room: see
        `load`."""
        if self._directory is None:
            return None, "initial"
        damaged: list[int] = []

        def on_damaged(step: int, reason: str) -> None:
            damaged.append(step)
            fields = {"step": str(step), "reason": reason}
            self._send(notice=local_pb2.Notice(name="checkpoint_damaged", fields=fields))

        loaded = load_latest(self._directory, on_damaged, room)
        if loaded is None:
            return None, "initial"
        for step in damaged:  # their steps will be saved again
            catalog.prepare(self._directory, step)
        return loaded, f"checkpoint of step {loaded.manifest.step}"

    def read(self, room: Room, is_needed: Callable[[], bool]) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the newest intact checkpoint, none if it cannot be read here. What
        is wrong, the member that restores it reports. room, is_needed: see `load`.

        None from remote storage either: no cache has what another process of the node reads."""
        if not isinstance(self._directory, LocalDirectory):
            return {}
        try:
            loaded = load_latest(self._directory, lambda *_: None, room, is_needed)
        except ElasticError:
            return {}
        return loaded.tensors if loaded is not None else {}

    # ---- saving

    def save(self, state: JobState, group: Group, *, began_at: int, insists: bool = False) -> None:
        """At a step boundary, copy this member's share to host memory; write it in the background.

        A group saves a step only once. A second save would write files of the same names, which may
        be part of a checkpoint by then, and may differ in what was acknowledged meanwhile. After an
        abandoned save the coordinator takes no other of that step from this group.

        If the storage has not taken the save before, this one fails: the members' next save
        follows at the next interval. A last save must wait for it beforehand.

        began_at: the committed steps on which the group's members agreed.
        insists: a refusal of the storage is no failure yet, because `try_again` writes again.
        """
        step, place = state.committed, _place(group, began_at)
        if self._directory is None or not self.saves(step, group, began_at=began_at):
            return
        since = time.monotonic()
        is_idle = self._is_idle(self._patience_s)
        self._last = step, place
        with self._changed:
            self._settled.pop(step, None)
            self._reports.pop(step, None)
        if not is_idle:
            self._patience_s = 0.0
            self._failed(step, place, _STILL_WRITING)
            return
        self._patience_s = _PATIENCE_S
        flat = state.capture()
        specs, extra = describe(flat.tensors), state.extra()
        structure = Structure(specs=specs, skeleton=flat.skeleton, extra=extra)
        shards = plan_shards(
            specs, place.world_size, state.local_names(flat), state.declared_local(flat)
        )
        self._share = replace(
            copy_share(flat.tensors, shards[place.rank], reuse=self._share),
            generators=generators.states(group.backend.device),
        )
        self._insists, self._again_at = insists, None
        told = {
            "epoch": state.position.epoch,
            "cursor": state.position.cursor,
            "learning_rate_json": json.dumps(extra["ramps"]),
            "stall_s": time.monotonic() - since,
        }
        self._write_last = functools.partial(
            self._write, self._directory, step, place, self._share, structure, told
        )
        self._start_writing(self._write_last)

    def saves(self, step: int, group: Group, *, began_at: int) -> bool:
        """Whether `save` would save this step now."""
        return (
            self._directory is not None
            and step > 0
            and self._last != (step, _place(group, began_at))
        )

    def save_and_wait(
        self,
        state: JobState,
        group: Group,
        superseded: Callable[[], bool],
        *,
        began_at: int,
        insists: bool = False,
    ) -> None:
        """Save this step unless it is saved; wait until its checkpoint is committed or given up.

        insists: retry what the storage refuses, until the coordinator ends the job.
        Raises GroupLost once `superseded`, or the group is aborted: another group must save then.
        """
        step = state.committed
        if self._directory is None or step == 0 or self.is_committed(step):
            return
        while not self._is_idle(0.05):
            if superseded() or group.lost:
                raise GroupLost("superseded before saving")
        self.save(state, group, began_at=began_at, insists=insists)
        while not self.is_settled(step, timeout_s=0.05):
            if superseded() or group.lost:
                raise GroupLost("superseded while saving")
            self.try_again()

    def try_again(self) -> None:
        """Write again what the storage has refused, at most once in _RETRY_S."""
        write, again_at = self._write_last, self._again_at
        if again_at is None or time.monotonic() < again_at or write is None:
            return
        self.wait_idle()
        self._again_at = None
        self._start_writing(write)

    def _start_writing(self, write: Callable[[], None]) -> None:
        self._writing = threading.Thread(target=write, name="elastic-save")
        self._writing.start()

    def went_on_from(self, step: int) -> None:
        """This member has taken over a state of `step`: what it knew of saves beyond is void."""
        with self._changed:
            self._settled = {at: done for at, done in self._settled.items() if at <= step}
            self._reports = {at: sent for at, sent in self._reports.items() if at <= step}

    def settle(self, step: int, *, committed: bool, generation: int = 0) -> None:
        """The coordinator has committed the checkpoint of `step`, or abandoned the save of
        `generation` (0: not known which): a later group may be saving the same step."""
        with self._changed:
            if not committed and generation and self._last is not None:
                saved, place = self._last
                if saved == step and place.generation != generation:
                    return
            self._settled[step] = committed
            self._reports = {at: sent for at, sent in self._reports.items() if at > step}
            for old in sorted(self._settled)[:-8]:
                del self._settled[old]
            self._changed.notify_all()

    def report_again(self) -> None:
        """Send the reports that are not settled to a coordinator that may be new."""
        with self._changed:
            reports = list(self._reports.values())
        for report in reports:
            self._send(**report)

    def is_settled(self, step: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether the step's save is committed or abandoned."""
        with self._changed:
            return self._changed.wait_for(lambda: step in self._settled, timeout_s)

    def is_committed(self, step: int) -> bool:
        return self._settled.get(step, False)

    def wait_idle(self) -> None:
        self._is_idle(None)

    def _is_idle(self, timeout_s: float | None) -> bool:
        """Wait up to `timeout_s` (None: for ever); return whether no save is being written."""
        if self._writing is not None:
            self._writing.join(timeout_s)
            if self._writing.is_alive():
                return False
            self._writing = None
        return True

    def _write(
        self,
        directory: CheckpointDirectory,
        step: int,
        place: Place,
        share: HostShare,
        structure: Structure,
        told: Mapping[str, Any],
    ) -> None:
        index, count = place.rank, place.world_size
        began_at = time.monotonic()
        try:
            if catalog.is_saved(
                directory,
                step,
                run=place.run,
                generation=place.generation,
                began_at=place.began_at,
            ):  # restored from it, or the group before saved it
                self.settle(step, committed=True)
                return
            files = write_share(
                directory,
                step,
                group_name(place.generation, place.run),
                index,
                count,
                share,
                structure if index == 0 else None,
            )
        except Exception as error:  # noqa: BLE001 - reported to those that wait for this share
            if self._insists:
                _remove_own(directory, step, place)  # a full disk needs the room
            message = str(error) or type(error).__name__
            self._failed(step, place, message, retried=self._insists)
            if self._insists:
                self._again_at = time.monotonic() + _RETRY_S
            return
        saved = job_pb2.ShardSaved(
            worker=self._worker,
            step=step,
            generation=place.generation,
            index=index,
            count=count,
            files=map(_DIGEST.to_pb, files),
            write_s=time.monotonic() - began_at,
            began_at=place.began_at,
            **told,
        )
        self._report(step, shard_saved=saved)

    def _failed(self, step: int, place: Place, message: str, *, retried: bool = False) -> None:
        failed = job_pb2.SaveFailed(
            worker=self._worker,
            step=step,
            generation=place.generation,
            message=message,
            retried=retried,
        )
        self._report(step, save_failed=failed)

    def _report(self, step: int, **report: Any) -> None:
        with self._changed:
            self._reports[step] = report
        self._send(**report)


def _place(group: Group, began_at: int) -> Place:
    return Place(
        run=group.generation.incarnation,
        generation=group.generation.number,
        rank=group.rank,
        world_size=group.world_size,
        began_at=began_at,
    )


_STILL_WRITING = (
    "the storage has not taken the save before: it stands still, or is too slow for so many saves"
)


def _remove_own(directory: CheckpointDirectory, step: int, place: Place) -> None:
    """Remove this member's files of the save; the other members' files stay."""
    group = group_name(place.generation, place.run)
    names = [shard_name(place.rank, place.world_size, group)]
    names += [structure_name(group)] if place.rank == 0 else []
    for name in names:
        with contextlib.suppress(ElasticError, OSError):
            directory.remove(path_in_step(step, name))
