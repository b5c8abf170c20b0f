"""Finds the ranks that keep the others waiting, and where, from the stacks of all ranks at one
instant.

In a step every rank waits for the slowest one, so what most ranks do says nothing. A rank that has
not come to what the others wait for shows it in one of two ways: its stack ends in the script, or
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
_FREED = 0.25  # see _without_freed: share of the time for which another rank hangs
_MOST_SHOWN = 4  # most groups of ranks, and most nodes, that a text names one by one

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

_IN_STEP = (Place.FORWARD, Place.BACKWARD, Place.OPTIMIZER, Place.COMMIT)

_VERBS = {
    "is ": "are ",
    "does not answer, and is ": "do not answer, and are ",
    "does not answer": "do not answer",
    "waits ": "wait ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowOrHungRank:
    """A rank that others wait for, or that hangs by itself."""

    rank: int
    worker: WorkerId
    node: str
    doing: str
    """The predicate of a sentence: "is loading data, in `__getitem__`, data.py:41, for 34 s"."""
    frame: Frame | None = None
    """Where it hangs in the script, or waits in a collective of its own. None if not known."""
    place_s: float = 0.0
    """How long it has been in its Place, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on a group that stands still."""

    odd: tuple[SlowOrHungRank, ...] = ()
    waiting: tuple[int, ...] = ()
    """The ranks that wait for the odd ones."""
    text: str = ""
    """The verdict as a sentence for people. Empty if nothing is known of any rank."""


def diagnose(ranks: Sequence[Whereabouts]) -> Diagnosis:
    if not ranks:
        return Diagnosis()
    late = [r for r in ranks if not _waits(r)]
    waiting = [r for r in ranks if _waits(r)]
    late, waiting = _without_freed(late, waiting)
    late, waiting = _without_behind(late, waiting)
    apart = not late
    if apart:
        late, waiting = _split_by_place(waiting)
    if not late:
        return Diagnosis(waiting=_numbers(waiting), text=_all_wait(waiting))
    odd = tuple(_odd(r, apart=apart) for r in late)
    return Diagnosis(odd=odd, waiting=_numbers(waiting), text=_verdict(odd, waiting))


def where_it_hangs(rank: Whereabouts) -> Frame | None:
    """The script's innermost frame. None if the worker waits for another one, as in a collective,
    or if it is not known where it is."""
    if rank.answer in _UNDECIDED or _waits(rank):
        return None
    return _location(rank)[0]


# ---- which ranks wait


def _waits(r: Whereabouts) -> bool:
    """Whether its main thread waits at a place until other ranks have come there."""
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
    # In a call of session.run: another member has freed it from its collective.
    return inner.is_ours and r.place in (Place.BACKWARD, Place.COMMIT, Place.RUN)


def _innermost(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside of Python's standard library, in whose functions a thread may
    wait. If there is none, the innermost frame."""
    for frame in frames:
        if frame.is_scripts or frame.is_ours or "-packages/" in frame.file:
            return frame
    return frames[0] if frames else None


def _is_collective(frame: Frame) -> bool:
    ours = frame.is_ours and _GROUP in frame.file
    return ours or any(part in frame.file for part in _COLLECTIVES)


def _own_collective(r: Whereabouts) -> Frame | None:
    """The script's frame that called a collective of torch.distributed directly and waits in it."""
    for before, frame in zip(r.frames, r.frames[1:], strict=False):
        if frame.is_ours:
            return None
        if frame.is_scripts and any(part in before.file for part in _COLLECTIVES):
            return frame if _is_collective(_innermost(r.frames) or frame) else None
    return None


def _without_freed(
    late: list[Whereabouts], waiting: list[Whereabouts]
) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """Count ranks that have only just come to their place as waiting ones: a member that learned of
    the new group earlier freed them from their wait before they were asked where they are."""
    longest_s = max((r.place_s for r in late), default=0.0)
    freed = [r for r in late if r.answer is Answer.GIVEN and r.place_s < _FREED * longest_s]
    return [r for r in late if r not in freed], waiting + freed


def _without_behind(
    late: list[Whereabouts], waiting: list[Whereabouts]
) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """If no rank is late, count those in the backward pass that have begun fewer collectives there
    than others as late. They wait for nobody: the autograd engine's own thread computes, and its
    stack is not visible."""
    passing = [r for r in waiting if r.place is Place.BACKWARD and _own_collective(r) is None]
    steps = Counter(r.committed for r in passing)
    if not passing or late:
        return late, waiting
    step = steps.most_common(1)[0][0]
    most = max(r.collectives for r in passing if r.committed == step)
    behind = [r for r in passing if r.committed == step and r.collectives < most]
    return behind, [r for r in waiting if r not in behind]


