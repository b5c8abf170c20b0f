"""Finds the ranks that hold up the others step after step, and what they are slow in.

All ranks end a step together, since its all-reduce waits for the last one. So a rank is judged by
its *own* time: the step without the wait after its last local gradient. A slow rank takes longer
than the median of all ranks, and not only once. The median also handles ranks that share cores:
where most of them do, the ranks with a core for themselves are the exception, and no rank is slow.
For the same reason, the time that a rank waits for a core is judged by itself, and counts only if
it lasts.

Ranks report sums after the same committed steps. A *window* is the time between two such steps.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.core.membership import WorkerId

_MOST_PENDING = 4  # most reporting steps for which sums of some ranks may be missing


class Part(enum.Enum):
    """A part of a step that a rank can be slow in."""

    DATA = "data"
    """Waiting for the data loader."""
    TRANSFER = "transfer"
    """Bringing samples to the device."""
    COMPUTE = "compute"
    """Forward and backward pass, up to the last local gradient."""
    OPTIMIZER = "optimizer"
    """The rest of the step's block, after the backward pass."""
    BETWEEN = "between_steps"
    """The script's code between two steps."""
    CORES = "cores"
    """Ready to run, while other processes had its cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """The times of one rank in seconds, summed over its steps so far; see Pace in job.proto."""

    committed: int
    steps: int
    total_s: float = 0.0
    data_s: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    after_s: float = 0.0
    between_s: float = 0.0
    arrivals: int = 0
    reductions: int = 0
    no_core_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """When a rank is named slow, and when no longer. Delays are shares of the time of a step."""

    late: float = 0.12
    """The delay from which a rank is late in a window."""
    late_on_average: float = 0.15
    """The average delay that a rank also needs over `windows` (or `windows_for_cores`) windows."""
    windows: int = 3
    """The number of late windows in a row after which a rank is named slow."""
    very_late: float = 0.2
    """The average delay for which `windows` - 1 windows are enough, other than for cores."""
    windows_for_cores: int = 12
    """Like `windows`, if other processes take the rank's cores: such delays come and go."""
    least_s: float = 0.0005
    """The smallest delay that counts, in seconds a step: less is noise of clocks and schedulers."""
    fine: float = 0.06
    """The delay below which a window of a slow rank is fine."""
    fine_windows: int = 3
    """The number of fine windows in a row after which a rank is no longer slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that persistently holds up the others."""

    worker: WorkerId
    rank: int
    part: Part
    """What it is slow in."""
    late_s: float
    """Its mean delay a step, in seconds, over the windows that made it slow."""
    step_s: float
    """The mean duration of a step in these windows, in seconds."""
    since: int
    """The number of committed steps when the first of these windows began."""
    at: int
    """The number of committed steps when the last of these windows ended."""

    @property
    def share(self) -> float:
        """The delay as a share of a step."""
        return self.late_s / self.step_s if self.step_s > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison has changed."""

    slow: tuple[Straggler, ...] = ()
    """Ranks that are named slow now."""
    over: tuple[Straggler, ...] = ()
    """Ranks that are no longer slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """The mean times of a step on one rank in the newest window, in seconds."""

    rank: int
    parts: Mapping[Part, float]
    wait_s: float

    @property
    def own_s(self) -> float:
        """The time of a step without the wait for other ranks."""
        return sum(self.parts.values())

    @property
    def busy_s(self) -> float:
        """Its own time, without the wait for a core."""
        return self.own_s - self.parts[Part.CORES]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """A window with the delay of one rank in it."""

    begin: int
    end: int
    step_s: float
    late_s: float = 0.0
    excess: Mapping[Part, float] = field(default_factory=dict)
    """By part: the seconds a step that the rank takes longer than the median rank."""


