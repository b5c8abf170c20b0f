"""Who keeps the others waiting, and where: a verdict from the stacks of all ranks at one instant.

In a step every rank waits for the slowest one, so what most of them do says nothing. Who has not
come to what the others wait for is told by what it does instead: its stack ends in the script, or
it has begun fewer collectives than the others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.core.membership import WorkerId
from elastic.core.whereabouts import Answer, ChildStack, Frame, Place, Whereabouts

_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_ENGINE = "/torch/autograd/"
_LOADER = "/torch/utils/data/"
_GROUP = "worker/group/"
_UNDECIDED = (Answer.STOPPED, Answer.NONE, Answer.ABSENT)
_FREED = 0.25  # of the time for which another one hangs
_MOST_SHOWN = 4  # places at which ranks are; of more, how many there are

_DOING = {
    Place.STARTING: "before session.steps()",
    Place.JOINING: "joining the group",
    Place.BOUNDARY: "at a step boundary",
    Place.BETWEEN: "between two steps",
    Place.DATA: "loading data",
    Place.FORWARD: "in the forward pass",
    Place.BACKWARD: "in the backward pass",
    Place.OPTIMIZER: "after the backward pass",
    Place.COMMIT: "at the end of the step",
    Place.MEETING: "at session.run",
    Place.RUN: "in session.run",
    Place.SAVING: "saving a checkpoint",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """A rank for which others wait, or that hangs by itself."""

    rank: int
    worker: WorkerId
    node: str
    doing: str
    """In words, without its name: "is loading data, in `__getitem__`, data.py:41, for 34 s"."""
    frame: Frame | None = None
    """Where it is in the script, if it waits there for nobody else."""
    place_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict. text: a sentence for people; empty if nothing is known of any rank."""

    odd: tuple[Odd, ...] = ()
    waiting: tuple[int, ...] = ()
    """Ranks that wait for them."""
    text: str = ""


def diagnose(ranks: Sequence[Whereabouts]) -> Diagnosis:
    """Who of the members of a group that stands still keeps the others waiting."""
    if not ranks:
        return Diagnosis()
    late = [r for r in ranks if not _waits(r)]
    waiting = [r for r in ranks if _waits(r)]
    late, waiting = _without_freed(late, waiting)
    late, waiting = _without_behind(late, waiting)
    apart = not late
    if apart:
        late, waiting = _apart(waiting)
    if not late:
        return Diagnosis(waiting=_numbers(waiting), text=_all_wait(waiting))
    odd = tuple(_odd(r, apart=apart) for r in late)
    return Diagnosis(odd=odd, waiting=_numbers(waiting), text=_verdict(odd, waiting))


def where_it_hangs(rank: Whereabouts) -> Frame | None:
    """The script's innermost frame, where the worker waits for no other one: None for those that
    stand in a collective, or of which it is not known."""
    if rank.answer in _UNDECIDED or _waits(rank):
        return None
    return _location(rank)[0]


# ---- who waits


def _waits(r: Whereabouts) -> bool:
    """Its main thread stands where it can go on only when others have come there too."""
    if r.answer in _UNDECIDED:
        return False
    if not r.frames:
        return r.place in (Place.MEETING, Place.BACKWARD, Place.JOINING)
    inner = _innermost(r.frames)
    if inner is None or inner.is_scripts:
        return False
    if r.place in (Place.MEETING, Place.JOINING) or _is_collective(inner):
        return True
    if r.place is Place.BACKWARD and _ENGINE in inner.file:
        return True
    return inner.is_ours and r.place in (Place.BACKWARD, Place.COMMIT)


def _innermost(frames: Sequence[Frame]) -> Frame | None:
    """Where a thread waits, without Python's own ways of waiting."""
    for frame in frames:
        if frame.is_scripts or frame.is_ours or "-packages/" in frame.file:
            return frame
    return frames[0] if frames else None


def _is_collective(frame: Frame) -> bool:
    ours = frame.is_ours and _GROUP in frame.file
    return ours or any(part in frame.file for part in _COLLECTIVES)


def _own_collective(r: Whereabouts) -> Frame | None:
    """The script's frame that has called torch.distributed by itself."""
    for before, frame in zip(r.frames, r.frames[1:], strict=False):
        if frame.is_ours:
            return None
        if frame.is_scripts and any(part in before.file for part in _COLLECTIVES):
            return frame if _is_collective(_innermost(r.frames) or frame) else None
    return None


def _without_freed(
    late: list[Whereabouts], waiting: list[Whereabouts]
) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """Those that have come to their place only now have waited, and were freed by one that had
    heard of the new group before they were asked."""
    longest_s = max((r.place_s for r in late), default=0.0)
    freed = [r for r in late if r.answer is Answer.GIVEN and r.place_s < _FREED * longest_s]
    return [r for r in late if r not in freed], waiting + freed


def _without_behind(
    late: list[Whereabouts], waiting: list[Whereabouts]
) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """Those that stand in the backward pass of a step, but have begun fewer collectives in it than
    others, wait for nobody: an engine's own thread computes, and cannot be seen."""
    passing = [r for r in waiting if r.place is Place.BACKWARD and _own_collective(r) is None]
    steps = Counter(r.committed for r in passing)
    if not passing or late:
        return late, waiting
    step = steps.most_common(1)[0][0]
    most = max(r.collectives for r in passing if r.committed == step)
    behind = [r for r in passing if r.committed == step and r.collectives < most]
    return behind, [r for r in waiting if r not in behind]


