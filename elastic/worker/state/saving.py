"""Writes this member's share of a checkpoint in the background and follows its commit."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint.catalog import is_committed
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import group_name, path_in_step, shard_name, structure_name
from elastic.errors import ElasticError
from elastic.v1 import job_pb2 as pb
from elastic.worker.state.job_state import JobState
from elastic.worker.state.shards import HostShare, copy_share, plan_shards, write_share
from elastic.worker.state.structure import Structure
from elastic.worker.state.tensor_specs import describe

_RETRY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This member's place in the group that saves."""

    run: str
    generation: int
    rank: int
    world_size: int


class Saver:
    """At most one save is under way: the next waits its turn, training does not.

    send: takes `shard_saved=` or `save_failed=` for the agent; called on the writing thread.
    """

    def __init__(
        self, directory: CheckpointDirectory, *, worker: str, every: int, send: Callable[..., None]
    ) -> None:
        self._directory = directory
        self._worker = worker
        self.every = every
        self._send = send
        self._writing: threading.Thread | None = None
        self._share: HostShare | None = None
        self._changed = threading.Condition()
        self._settled: dict[int, bool] = {}
        self._reports: dict[int, dict[str, Any]] = {}  # not settled, by step
        self._last: tuple[int, Place] | None = None
        self._work: tuple[int, Place, HostShare, Structure, Mapping[str, Any], float] | None = None
        self._insists = False
        self._again_at: float | None = None

    def save(self, state: JobState, place: Place, *, insists: bool = False) -> None:
        """Copy this member's share to host memory and write it while training goes on.

        A group saves a step once: what it would write again has the same names, may by then be part
        of a checkpoint, and may differ in what was acknowledged meanwhile. If it was abandoned, the
        coordinator takes no other from this group.

        insists: what the storage refuses is no failure yet: `try_again` does.
        """
        step = state.committed
        if self._last == (step, place):
            return
        began_at = time.monotonic()
        self.wait_idle()
        flat = state.capture()
        specs = describe(flat.tensors)
        structure = Structure(specs=specs, skeleton=flat.skeleton, extra=state.extra())
        shards = plan_shards(
            specs, place.world_size, state.local_names(flat), state.declared_local(flat)
        )
        pieces = shards[place.rank]
        self._share = copy_share(flat.tensors, pieces, reuse=self._share)
        self._last = step, place
        with self._changed:
            self._settled.pop(step, None)
            self._reports.pop(step, None)
        self._insists, self._again_at = insists, None
        stall_s = time.monotonic() - began_at
        self._work = step, place, self._share, structure, _positions(state), stall_s
        self._start_writing()

    def try_again(self) -> None:
        """Write once more what the storage has refused, if it was some time ago."""
        if self._again_at is None or time.monotonic() < self._again_at or self._work is None:
            return
        self.wait_idle()
        self._again_at = None
        self._start_writing()

    def _start_writing(self) -> None:
        assert self._work is not None
        self._writing = threading.Thread(target=self._write, args=self._work, name="elastic-save")
        self._writing.start()

    def settle(self, step: int, *, committed: bool, generation: int = 0) -> None:
        """The coordinator has committed the checkpoint of `step`, or abandoned that of the group of
        `generation` (0: not known which): a later group may be saving the same step."""
        with self._changed:
            if not committed and generation and self._is_saved_in_another(step, generation):
                return
            self._settled[step] = committed
            self._reports = {at: sent for at, sent in self._reports.items() if at > step}
            for old in sorted(self._settled)[:-8]:
                del self._settled[old]
            self._changed.notify_all()

    def _is_saved_in_another(self, step: int, generation: int) -> bool:
        return (
            self._last is not None
            and self._last[0] == step
            and self._last[1].generation != generation
        )

    def report_again(self) -> None:
        """Send once more what was reported and not settled."""
        with self._changed:
            reports = list(self._reports.values())
        for report in reports:
            self._send(**report)

    def is_settled(self, step: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the checkpoint of `step` is committed or abandoned."""
        with self._changed:
            return self._changed.wait_for(lambda: step in self._settled, timeout_s)

    def is_committed(self, step: int) -> bool:
        """The checkpoint of `step` is known to be committed."""
        return self._settled.get(step, False)

    def wait_idle(self) -> None:
        """Wait until nothing is being written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(
        self,
        step: int,
        place: Place,
        share: HostShare,
        structure: Structure,
        positions: Mapping[str, Any],
        stall_s: float,
    ) -> None:
        index, count = place.rank, place.world_size
        began_at = time.monotonic()
        try:
            if is_committed(self._directory, step):  # restored from it, or by the group before
                self.settle(step, committed=True)
                return
            files = write_share(
                self._directory,
                step,
                group_name(place.generation, place.run),
                index,
                count,
                share,
                structure if index == 0 else None,
            )
        except Exception as error:  # noqa: BLE001 - those that wait for this part must hear of it
            failed = pb.SaveFailed(
                worker=self._worker,
                step=step,
                generation=place.generation,
                message=str(error) or type(error).__name__,
                retried=self._insists,
            )
            if self._insists:
                self._remove_own(step, place)  # a disk that is full needs the room
            self._report(step, save_failed=failed)
            if self._insists:
                self._again_at = time.monotonic() + _RETRY_S
            return
        digests = [
            pb.FileDigest(name=f.name, size_bytes=f.size_bytes, xxh3_128=f.xxh3_128) for f in files
        ]
        saved = pb.ShardSaved(
            worker=self._worker,
            step=step,
            generation=place.generation,
            index=index,
            count=count,
            files=digests,
            stall_s=stall_s,
            write_s=time.monotonic() - began_at,
            **positions,
        )
        self._report(step, shard_saved=saved)

    def _remove_own(self, step: int, place: Place) -> None:
        """This member's files of the save; those of the others stay."""
        group = group_name(place.generation, place.run)
        names = [shard_name(place.rank, place.world_size, group)]
        names += [structure_name(group)] if place.rank == 0 else []
        for name in names:
            with contextlib.suppress(ElasticError, OSError):
                self._directory.remove(path_in_step(step, name))

    def _report(self, step: int, **report: Any) -> None:
        with self._changed:
            self._reports[step] = report
        self._send(**report)


def _positions(state: JobState) -> dict[str, Any]:
    ramps = state.extra()["ramps"]
    return {
        "epoch": state.position.epoch,
        "cursor": state.position.cursor,
        "learning_rate_json": json.dumps(ramps),
    }