class _Evidence:
    """The newest windows in a row in which a rank was late. Older ones would only blur them."""

    def __init__(self, most: int) -> None:
        self.windows: deque[_Window] = deque(maxlen=most)

    def share(self, newest: int) -> float:
        """The delay as a share of a step over the `newest` last windows. 0: there are fewer."""
        windows = list(self.windows)[-newest:]
        if len(windows) < newest:
            return 0.0
        return sum(w.late_s for w in windows) / sum(w.step_s for w in windows)

    def straggler(self, worker: WorkerId, rank: int) -> Straggler:
        windows, count = self.windows, len(self.windows)
        total: defaultdict[Part, float] = defaultdict(float)
        for window in windows:
            for part, more_s in window.excess.items():
                total[part] += more_s
        return Straggler(
            worker=worker,
            rank=rank,
            part=max(total, key=lambda part: total[part]),
            late_s=sum(w.late_s for w in windows) / count,
            step_s=sum(w.step_s for w in windows) / count,
            since=windows[0].begin,
            at=windows[-1].end,
        )


class Stragglers:
    """Compares the ranks of the present group, and keeps its findings over a change of group.

    A window takes O(ranks) time, and one window of each rank is kept.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy if policy is not None else Policy()
        self._generation = 0
        self._ranks: dict[WorkerId, int] = {}
        self._base: dict[WorkerId, Sums] = {}
        self._base_at = 0
        self._pending: dict[int, dict[WorkerId, Sums]] = {}
        self._fine: dict[WorkerId, int] = {}
        """For each slow rank: the number of fine windows in a row."""
        self._evidence: dict[tuple[WorkerId, bool], _Evidence] = {}
        """The evidence against a rank, without its waits for cores (key: True) and with them."""
        self._named: dict[WorkerId, Straggler] = {}
        self.newest: Mapping[WorkerId, RankTimes] = {}
        """The times of the group's newest window. Empty before the first one has ended."""
        self.worst = 0.0
        """The share of a step by which the slowest rank held up the others in that window."""

    @property
    def named(self) -> Sequence[Straggler]:
        """The ranks that are slow now, in rank order."""
        return sorted(self._named.values(), key=lambda s: s.rank)

    def regroup(self, generation: int, members: Sequence[WorkerId]) -> Verdict:
        """A new group trains from now on. members: in rank order. Slow members stay named."""
        self._generation = generation
        self._ranks = {worker: rank for rank, worker in enumerate(members)}
        self._base, self._base_at, self._pending = {}, 0, {}
        self._evidence, self._fine = {}, {}
        self.newest, self.worst = {}, 0.0
        gone = tuple(s for worker, s in self._named.items() if worker not in self._ranks)
        self._named = {
            worker: replace(s, rank=self._ranks[worker])
            for worker, s in self._named.items()
            if worker in self._ranks
        }
        return Verdict(over=gone)

    def heard(self, worker: WorkerId, generation: int, sums: Sums) -> Verdict:
        """A rank has reported sums. The same sums may come again."""
        if generation != self._generation or worker not in self._ranks:
            return Verdict()
        if sums.committed <= self._base_at:
            return Verdict()
        self._pending.setdefault(sums.committed, {})[worker] = sums
        return self._compare(sums.committed)

    def _compare(self, newest: int) -> Verdict:
        """End a window if the sums of all ranks are here, or enough of them are and too many
        reporting steps are pending to wait for the rest."""
        if len(self._pending[newest]) == len(self._ranks):
            return self._window_ends(newest)
        if len(self._pending) <= _MOST_PENDING:
            return Verdict()
        enough = max(2, (len(self._ranks) + 1) // 2)
        heard = [step for step, ranks in self._pending.items() if len(ranks) >= enough]
        if heard:
            return self._window_ends(min(heard))
        del self._pending[min(self._pending)]
        return Verdict()

    def _window_ends(self, step: int) -> Verdict:
        base, base_at, ends = self._base, self._base_at, self._pending[step]
        self._base, self._base_at = ends, step
        self._pending = {at: ranks for at, ranks in self._pending.items() if at > step}
        window = {
            worker: (base[worker], end)
            for worker, end in ends.items()
            if worker in base and end.steps > base[worker].steps
        }
        if len(window) < 2 or 2 * len(window) < len(self._ranks):
            return Verdict()
        return self._judge(window, base_at, step)

    def _judge(self, window: Mapping[WorkerId, tuple[Sums, Sums]], begin: int, end: int) -> Verdict:
        arrivals_known = all(
            b.arrivals - a.arrivals == b.reductions - a.reductions > 0 for a, b in window.values()
        )
        times = {
            worker: _times(self._ranks[worker], a, b, arrivals_known)
            for worker, (a, b) in window.items()
        }
        totals = [(b.total_s - a.total_s) / (b.steps - a.steps) for a, b in window.values()]
        self.newest, self.worst, step_s = times, 0.0, _median(totals)
        if step_s <= 0.0:
            return Verdict()  # the reported sums make no sense
        usual = {part: _median([t.parts[part] for t in times.values()]) for part in Part}
        usual_s = {
            Part.CORES: _median([t.own_s for t in times.values()]),
            Part.COMPUTE: _median([t.busy_s for t in times.values()]),
        }
        window_of_all = _Window(begin=begin, end=end, step_s=step_s)
        slow: list[Straggler] = []
        over: list[Straggler] = []
        for worker, found in times.items():
            late_s, busy_late_s = (
                found.own_s - usual_s[Part.CORES],
                found.busy_s - usual_s[Part.COMPUTE],
            )
            self.worst = max(self.worst, late_s / step_s)
            parts = {part: spent_s - usual[part] for part, spent_s in found.parts.items()}
            cores = {Part.CORES: parts.pop(Part.CORES)}
            known = self._named.get(worker)
            if known is not None:
                late_s = late_s if known.part is Part.CORES else busy_late_s
                if self._is_over(worker, late_s, step_s):
                    over.append(self._named.pop(worker))
                continue
            for by_itself, late, excess in ((True, busy_late_s, parts), (False, late_s, cores)):
                noted = replace(window_of_all, late_s=late, excess=excess)
                named = self._note(worker, by_itself, noted)
                if named is not None:
                    slow.append(named)
                    break
        return Verdict(slow=tuple(slow), over=tuple(over))

    def _note(self, worker: WorkerId, by_itself: bool, window: _Window) -> Straggler | None:
        """Add a window to the evidence. Returns the straggler if it is enough to name one."""
        policy, key = self._policy, (worker, by_itself)
        if window.late_s < max(policy.least_s, policy.late * window.step_s):
            self._evidence.pop(key, None)
            return None
        most = policy.windows if by_itself else policy.windows_for_cores
        evidence = self._evidence.setdefault(key, _Evidence(most))
        evidence.windows.append(window)
        sure = by_itself and evidence.share(policy.windows - 1) >= policy.very_late
        if not sure and evidence.share(most) < policy.late_on_average:
            return None
        self._forget(worker)
        named = self._named[worker] = evidence.straggler(worker, self._ranks[worker])
        return named

    def _is_over(self, worker: WorkerId, late_s: float, step_s: float) -> bool:
        fine = late_s < max(self._policy.least_s, self._policy.fine * step_s)
        self._fine[worker] = self._fine.get(worker, 0) + 1 if fine else 0
        if self._fine[worker] < self._policy.fine_windows:
            return False
        self._forget(worker)
        return True

    def _forget(self, worker: WorkerId) -> None:
        self._fine.pop(worker, None)
        for by_itself in (True, False):
            self._evidence.pop((worker, by_itself), None)


def _times(rank: int, begin: Sums, end: Sums, arrivals_known: bool) -> RankTimes:
    steps = end.steps - begin.steps
    parts = {
        Part.DATA: end.data_s - begin.data_s,
        Part.TRANSFER: end.transfer_s - begin.transfer_s,
        Part.OPTIMIZER: end.after_s - begin.after_s,
        Part.BETWEEN: end.between_s - begin.between_s,
    }
    wait_s = end.wait_s - begin.wait_s
    rest_s = end.total_s - begin.total_s - wait_s - sum(parts.values())
    known_s = max(0.0, rest_s) if arrivals_known else 0.0
    parts[Part.CORES] = min(known_s, max(0.0, end.no_core_s - begin.no_core_s))
    parts[Part.COMPUTE] = known_s - parts[Part.CORES]
    return RankTimes(
        rank=rank,
        parts={part: spent_s / steps for part, spent_s in parts.items()},
        wait_s=wait_s / steps,
    )


def _median(values: Sequence[float]) -> float:
    """The lower median: of two ranks, the slower one is compared with the faster one."""
    return sorted(values)[(len(values) - 1) // 2]