def _apart(waiting: list[Whereabouts]) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """All wait, but not for the same: those are odd that are fewest; of equally many, those in
    collectives of their own, which the script calls and not every rank does."""
    groups: dict[tuple[object, ...], list[Whereabouts]] = defaultdict(list)
    for r in waiting:
        own = _own_collective(r)
        groups[(own, r.committed) if own else (r.place, r.committed)].append(r)
    if len(groups) == 1:
        return [], waiting
    usual = max(groups, key=lambda key: (len(groups[key]), not isinstance(key[0], Frame)))
    odd = [r for key, group in groups.items() if key != usual for r in group]
    return sorted(odd, key=lambda r: r.rank), groups[usual]


# ---- in words


def doing(r: Whereabouts) -> str:
    """What a rank does, in words."""
    part = _DOING.get(r.place, "")
    if r.answer is Answer.ABSENT:
        return "does not tell: its agent is out of contact"
    if r.answer is Answer.STOPPED:
        return f"is stopped by a signal{f', last seen {part}' if part else ''}"
    frame, child = _location(r)
    if r.answer is Answer.NONE:
        return f"does not answer{f', last seen {part}' if part else ''}"
    if frame is None:
        return f"is {part or 'at a place that is not known'}{_for(r)}"
    whose = f" of its child {child.pid}" if child is not None else ""
    silent = "does not answer, and is " if r.answer is Answer.SIGNALLED else "is "
    return f"{silent}{f'{part}, ' if part else ''}in {frame}{whose}{_for(r)}"


def _odd(r: Whereabouts, *, apart: bool) -> Odd:
    """apart: it waits as the others do, but not for the same."""
    words, frame = doing(r), None
    if apart:
        frame = _own_collective(r)
        if frame is not None:
            words = f"waits in a collective of its own, in {frame}"
    elif r.answer not in _UNDECIDED:
        frame = _location(r)[0]
    return Odd(
        rank=r.rank, worker=r.worker, node=r.node, doing=words, frame=frame, place_s=r.place_s
    )


def _for(r: Whereabouts) -> str:
    return f", for {r.place_s:.0f} s" if r.place_s >= 0.5 else ""


def _location(r: Whereabouts) -> tuple[Frame | None, ChildStack | None]:
    """The innermost frame of the script; of a child that loads data, where the worker waits for
    one. Else the innermost there is."""
    if r.frames and any(_LOADER in f.file for f in r.frames[:6]):
        for child in r.children:
            if (frame := _script_frame(child.frames)) is not None:
                return frame, child
    return _script_frame(r.frames) or (r.frames[0] if r.frames else None), None


def _script_frame(frames: Iterable[Frame]) -> Frame | None:
    return next((f for f in frames if f.is_scripts), None)


def _verdict(odd: Sequence[Odd], waiting: Sequence[Whereabouts]) -> str:
    """One clause for all that do the same."""
    missed = _missed(waiting)
    same: dict[str, list[Odd]] = defaultdict(list)
    for o in odd:
        same[o.doing.partition(", for ")[0]].append(o)
    clauses = []
    for these in list(same.values())[:_MOST_SHOWN]:
        several = len(these) > 1
        words = these[0].doing
        if several:
            words = words.replace("is ", "are ", 1) if words.startswith("is ") else words
        subject = _who(these)
        if not missed:
            clauses.append(f"{subject} {words}")
            continue
        has, it = ("have", "they") if several else ("has", "it")
        clauses.append(f"{subject} {has} {missed}: {it} {words}")
    if len(same) > _MOST_SHOWN:
        clauses.append(f"and {len(odd)} ranks in all, at {len(same)} places")
    if waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        them = "it" if len(odd) == 1 else "them"
        clauses.append(f"{_ranks(_numbers(waiting))} {verb} for {them}")
    return "; ".join(clauses)


def _who(these: Sequence[Odd]) -> str:
    nodes = sorted({o.node for o in these})
    named = ", ".join(nodes[:_MOST_SHOWN]) + (", ..." if len(nodes) > _MOST_SHOWN else "")
    return f"{_ranks([o.rank for o in these])} (node{'s' * (len(nodes) > 1)} {named})"


def _missed(waiting: Sequence[Whereabouts]) -> str:
    """What the others wait at."""
    if not waiting:
        return ""
    kinds = Counter((r.place, r.committed) for r in waiting)
    place, step = kinds.most_common(1)[0][0]
    if place is Place.JOINING:
        return "not come to the new group"
    after = f"after step {step - 1}" if step else "before the first step"
    if place in (Place.MEETING, Place.RUN):
        return f"not come to what the others call {after}"
    if place in (Place.BACKWARD, Place.FORWARD, Place.OPTIMIZER, Place.COMMIT):
        what = "all-reduce" if place is Place.BACKWARD else "collective"
        return f"not entered the {what} of step {step}"
    return f"not come to where the others are {after}"


def _all_wait(waiting: Sequence[Whereabouts]) -> str:
    first = waiting[0]
    frame = _location(first)[0]
    at = f", in {frame}" if frame is not None else ""
    if len(waiting) == 1:
        return f"rank {first.rank} (node {first.node}) waits {_DOING.get(first.place, '')}{at}"
    return (
        f"all ranks wait {_DOING.get(first.place, 'for each other')} of step {first.committed}"
        f"{at}: what they send to each other does not arrive"
    )


def _numbers(ranks: Iterable[Whereabouts]) -> tuple[int, ...]:
    return tuple(sorted(r.rank for r in ranks))


def _ranks(numbers: Iterable[int]) -> str:
    """The ranks in words: "ranks 0 to 5, 7"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    parts = [", ".join(map(str, range(a, b + 1))) if b - a < 3 else f"{a} to {b}" for a, b in spans]
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank{'' if single else 's'} {', '.join(parts)}"
