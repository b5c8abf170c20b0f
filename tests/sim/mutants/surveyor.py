"""Runs histories on a source with probes, for a survey."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle

from tests.sim.checkers import violations
from tests.sim.draw import plan
from tests.sim.mutants.probes import Probes
from tests.sim.mutants.survey import Known
from tests.sim.pool import hurry
from tests.sim.seeds import ONCE_FAILED
from tests.sim.stress import KINDS
from tests.sim.world import World

_HISTORIES_A_COLLECTION = 50


def surveyed(count: int, probes: Probes) -> dict[str, object]:
    """Return the histories, and for each place two sets of them, as the bits of a number: those in
    which its value was false, or it has none, and those in which it was true."""
    hurry()
    histories: list[Known] = []
    masks: dict[int, int] = defaultdict(int)
    for seed, stress in _histories(count):
        number = len(histories)
        probes.seen.clear()
        journal = World(plan(seed, stress)).run()
        if found := violations(journal):
            print(f"{seed}/{stress} fails without any fault: {found[0]}", file=sys.stderr)
            continue
        histories.append(Known(seed, stress, journal.fingerprint()))
        for turn in probes.seen:
            masks[turn] |= 1 << number
        if len(histories) % _HISTORIES_A_COLLECTION == 0:
            gc.collect()
    places = [
        [*place, f"{masks[2 * number]:x}", f"{masks[2 * number + 1]:x}"]
        for number, place in enumerate(probes.places)
    ]
    return {"histories": histories, "places": places}


def _histories(count: int) -> Iterator[tuple[int, str]]:
    """Those that once failed, then seeds: two of three under one kind of stress."""
    yield from ONCE_FAILED[:count]
    kinds = cycle([kind for kind in KINDS if kind])
    for number in range(count - len(ONCE_FAILED)):
        yield number // 3, next(kinds) if number % 3 else ""
