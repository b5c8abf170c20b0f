"""Where in elastic.core histories come to when no fault is planted, so that one is looked for only
in those that come to its place: nothing can be other in the rest."""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tests.sim.mutants.probes import Place, Probes

if TYPE_CHECKING:
    from tests.sim.mutants.catalogue import Mutant


class Known(NamedTuple):
    """A history without any fault planted."""

    seed: int
    stress: str
    fingerprint: str


class Survey:
    """Which histories come where."""

    def __init__(self, found: dict[str, list[list[object]]]) -> None:
        self._histories = [Known(*h) for h in found["histories"]]  # type: ignore[arg-type]
        self._by_file: dict[str, list[tuple[Place, tuple[int, ...]]]] = defaultdict(list)
        for file, first, last, *turns in found["places"]:
            place = Place(file, first, last)  # type: ignore[arg-type]
            masks = tuple(int(str(turn), 16) for turn in turns)
            self._by_file[place.file].append((place, masks))

    def histories_for(self, mutant: Mutant, source: str) -> list[Known]:
        """Those that come to its place; first some for each way that a condition there turns out,
        the rarest before the others."""
        first, last = mutant.lines(source)
        here = [
            masks
            for place, masks in self._by_file[mutant.file]
            if place.first <= last and first <= place.last
        ]
        if not here:  # outside of functions
            return self._histories
        turns = sorted({mask for masks in here for mask in masks if mask}, key=int.bit_count)
        return [self._histories[number] for number in _in_turn(list(map(_members, turns)))]


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _in_turn(queues: Sequence[Iterator[int]]) -> Iterator[int]:
    """One of each, again and again, and none twice."""
    taken: set[int] = set()
    left = list(queues)
    while left:
        for queue in list(left):
            number = next((n for n in queue if n not in taken), None)
            if number is None:
                left.remove(queue)
            else:
                taken.add(number)
                yield number


def main(count: str) -> None:
    probes = Probes()  # before what it is to watch is imported
    surveyor = importlib.import_module("tests.sim.mutants.surveyor")
    print(json.dumps(surveyor.surveyed(int(count), probes)))


if __name__ == "__main__":
    main(sys.argv[1])
