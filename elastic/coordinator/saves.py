"""Completes checkpoints: collects members' reports, writes the manifest, tells the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint import catalog
from elastic.checkpoint.digest import FileDigest
from elastic.checkpoint.directory import CheckpointDirectory
from elastic.checkpoint.layout import group_name, run_tag
from elastic.checkpoint.manifest import Manifest
from elastic.core.coordinator import effects as fx
from elastic.core.coordinator import events as ev
from elastic.core.forks import counts
from elastic.errors import CheckpointWriteError, ElasticError
from elastic.rpc.codec import Codec
from elastic.rpc.control import AgentStream
from elastic.runtime.journal import Journal
from elastic.runtime.off_loop import off_loop
from elastic.v1 import job_pb2 as pb
from elastic.v1 import local_pb2

_DIGEST = Codec(FileDigest, pb.FileDigest)
_SHARD = Codec(ev.ShardReported, pb.ShardSaved)
_FAILURE = Codec(ev.SaveReportedFailed, pb.SaveFailed)
_REMEMBERED = 8


class Saves:
    """Takes members' reports of their shares, and commits checkpoints or gives them up.

    Once a group has committed a step, checkpoints of others beyond the step from which it went on
    are of a lineage that was given up. They are set aside, and late reports complete no more.

    post: takes events for the machine. broadcast: sends a message to every agent. start: runs a
    coroutine in the background. on_failed: called with step, generation and reason if a checkpoint
    could not be completed. on_committed: called after each commit.
    """

    def __init__(
        self,
        commits: CheckpointCommits | None,
        journal: Journal,
        *,
        post: Callable[[ev.Event], None],
        broadcast: Callable[..., None],
        start: Callable[[Coroutine[Any, Any, None], str], object],
        on_failed: Callable[[int, int, str], None] = lambda _step, _generation, _message: None,
        on_committed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_failed, self._on_committed = on_failed, on_committed
        self._commits = commits
        self._journal = journal
        self._post = post
        self._broadcast = broadcast
        self._start = start
        self._settled: dict[int, local_pb2.CheckpointCommitted] = {}
        self._given_up: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._in_order = asyncio.Lock()  # a commit drops the reports of earlier steps
        self._refused: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._retried: tuple[int, int] | None = None
        self._newest_group = 0  # of those known to have begun
        self.newest_step = 0
        """The step of the newest checkpoint that can be loaded; 0: none."""
        self.last_failure = ""
        """Why the newest save failed; empty if it did not."""

    async def load(self) -> None:
        """Find the newest checkpoint, and let no other run add to the directory."""
        if self._commits is not None:
            await off_loop(self._commits.claim)
            self.newest_step = await off_loop(self._commits.newest)

    @property
    def url(self) -> str:
        """Where checkpoints go; empty for a job without."""
        return self._commits.url if self._commits is not None else ""

    def began(self, generation: int, step: int) -> None:
        """Members have committed a step in the group of `generation`, which went on from `step`, or
        have saved that step. They repeat this to each leader."""
        if generation <= self._newest_group:
            return
        self._newest_group = generation
        self._post(ev.GroupBegan(generation=generation, step=step))
        for news in [*self._settled.values()]:
            if news.step > step and not news.abandoned and news.generation < generation:
                self._settle_as_superseded(news.step, news.generation)
        if self._commits is not None:
            self._start(self._set_aside(self._commits, generation, step), "set-aside")

    def saved(self, stream: AgentStream, report: pb.ShardSaved) -> None:
        if report.HasField("began_at"):
            self.began(report.generation, report.began_at)
        if self._answer_if_committed(stream, report.step):
            return
        self._discard_if_refused(report.step, report.generation)
        if self._commits is not None:
            self._commits.reported(report)
        self._post(_SHARD.from_pb(report))

    def failed(self, stream: AgentStream, report: pb.SaveFailed) -> None:
        if self._answer_if_committed(stream, report.step):
            return
        if report.retried:
            self._tried_again(report)
            return
        self._post(_FAILURE.from_pb(report))
        self._refused.append((report.step, report.generation))
        self._discard_if_refused(report.step, report.generation)

    async def commit(self, effect: fx.CommitCheckpoint) -> None:
        """Write the manifest, and remove old checkpoints. Errors are recorded, not raised."""
        if self._commits is None:
            return
        try:
            async with self._in_order:
                commit = functools.partial(self._commits.commit, effect.step, effect.generation)
                done = await off_loop(commit)
        except SaveSuperseded as error:
            self._give_up(effect.step, str(error), effect.generation, "superseded")
            return
        except Exception as error:  # noqa: BLE001 - storage may raise anything; a job goes on
            self._give_up(effect.step, _words(error), effect.generation)
            self._on_failed(effect.step, effect.generation, _words(error))
            return
        self._on_committed()
        self.newest_step = max(self.newest_step, effect.step)
        self.last_failure = ""
        self._journal.record(
            "checkpoint_committed",
            step=effect.step,
            bytes=done.size_bytes,
            stall_s=round(done.stall_s, 6),
            save_s=round(done.save_s, 6),
        )
        self._post(ev.CheckpointCommitted(generation=effect.generation, step=effect.step))
        self._settle(local_pb2.CheckpointCommitted(step=effect.step, generation=effect.generation))
        try:
            await off_loop(self._commits.prune)
        except Exception as error:  # noqa: BLE001 - the checkpoint is committed anyway
            self._journal.record("warning", source="checkpoints", message=_words(error))

    def abandon(self, effect: fx.AbandonCheckpoint) -> None:
        if self._commits is not None:
            self._commits.forget(effect.step, effect.generation)
        self._give_up(effect.step, effect.message, effect.generation, effect.reason)

    def _give_up(self, step: int, message: str, generation: int, reason: str = "failed") -> None:
        if (step, generation) not in self._given_up:  # otherwise a member has missed the news
            self._given_up.append((step, generation))
            self._journal.record("checkpoint_abandoned", step=step, reason=reason, message=message)
            if reason != "superseded":  # that save was none of this lineage
                self.last_failure = message
        self._settle(
            local_pb2.CheckpointCommitted(step=step, abandoned=True, generation=generation)
        )

    async def _set_aside(self, commits: CheckpointCommits, generation: int, step: int) -> None:
        try:
            async with self._in_order:
                found = await off_loop(functools.partial(commits.began, generation, step))
                if found:
                    self.newest_step = await off_loop(commits.newest)
        except Exception as error:  # noqa: BLE001 - by any storage; the next commit tries again
            self._journal.record("warning", source="checkpoints", message=_words(error))
            return
        if found:
            steps = sorted(found)
            self._journal.record(
                "checkpoints_set_aside", steps=steps, generation=generation, from_step=step
            )
        for superseded, saved_in in found.items():
            self._settle_as_superseded(superseded, saved_in)

    def _settle_as_superseded(self, step: int, generation: int) -> None:
        self._settle(
            local_pb2.CheckpointCommitted(step=step, abandoned=True, generation=generation)
        )

    def _tried_again(self, report: pb.SaveFailed) -> None:
        """A worker retries its last save while there is time: this is no failure yet."""
        self.last_failure = report.message
        if self._retried != (report.step, report.generation):
            self._retried = (report.step, report.generation)
            self._journal.record("save_retried", step=report.step, message=report.message)

    def give_up_last(self) -> None:
        """The job ends: remove what is left of a save that was tried again in vain."""
        if self._commits is not None and self._retried is not None and self.last_failure:
            self._start(self._discard(self._commits, *self._retried), "discard-save")

    def _discard_if_refused(self, step: int, generation: int) -> None:
        """Remove the parts of a refused save, which nobody reads: the disk may be full."""
        if self._commits is not None and (step, generation) in self._refused:
            self._start(self._discard(self._commits, step, generation), "discard-save")

    async def _discard(self, commits: CheckpointCommits, step: int, generation: int) -> None:
        try:
            await off_loop(functools.partial(commits.discard, step, generation))
        except Exception as error:  # noqa: BLE001 - by any storage; the next prune removes it
            self._journal.record("warning", source="checkpoints", message=_words(error))

    def _settle(self, news: local_pb2.CheckpointCommitted) -> None:
        self._settled[news.step] = news
        for step in sorted(self._settled)[:-_REMEMBERED]:
            del self._settled[step]
        self._broadcast(checkpoint=news)

    def _answer_if_committed(self, stream: AgentStream, step: int) -> bool:
        """Answer a member that has missed the commit of its save; False: it is not committed."""
        settled = self._settled.get(step)
        if settled is None or settled.abandoned:  # another group may save the step again
            return False
        stream.send(checkpoint=settled)
        return True


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"


class SaveSuperseded(CheckpointWriteError):
    """The save is of a lineage that was given up: another group went on from an earlier step."""


_MOST_UNCOMMITTED = 64  # saves whose reports are kept: a bound, since a save's end may be missed


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint that can be loaded; durations are those of the slowest member."""

    size_bytes: int
    stall_s: float
    """How long training waited for it."""
    save_s: float
    """Time from the save's step boundary to its commit, without time in which nobody worked."""


