"""Finds which places in elastic.core each history reaches without any fault. A planted fault is then
hunted only in histories that reach its place: it changes nothing in the others."""

from __future__ import annotations

import functools
import importlib
import json
import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
    """Knows which histories reach which places."""

    def __init__(self, found: dict[str, list[list[object]]]) -> None:
        self._histories = [Known(*h) for h in found["histories"]]  # type: ignore[arg-type]
        kinds: dict[str, int] = defaultdict(int)
        for number, known in enumerate(self._histories):
            kinds[known.stress] |= 1 << number
        self._kinds = list(kinds.values())
        self._by_file: dict[str, list[tuple[Place, tuple[int, ...]]]] = defaultdict(list)
        for file, first, last, *turns in found["places"]:
            place = Place(file, first, last)  # type: ignore[arg-type]
            masks = tuple(int(str(turn), 16) for turn in turns)
            self._by_file[place.file].append((place, masks))

    def histories_for(self, mutant: Mutant, source: str) -> list[Known]:
        """Return the histories that reach the mutant's place. They come in turn from three orders,
        each with the rarest first: by what they find at the place, by what they find elsewhere in
        the file, and by kind of stress."""
        first, last = mutant.lines(source)
        places = self._by_file[mutant.file]
        here = [m for p, masks in places if p.first <= last and first <= p.last for m in masks]
        if not here:  # the place is outside of functions
            return self._histories
        come = functools.reduce(operator.or_, here)
        elsewhere = [mask & come for _, masks in places for mask in masks]
        by_kind = [mask & come for mask in self._kinds]
        orders = [_in_turn(_rarest_first(masks)) for masks in (here, elsewhere, by_kind)]
        return [self._histories[number] for number in _in_turn(orders)]


def _rarest_first(masks: Iterable[int]) -> list[Iterator[int]]:
    return list(map(_members, sorted({m for m in masks if m}, key=int.bit_count)))


def _members(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _in_turn(queues: Sequence[Iterator[int]]) -> Iterator[int]:
    """Yield one number of each queue in turn, and none twice."""
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
    probes = Probes()  # before the modules to watch are imported
    surveyor = importlib.import_module("tests.sim.mutants.surveyor")
    print(json.dumps(surveyor.surveyed(int(count), probes)))


if __name__ == "__main__":
    main(sys.argv[1])
