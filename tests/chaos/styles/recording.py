"""Records what a script's session does, without a change to the script.

OUT/steps-PID.jsonl has a line for each attempt and each commit, OUT/progress-PID the newest commit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elastic
from tests.chaos.styles import state


class Recorder:
    """Writes the records of this process."""

    def __init__(self, out: Path) -> None:
        self.tracked: dict[str, Any] = {}
        self._file = (out / f"steps-{os.getpid()}.jsonl").open("w", buffering=1)
        self._lr_factor = 1.0
        self._open: tuple[elastic.Session, elastic.Step] | None = None
        self._progress = os.open(out / f"progress-{os.getpid()}", os.O_CREAT | os.O_WRONLY)

    def attempt(self, session: elastic.Session, step: elastic.Step) -> None:
        self._write(kind="attempt", step=step.index, generation=session.generation)
        self._open = session, step

    def entered(self, session: elastic.Session) -> None:
        """Keep the learning-rate factor of the block: after the block it is the next step's."""
        self._lr_factor = session.lr_factor()

    def settle(self) -> None:
        """Record the open step if it counts. The loop's body has ended, or another loop begins
        while the script still holds the iterator of a loop that it left early."""
        if self._open is None:
            return
        (session, step), self._open = self._open, None
        # A member that was brought to a later step has not seen the state after this one.
        if step.committed and session.committed == step.index + 1:
            self.commit(session, step)

    def commit(self, session: elastic.Session, step: elastic.Step) -> None:
        """Record the state at the end of the loop's body, after its last change."""
        parts = state.parts(self.tracked)
        samples = step.samples
        self._write(
            kind="commit",
            step=step.index,
            generation=session.generation,
            rank=session.rank,
            world_size=session.world_size,
            samples=[samples.epoch, samples.start, samples.stop],
            lr_factor=self._lr_factor,
            digests={name: state.digest(leaves) for name, leaves in parts.items()},
            figures={name: state.figures(leaves) for name, leaves in parts.items()},
        )
        os.pwrite(self._progress, f"{step.index:10} {session.generation:10}\n".encode(), 0)

    def _write(self, **row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")


def install(recorder: Recorder) -> None:
    """Make the recorder record every session of this process."""
    track, steps, enter = elastic.Session.track, elastic.Session.steps, elastic.Step.__enter__
    sessions: list[elastic.Session] = []

    def recorded_track(self: elastic.Session, **objects: Any) -> None:
        track(self, **objects)
        recorder.tracked.update(objects)

    def recorded_steps(
        self: elastic.Session, *arguments: Any, **named: Any
    ) -> Iterator[elastic.Step]:
        sessions[:] = [self]
        recorder.settle()
        for step in steps(self, *arguments, **named):
            recorder.attempt(self, step)
            try:
                yield step
            finally:  # also when the script leaves early
                recorder.settle()

    def recorded_enter(self: elastic.Step) -> elastic.Step:
        entered = enter(self)
        recorder.entered(sessions[0])
        return entered

    elastic.Session.track = recorded_track  # type: ignore[method-assign]
    elastic.Session.steps = recorded_steps  # type: ignore[method-assign]
    elastic.Step.__enter__ = recorded_enter  # type: ignore[method-assign]
