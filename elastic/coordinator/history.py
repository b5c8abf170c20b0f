"""Keeps what the page shows of the past: curves, events and nodes that have disconnected."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic.core.curves import Curves, Sample
from elastic.core.histogram import Histogram
from elastic.runtime.journal import Entry

SAMPLE_EVERY_S = 2.0
MOST_ENTRIES = 120
_MOST_DETAILED = 10  # entries that keep a traceback or the end of a log
_LONGEST = 400  # characters of a text
_LONGEST_DETAIL = 4000
_MOST_DEPARTED = 1000
_REMEMBERED_S = 3600.0

_SHOWN = frozenset(
    {
        *("job_started", "job_finished", "job_ended", "stop_requested", "elected", "deposed"),
        *("leadership_in_doubt", "leadership_confirmed", "store_rolled_back"),
        *("generation_formed", "recovered", "state_restored", "state_differed"),
        *(
            "worker_failed",
            "newcomers_refused",
            "peers_unreachable",
            "hang",
            "slow_step",
            "step_was_slow",
        ),
        *("node_connected", "node_lost", "node_refused", "node_leaving", "node_drained"),
        *("node_quarantined", "node_cleared", "leave_timed_out", "left_early"),
        *("checkpoint_committed", "checkpoint_abandoned", "checkpoint_damaged"),
        "checkpoints_set_aside",
        *("ledger_failed", "ledger_continued", "curve_failed", "curve_continued"),
        *("loop_paused", "process_stopped", "warning"),
    }
)
_DETAILS = ("traceback", "log_tail")
_LEFT_OUT = frozenset(
    {"members", "ranks", "slot_seconds", "log_dir", "unreached", "left_out", *_DETAILS}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """A journal entry, shortened for the page. `fields` are JSON scalars."""

    number: int
    unix_s: float
    name: str
    severity: str
    fields: Mapping[str, Any]
    detail: str = ""
    """A traceback, or the end of a worker's log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Departed:
    """A node whose agent is no longer connected."""

    unix_s: float
    as_wanted: bool
    """The node was leaving or drained when it disconnected."""


class JobHistory:
    """Listens to the leader's journal and collects samples. The history begins with this process:
    earlier leaders have stored none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.curves = Curves()
        self.entries: deque[HistoryEntry] = deque(maxlen=MOST_ENTRIES)
        self.departed: dict[str, Departed] = {}
        """Departed nodes by name, the longest gone first."""
        self._clock = clock
        self._count = 0
        self._steps, self._steps_s = 0, 0.0
        self._last = Sample()

    # ---- what happens

    def __call__(self, entry: Entry) -> None:
        if entry.name not in _SHOWN:
            return
        self._count += 1
        detail = next((str(t) for name in _DETAILS if (t := entry.fields.get(name))), "")
        shown = HistoryEntry(
            number=self._count,
            unix_s=round(entry.unix_s, 3),
            name=entry.name,
            severity=entry.severity,
            fields={k: _scalar(v) for k, v in entry.fields.items() if k not in _LEFT_OUT},
            detail=detail[-_LONGEST_DETAIL:],
        )
        self.entries.append(shown)
        if detail:
            self._forget_details()
        self._note_node(entry)
        if entry.name == "generation_formed":
            self._resized(int(entry.fields["world_size"]))

    def sample(self, sample: Sample, steps: Histogram) -> None:
        """Add a sample of the job's present state. steps: the durations of all its steps so far."""
        count, total_s = sum(steps.counts), steps.total
        more, more_s = count - self._steps, total_s - self._steps_s
        self._steps, self._steps_s = count, total_s
        step_s = more_s / more if 0 < more < count and more_s > 0.0 else None
        self._last = replace(sample, step_s=step_s)
        self.curves.add(self._clock(), self._last)

    # ---- inside

    def _resized(self, world_size: int) -> None:
        """Add a sample at once: groups may live shorter than the time between samples."""
        last = self._last
        sample = Sample(
            step=last.step,
            world_size=world_size,
            wanted=max(last.wanted, world_size),
            samples_per_s=last.samples_per_s,
        )
        self.curves.add(self._clock(), sample)

    def _note_node(self, entry: Entry) -> None:
        node = str(entry.fields.get("node", ""))
        if entry.name == "node_connected":
            self.departed.pop(node, None)
        elif entry.name == "node_lost":
            as_wanted = bool(entry.fields.get("as_wanted"))
            self.departed[node] = Departed(unix_s=entry.unix_s, as_wanted=as_wanted)
            oldest = next(iter(self.departed))
            is_old = entry.unix_s - self.departed[oldest].unix_s > _REMEMBERED_S
            if is_old or len(self.departed) > _MOST_DEPARTED:
                del self.departed[oldest]

    def _forget_details(self) -> None:
        detailed = [n for n, e in enumerate(self.entries) if e.detail]
        for index in detailed[:-_MOST_DETAILED]:
            self.entries[index] = replace(self.entries[index], detail="")


def _scalar(value: Any) -> Any:
    """Convert a value to a JSON scalar that fits in a line of text."""
    if isinstance(value, bool) or value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value[:8])) + (" ..." if len(value) > 8 else "")
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
