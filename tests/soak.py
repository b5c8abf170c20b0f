"""Run a small job under churn and find out whether anything of its long-lived processes grows.

    python -m tests.soak --minutes 60
    make soak MINUTES=60

`elastic run` trains on several slots, with a ledger, checkpoints and reports, while workers are
killed one after another, each as soon as the group is complete again. One worker is spared: it
shows what groups leave behind in a worker. In the first half of the time caches and histories fill.
In the second nothing may grow: the table gives each figure's first and last value, its slope per
hour (Theil-Sen), and its noise. The exit code is 1 if something grows or is left behind. To judge
the agent takes an hour or more: its history of slots fills for half an hour, up to a megabyte.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.job_process import ROOT, descendants

SLOTS = 3
SCRIPT = ROOT / "tests/integration/scripts/steady.py"
ARGUMENTS = ("--epochs", "1000000000", "--samples", "4800", "--pace-s", "0.02")
MOST_CHANGES_S = 2.0
SAMPLE_S = 5.0
FIRST_STEP_S = 0.5
SPARE_IN_TEN = 1
DEADLINE_S = 120.0

Series = list[tuple[float, float]]
"""(seconds since the start, value)"""

TORCH_KEEPS_MIB = 300 / 2**20
"""What torch keeps in a worker for good of each group that it was in: see "Who runs where" in
docs/ARCHITECTURE.md."""
LEAST = {"descriptors": 1.0, "threads": 1.0, "MiB": 0.5, "files": 2.0, "KiB": 64.0}
"""By unit, how much a figure must rise in the second half to count as growing."""


# ---- figures


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The trend of the second half of a series; `first` is the first value of the whole series."""

    first: float
    last: float
    per_hour: float
    rise: float
    """Over the second half, by the slope."""
    noise: float
    """How far values are from the line: three times their scatter."""

    def grows(self, least: float) -> bool:
        """Whether it rises by more than its noise and by more than `least`."""
        return self.rise > max(self.noise, least)


