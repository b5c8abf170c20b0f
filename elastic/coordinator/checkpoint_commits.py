"""Turns the members' reports of their shares into a committed checkpoint: the manifest, last."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import dataclass

from elastic.checkpoint import catalog, owner
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.manifest import Manifest
from elastic.errors import CheckpointWriteError, ElasticError
from elastic.v1 import job_pb2 as pb

_MOST_UNCOMMITTED = 64  # saves whose reports are kept; one whose end was missed stays for good


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint that can be loaded; durations are those of the slowest member."""

    size_bytes: int
    stall_s: float
    """For which training waited."""
    save_s: float
    """From the step boundary at which it was begun until it was committed, but for the time in
    which nobody worked on it."""


class CheckpointCommits:
    """Collects reports by (step, generation). `commit` and `prune` block on storage: call them off
    the loop, like `claim`, `newest` and `discard`. run: the job's incarnation."""

    def __init__(
        self, directory: CheckpointDirectory, *, job: str, run: str, keep_last: int
    ) -> None:
        self._directory = directory
        self._job = job
        self._owner = owner.Owner(job=job, run=run, since_unix_s=time.time())
        self._claimed = False
        self._keep_last = keep_last
        self._reports: dict[tuple[int, int], dict[int, pb.ShardSaved]] = {}
        self._committing = threading.Lock()

    @property
    def url(self) -> str:
        """Where the checkpoints are."""
        return self._directory.url

    def reported(self, report: pb.ShardSaved) -> None:
        """A member's share is on storage."""
        key = (report.step, report.generation)
        self._reports.setdefault(key, {})[report.index] = report
        while len(self._reports) > _MOST_UNCOMMITTED:
            self._reports.pop(next(iter(self._reports)), None)

    def forget(self, step: int, generation: int) -> None:
        """This checkpoint will not be committed."""
        self._reports.pop((step, generation), None)

    def claim(self) -> None:
        """This run saves here from now on; any other that still does is refused. Where storage
        does not answer, the first commit claims it."""
        with contextlib.suppress(ElasticError):
            owner.claim(self._directory, self._owner)
            self._claimed = True

    def newest(self) -> int:
        """The step of the newest checkpoint; 0 if there is none, or storage does not say."""
        with contextlib.suppress(ElasticError):
            return max(catalog.list_checkpoints(self._directory), default=0)
        return 0

    def discard(self, step: int, generation: int) -> None:
        """Remove what there is of a save of which a part was refused, if storage does that."""
        with contextlib.suppress(ElasticError):
            catalog.discard(self._directory, step, generation)

    def commit(self, step: int, generation: int) -> Committed:
        """Write the manifest; return what became of it.

        Two groups may save the same step, one after the other. The first that is whole stands: its
        manifest is not replaced by one whose files may have been swept.
        Raises CheckpointWriteError, also if another run saves here since.
        """
        with self._committing:
            began_at = time.monotonic()
            self._require_claim()
            reports = self._reports.get((step, generation), {})
            if catalog.is_committed(self._directory, step):
                manifest = catalog.read_manifest(self._directory, step)
            else:
                if not reports or len(reports) < next(iter(reports.values())).count:
                    raise CheckpointWriteError(
                        f"step {step} is not committed: given up, or one of a later step was first"
                    )
                manifest = self._manifest(step, generation, reports)
                try:
                    catalog.commit(self._directory, manifest)
                except FileExistsError:
                    manifest = catalog.read_manifest(self._directory, step)
            for key in [key for key in list(self._reports) if key[0] <= step]:
                self._reports.pop(key, None)
            with contextlib.suppress(ElasticError):  # it goes with the step, if not now
                catalog.sweep(self._directory, manifest)
        stall_s = max((r.stall_s for r in reports.values()), default=0.0)
        wrote_s = max((r.stall_s + r.write_s for r in reports.values()), default=0.0)
        return Committed(
            size_bytes=sum(file.size_bytes for file in manifest.files),
            stall_s=stall_s,
            save_s=wrote_s + time.monotonic() - began_at,
        )

    def prune(self) -> None:
        """Remove what is older than the checkpoints to keep. Raises ElasticError."""
        with self._committing:
            catalog.prune(self._directory, self._keep_last)

    def _require_claim(self) -> None:
        if self._claimed:
            owner.require(self._directory, self._owner)
        else:
            owner.claim(self._directory, self._owner)
            self._claimed = True

    def _manifest(self, step: int, generation: int, shards: dict[int, pb.ShardSaved]) -> Manifest:
        first = shards[0]
        return Manifest(
            job=self._job,
            step=step,
            generation=generation,
            world_size=first.count,
            epoch=first.epoch,
            cursor=first.cursor,
            learning_rate=json.loads(first.learning_rate_json),
            created_unix_s=time.time(),
            files=tuple(
                FileDigest(name=f.name, size_bytes=f.size_bytes, xxh3_128=f.xxh3_128)
                for index in sorted(shards)
                for f in shards[index].files
            ),
        )
