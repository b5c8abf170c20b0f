"""Kills workers of a running job at random instants, whatever they are doing then."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.job_process import JobProcess, is_alive

# What a kill aims at. If no such worker appears in time, it hits any member.
_AIMS = ("member", "member", "member", "rank 0", "rank 0", "newcomer", "newcomer", "spare")
_EARLY = 0.15  # the share of runs that count their first delay from before the first commit
_LONGEST_DELAY_S = 0.8
_WAIT_FOR_TARGET_S = 1.5
_POLL_S = 0.003
_MOST_NEW = 4
"""Victims in a row without a commit: after six the job lets no newcomer in for a long time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One kill, for the checks and the story of a run."""

    at: float  # Unix seconds, as the events' `time`
    worker: str
    aim: str
    step: int
    """The newest step that any worker had committed."""


@dataclass(slots=True)
class Killer:
    """Kills workers of a job, but never the last one that holds the state."""

    job: JobProcess
    out: Path
    seed: int
    nproc: int
    calm_until: int = -1
    """No worker is killed before this step is committed."""
    kills: list[Kill] = field(default_factory=list)
    _new: int = 0  # victims without a commit since a full group last trained

    def run(self, kills: int, deadline_s: float) -> bool:
        """Kill `kills` workers, wait for a full group, and let the job run at full speed. False if
        the job ended or the deadline passed before that."""
        rng = random.Random(self.seed)
        deadline = time.monotonic() + deadline_s
        if rng.random() < _EARLY and self.calm_until < 0:
            self._wait(lambda: bool(self.job.members()), deadline)
        else:
            self._wait(lambda: self._newest() >= max(self.calm_until, 0), deadline)
        for number in range(kills):
            aim = rng.choice(_AIMS if number else _AIMS[:5])  # no newcomers before the first kill
            self._sleep(rng.uniform(0.0, _LONGEST_DELAY_S))
            if not self._kill_one(aim, rng, deadline):
                break
        complete = self._wait(self._complete, deadline)
        (self.out / "calm").touch()
        return complete and len(self.kills) == kills

    # ---- one kill

    def _kill_one(self, aim: str, rng: random.Random, deadline: float) -> bool:
        if self._new == _MOST_NEW:
            if not self._wait(self._complete, deadline):
                return False
            self._new = 0
        aimed_until = min(deadline, time.monotonic() + _WAIT_FOR_TARGET_S)
        if not self._wait(lambda: bool(self._targets(aim)), aimed_until):
            aim = "member"
        elif aim == "newcomer":
            self._sleep(rng.uniform(0.0, 0.15))  # while it starts or joins
        if not self._wait(lambda: bool(self._targets(aim) or self._targets("member")), deadline):
            return False
        targets = self._targets(aim) or self._targets("member")
        if not targets:
            return False
        victim = rng.choice(targets)
        self._new += victim not in self._progress()
        self.kills.append(Kill(at=time.time(), worker=victim, aim=aim, step=self._newest()))
        os.kill(self.job.pid_of(victim), signal.SIGKILL)
        return True

    def _targets(self, aim: str) -> list[str]:
        """Live workers of the kind `aim` whose death leaves another holder of the state."""
        alive, progress, members = self._alive(), self._progress(), self.job.members()
        holders = set(self._holders(alive, progress))
        others = [w for w in alive if w not in members]
        kinds = {
            "member": [w for w in members if w in alive],
            "rank 0": [w for w in members[:1] if w in alive],
            "newcomer": [w for w in members if w in alive and w not in progress]
            + (others if len(members) < self.nproc else []),
            "spare": others,
        }
        if not progress:  # nothing is committed: all members begin with the same state
            holders = set(kinds["member"])
        return [w for w in kinds[aim] if holders - {w}]

    # ---- what is known

    def _alive(self) -> list[str]:
        dead = {kill.worker for kill in self.kills}
        started = {e["worker"]: e["pid"] for e in self.job.named("worker_started")}
        return [w for w, pid in started.items() if w not in dead and is_alive(pid)]

    def _progress(self) -> dict[str, tuple[int, int]]:
        """Each worker's newest committed step, and its generation."""
        names = {e["pid"]: e["worker"] for e in self.job.named("worker_started")}
        found = {}
        for path in self.out.glob("progress-*"):
            pid, line = int(path.name.partition("-")[2]), path.read_text().split()
            if line and pid in names:
                found[names[pid]] = (int(line[0]), int(line[1]))
        return found

    def _newest(self) -> int:
        """The newest step that any worker has committed."""
        return max((step for step, _ in self._progress().values()), default=-1)

    def _holders(self, alive: list[str], progress: dict[str, tuple[int, int]]) -> Iterator[str]:
        """Live workers that have committed the newest step or the one before it."""
        newest = self._newest()
        for worker in alive:
            if worker in progress and progress[worker][0] >= newest - 1:
                yield worker

    def _complete(self) -> bool:
        """All slots train in one generation."""
        members, progress = self.job.members(), self._progress()
        if len(members) < self.nproc or any(m not in progress for m in members):
            return False
        return len({progress[m][1] for m in members}) == 1 and all(
            m in self._alive() for m in members
        )

    # ---- waiting

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Files notify nobody, so this polls; False if the job ends or the deadline passes."""
        while not condition():
            if self.job.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _sleep(self, while_s: float) -> None:
        self._wait(lambda: False, time.monotonic() + while_s)