def trend(series: Series) -> Trend:
    """By Theil and Sen: the slope is the median of those between all pairs of samples."""
    middle_s = (series[0][0] + series[-1][0]) / 2
    half = [(t, v) for t, v in series if t >= middle_s]
    slopes = [
        (later - earlier) / (t2 - t1)
        for i, (t1, earlier) in enumerate(half)
        for t2, later in half[i + 1 :]
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    rest = [v - slope * t for t, v in half]
    middle = statistics.median(rest)
    scatter = 1.4826 * statistics.median(abs(r - middle) for r in rest)
    return Trend(
        first=series[0][1],
        last=series[-1][1],
        per_hour=slope * 3600.0,
        rise=slope * (half[-1][0] - half[0][0]),
        noise=3.0 * scatter,
    )


def of_process(pid: int) -> Iterator[tuple[str, float]]:
    """(unit, value) of what a process holds."""
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    yield "descriptors", len(list((process / "fd").iterdir()))
    yield "threads", int(status["Threads"])
    yield "MiB", int(status["RssAnon"].split()[0]) / 1024


def of_directory(path: Path, but: str = "") -> Iterator[tuple[str, float]]:
    """(unit, value) of all files and folders below a directory, except those of one name."""
    sizes = []
    for file in path.rglob("*"):
        if file.name == but:
            continue
        with contextlib.suppress(OSError):  # it is just being removed
            sizes.append(file.stat().st_size)
    yield "files", len(sizes)
    yield "KiB", sum(sizes) / 1024


# ---- the job


@dataclass
class Place:
    """The paths of a run."""

    root: Path
    runtime: Path = field(init=False)
    logs: Path = field(init=False)
    checkpoints: Path = field(init=False)
    ledger: Path = field(init=False)

    def __post_init__(self) -> None:
        self.runtime, self.logs = self.root / "run", self.root / "logs"
        self.checkpoints, self.ledger = self.root / "checkpoints", self.root / "ledger.jsonl"
        self.runtime.mkdir(mode=0o700)


class Job:
    """The job. Of its events it keeps only what is needed: this process must not grow either."""

    def __init__(self, place: Place) -> None:
        options = ["--output", "json", "--nproc-per-node", SLOTS, "--log-dir", place.logs]
        options += ["--ledger", place.ledger, "--checkpoint-dir", place.checkpoints]
        options += ["--checkpoint-every", 50, "--max-restarts", 1_000_000]
        options += ["--restart-window-s", 300]  # full in the first half
        command = [sys.executable, "-m", "elastic.cli", "run", *options, SCRIPT, *ARGUMENTS]
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(place.runtime)},
            start_new_session=True,
        )
        self.members: list[str] = []
        self.survivor = ""
        """A member that is never killed, and shows what groups leave behind in a worker."""
        self.pids: dict[str, int] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.committed = self.survivors = 0
        self.warnings: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for_a_full_group(self, after: int) -> None:
        """Wait for a full group that was formed after the first `after` ones. Raises SystemExit if
        the job ends, or after DEADLINE_S."""
        with self._changed:
            formed = self._changed.wait_for(
                lambda: (
                    self.process.poll() is not None
                    or (len(self.members) == SLOTS and self.counts["generation_formed"] > after)
                ),
                DEADLINE_S,
            )
        if not formed or self.process.poll() is not None:
            raise SystemExit(f"the job does not come back: {dict(self.counts)}, {self.warnings}")

    def kill_one(self, rng: random.Random) -> None:
        """Kill a member, or now and then a spare."""
        with self._changed:
            members = [w for w in self.members if w in self.pids and w != self.survivor]
            spares = [w for w in self.pids if w not in self.members]
            chosen = spares if spares and rng.randrange(10) < SPARE_IN_TEN else members
            worker = rng.choice(chosen)
            pid = self.pids.pop(worker)
            replaced = chosen is members
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.counts["killed members" if replaced else "killed spares"] += 1

    def processes(self) -> dict[str, int]:
        found = {"agent and coordinator": self.process.pid}
        if self.survivor in self.pids:
            found["worker"] = self.pids[self.survivor]
        for pid in descendants(self.process.pid):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
            for name in ("keeper", "zygote"):
                if title == f"elastic {name}":
                    found.setdefault(name, pid)
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError), self._changed:
                self._note(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _note(self, event: dict[str, Any]) -> None:
        name = event["event"]
        self.counts[name] += 1
        if name == "generation_formed":
            self.members = event["members"]
            if self.survivor not in self.members:
                self.survivors += 1
                self.survivor = next(iter(self.members), "")
        elif name == "worker_started":
            self.pids[event["worker"]] = event["pid"]
        elif name == "worker_failed":
            self.pids.pop(event["worker"], None)
            if event["kind"] != "signal":
                self.warnings = [*self.warnings[-19:], f"{event['kind']}: {event['message']}"]
        elif name == "progress":
            self.committed = event["step"]
        elif name in ("warning", "loop_paused", "ledger_failed", "report_failed"):
            self.warnings = [*self.warnings[-19:], line_of(event)]


def line_of(event: dict[str, Any]) -> str:
    """The event in at most 500 characters, without its time."""
    return json.dumps({k: v for k, v in event.items() if k != "time"})[:500]


class Soak:
    """Samples and kills until the time is up."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._rng = random.Random(seed)
        self._job = Job(place)
        self.series: defaultdict[tuple[str, str], Series] = defaultdict(list)
        self._worker: int | None = None

    def run(self, minutes: float) -> None:
        """Raises SystemExit if the job ends or does not come back."""
        self._job.wait_for_a_full_group(0)
        began, sampled = time.monotonic(), -SAMPLE_S
        while (now := time.monotonic() - began) < 60.0 * minutes:
            if now - sampled >= SAMPLE_S:
                sampled = now
                self._sample(now)
            formed = self._job.counts["generation_formed"]
            killed, killed_at = self._job.counts["killed members"], time.monotonic()
            self._job.kill_one(self._rng)
            if self._job.counts["killed members"] > killed:
                self._job.wait_for_a_full_group(formed + 1)
            # A member's end and its replacement are two changes. Newcomers must get as far as their
            # first step, or else none is let in for a while.
            left_s = killed_at + 2.0 / MOST_CHANGES_S - time.monotonic()
            time.sleep(max(left_s, FIRST_STEP_S))

    def end(self) -> dict[str, int]:
        """Stop the job; returns how often each thing happened."""
        code = self._job.stop()
        shown = ("generation_formed", "recovered", "checkpoint_committed", "loop_paused")
        kills = ("killed members", "killed spares")
        counts = {name: self._job.counts[name] for name in (*kills, *shown)}
        ends = {"committed": self._job.committed, "exit_code": code}
        return {**counts, "survivors": self._job.survivors, **ends}

    @property
    def warnings(self) -> Sequence[str]:
        return self._job.warnings

    def _sample(self, now: float) -> None:
        processes = self._job.processes()
        if processes.get("worker") != self._worker:  # the last one was lost after all
            self._worker = processes.get("worker")
            for key in [key for key in self.series if key[0] == "worker"]:
                del self.series[key]
        for name, pid in processes.items():
            self._note(now, name, of_process(pid))
        printed = f"{self._job.survivor}.log"  # its script prints a line each step
        for path in (self._place.runtime, self._place.logs, self._place.checkpoints):
            self._note(now, f"{path.name}/", of_directory(path, printed))

    def _note(self, now: float, what: str, figures: Iterable[tuple[str, float]]) -> None:
        with contextlib.suppress(OSError):  # the process has just ended
            for unit, value in figures:
                self.series[what, unit].append((now, value))


def report(series: dict[tuple[str, str], Series], groups: int) -> bool:
    """Print the table; returns whether something grows. groups: how many were formed."""
    head = f"{'what':24}{'unit':12}{'first':>10}{'last':>10}{'an hour':>10}{'noise':>9}"
    print(head, "", sep="\n")
    growing = False
    for (what, unit), values in series.items():
        t = trend(values)
        least = LEAST[unit]
        if (what, unit) == ("worker", "MiB"):
            least += TORCH_KEEPS_MIB * groups / 2  # of the second half
        grows = t.grows(least)
        growing |= grows
        print(
            f"{what:24}{unit:12}{t.first:10.1f}{t.last:10.1f}{t.per_hour:+10.1f}{t.noise:9.2f}"
            f"  {'GROWS' if grows else 'flat'}"
        )
    return growing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--samples", type=Path, help="write every sample to this file, as JSON lines"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the job ends too
    place = Place(Path(tempfile.mkdtemp(prefix="el-soak-", dir="/tmp")))
    soak = Soak(place, options.seed)
    try:
        soak.run(options.minutes)
    finally:
        counts = soak.end()
        if options.samples is not None:
            rows = [{"what": w, "unit": u, "series": s} for (w, u), s in soak.series.items()]
            options.samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for warning in soak.warnings:
            print(warning)
        print(", ".join(f"{name} {count}" for name, count in counts.items()), end="\n\n")
    growing = report(soak.series, counts["generation_formed"])
    left = list(place.runtime.glob("*/*"))
    shutil.rmtree(place.root)
    if left:
        print(f"left behind: {left}")
    return int(growing or bool(left))


if __name__ == "__main__":
    sys.exit(main())