def _split_by_place(waiting: list[Whereabouts]) -> tuple[list[Whereabouts], list[Whereabouts]]:
    """If all ranks wait, but not in the same place: all but the largest set of ranks are odd. Of
    equally large sets, those in a collective that the script itself calls are odd, because not
    every rank calls it."""
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
    part = _DOING.get(r.place, "")
    if r.answer is Answer.ABSENT:
        return "cannot be asked: its agent is out of contact"
    if r.answer is Answer.STOPPED:
        return f"is stopped by a signal{f', last seen {part}' if part else ''}"
    frame, child = _location(r)
    if r.answer is Answer.NONE:
        return f"does not answer{f', last seen {part}' if part else ''}"
    if frame is None:
        return f"is {part or 'at an unknown place'}{_for(r)}"
    whose = f" of its child {child.pid}" if child is not None else ""
    silent = "does not answer, and is " if r.answer is Answer.SIGNALLED else "is "
    return f"{silent}{f'{part}, ' if part else ''}in {frame}{whose}{_for(r)}"


def _odd(r: Whereabouts, *, apart: bool) -> SlowOrHungRank:
    """apart: the rank waits as the others do, but in another place."""
    words, frame = doing(r), None
    if apart:
        frame = _own_collective(r)
        if frame is not None:
            words = f"waits in a collective that the others have not entered, in {frame}"
    elif r.answer not in _UNDECIDED:
        frame = _location(r)[0]
    return SlowOrHungRank(
        rank=r.rank, worker=r.worker, node=r.node, doing=words, frame=frame, place_s=r.place_s
    )


def _for(r: Whereabouts) -> str:
    return f", for {r.place_s:.0f} s" if r.place_s >= 0.5 else ""


def _location(r: Whereabouts) -> tuple[Frame | None, ChildStack | None]:
    """The script's innermost frame. Where the worker waits for a child that loads data, the frame
    is the child's and the child is returned too. If no frame is the script's, the innermost one."""
    if r.frames and any(_LOADER in f.file for f in r.frames[:6]):
        for child in r.children:
            if (frame := _script_frame(child.frames)) is not None:
                return frame, child
    return _script_frame(r.frames) or (r.frames[0] if r.frames else None), None


def _script_frame(frames: Iterable[Frame]) -> Frame | None:
    return next((f for f in frames if f.is_scripts), None)


def _verdict(odd: Sequence[SlowOrHungRank], waiting: Sequence[Whereabouts]) -> str:
    """The verdict in words, with one clause for all ranks that do the same."""
    missed = _missed(waiting)
    same: dict[str, list[SlowOrHungRank]] = defaultdict(list)
    for o in odd:
        same[o.doing.partition(", for ")[0]].append(o)
    clauses = []
    for these in list(same.values())[:_MOST_SHOWN]:
        several = len(these) > 1
        words = _plural(these[0].doing) if several else these[0].doing
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


def _plural(words: str) -> str:
    """The predicate of `SlowOrHungRank.doing` for several ranks."""
    for one, many in _VERBS.items():
        if words.startswith(one):
            return many + words.removeprefix(one)
    return words


def _who(these: Sequence[SlowOrHungRank]) -> str:
    nodes = sorted({o.node for o in these})
    named = ", ".join(nodes[:_MOST_SHOWN]) + (", ..." if len(nodes) > _MOST_SHOWN else "")
    return f"{_ranks([o.rank for o in these])} (node{'s' * (len(nodes) > 1)} {named})"


def _missed(waiting: Sequence[Whereabouts]) -> str:
    """What the odd ranks have not come to, as most waiting ranks show; "" if none waits."""
    if not waiting:
        return ""
    kinds = Counter((r.place, r.committed) for r in waiting)
    place, step = kinds.most_common(1)[0][0]
    if place is Place.JOINING:
        return "not joined the new group"
    after = f"after step {step - 1}" if step else "before the first step"
    if place in (Place.MEETING, Place.RUN):
        return f"not reached the call that the others make {after}"
    if place in _IN_STEP:
        what = "all-reduce" if place is Place.BACKWARD else "collective"
        return f"not entered the {what} of step {step}"
    return f"not reached the point where the others wait {after}"


def _all_wait(waiting: Sequence[Whereabouts]) -> str:
    first = waiting[0]
    frame = _location(first)[0]
    doing = _DOING.get(first.place, "")
    if first.place in (Place.JOINING, Place.DATA, Place.SAVING):
        doing = f"while {doing}"
    elif first.place in _IN_STEP:
        doing += f" of step {first.committed}"
    where = "".join((f" {doing}" * bool(doing), f", in {frame}" if frame is not None else ""))
    if len(waiting) == 1:
        return f"rank {first.rank} (node {first.node}) waits{where}"
    return f"all ranks wait for each other{where}: their network traffic does not arrive"


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