class CheckpointCommits:
    """Collects reports by (step, generation), and works on storage. `claim`, `newest`, `began`,
    `discard`, `commit` and `prune` block: call them off the loop. run: the job's incarnation."""

    def __init__(
        self, directory: CheckpointDirectory, *, job: str, run: str, keep_last: int
    ) -> None:
        self._directory = directory
        self._job = job
        self._owner = catalog.Owner(job=job, run=run, since_unix_s=time.time())
        self._tag = run_tag(run)
        self._claimed = False
        self._begun: tuple[int, int] | None = None  # the newest group, and where it went on
        self._keep_last = keep_last
        self._reports: dict[tuple[int, int], dict[int, pb.ShardSaved]] = {}
        self._committing = threading.Lock()

    @property
    def url(self) -> str:
        return self._directory.url

    def reported(self, report: pb.ShardSaved) -> None:
        key = (report.step, report.generation)
        self._reports.setdefault(key, {})[report.index] = report
        while len(self._reports) > _MOST_UNCOMMITTED:
            self._reports.pop(next(iter(self._reports)), None)

    def forget(self, step: int, generation: int) -> None:
        self._reports.pop((step, generation), None)

    def claim(self) -> None:
        """Claim the directory: any other run that still saves here is refused. If storage does not
        answer, the first commit claims it."""
        with contextlib.suppress(ElasticError):
            catalog.claim(self._directory, self._owner)
            self._claimed = True

    def newest(self) -> int:
        """Return the newest checkpoint's step; 0 if there is none, or storage does not answer."""
        with contextlib.suppress(ElasticError):
            return catalog.newest_step(self._directory)
        return 0

    def began(self, generation: int, step: int) -> dict[int, int]:
        """A group has gone on from `step`: record that, and set aside what is of no lineage now.

        Return the generations that had saved it, by step. After an error, the next commit records
        it. Raises ElasticError.
        """
        with self._committing:
            self._begun = generation, step
            self._owned()
            superseded = catalog.scan(self._directory).superseded
            found = {at: catalog.read_manifest(self._directory, at).generation for at in superseded}
            for at in superseded:
                catalog.set_aside(self._directory, at)
            return found

    def discard(self, step: int, generation: int) -> None:
        """Remove what exists of a save that nobody completes, if storage allows it."""
        with contextlib.suppress(ElasticError):
            group = group_name(generation, self._owner.run)
            catalog.discard(self._directory, step, group)

    def commit(self, step: int, generation: int) -> Committed:
        """Write the manifest; return the committed checkpoint.

        Two groups may save the same step, one after the other. The first complete save stands: a
        second manifest, whose files may have been swept, does not replace its own. Raises
        CheckpointWriteError, also if another run has claimed the directory since: then nothing of
        the save is left there. Raises SaveSuperseded if the save is of a lineage that was given up.
        """
        with self._committing:
            began_at = time.monotonic()
            reports = self._reports.get((step, generation), {})
            if self._begun is None or self._begun[0] < generation:  # its members are of an older
                self._begun = generation, step  # version: it went on from this step at the latest
            try:
                forks = self._owned().forks
            except catalog.DirectoryTaken:
                self.forget(step, generation)
                self.discard(step, generation)  # only the other run prunes, and only older steps
                raise
            if not counts(forks, self._tag, generation, step):
                self.forget(step, generation)
                raise SaveSuperseded(
                    f"step {step} of generation {generation} is of a lineage that was given up: a "
                    "later group has gone on from an earlier step"
                )
            if catalog.is_committed(self._directory, step):
                manifest = catalog.read_manifest(self._directory, step)
            else:
                if not reports or len(reports) < next(iter(reports.values())).count:
                    raise CheckpointWriteError(
                        f"step {step} is not committed: its save was abandoned, or a later step "
                        "was committed first"
                    )
                manifest = self._manifest(step, generation, reports)
                if step in catalog.scan(self._directory).superseded:
                    catalog.set_aside(self._directory, step)
                try:
                    catalog.commit(self._directory, manifest)
                except FileExistsError:
                    manifest = catalog.read_manifest(self._directory, step)
            for key in list(self._reports):
                if key[0] <= step and key[1] <= generation:  # a later group goes on from here
                    self._reports.pop(key, None)
            with contextlib.suppress(ElasticError):  # otherwise the files go with the step
                catalog.sweep(self._directory, manifest)
        stall_s = max((r.stall_s for r in reports.values()), default=0.0)
        wrote_s = max((r.stall_s + r.write_s for r in reports.values()), default=0.0)
        return Committed(
            size_bytes=sum(file.size_bytes for file in manifest.files),
            stall_s=stall_s,
            save_s=wrote_s + time.monotonic() - began_at,
        )

    def prune(self) -> None:
        """Remove checkpoints older than those to keep. Raises ElasticError."""
        with self._committing:
            catalog.prune(self._directory, self._keep_last)

    def _owned(self) -> catalog.Owner:
        """Return the record of this run as the owner, with where its groups went on."""
        if not self._claimed:
            catalog.claim(self._directory, self._owner)
            self._claimed = True
        self._owner = catalog.require(self._directory, self._owner)
        if self._begun is not None:
            self._owner = catalog.record_fork(self._directory, self._owner, *self._begun)
        return self._owner

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
                _DIGEST.from_pb(f) for index in sorted(shards) for f in shards[index].files
            ),
        )
