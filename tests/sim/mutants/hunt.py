"""Runs histories until one breaks a promise: started where a fault is planted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import cycle

from tests.sim.history import check
from tests.sim.plan import KINDS
from tests.sim.pool import hurry
from tests.sim.seeds import ONCE_FAILED

_SCRIPTS = ("recovery.py", "worker/participation.py")


def main(histories: int, file: str) -> None:
    hurry()
    print(json.dumps(hunt(histories, file)))


def hunt(histories: int, file: str) -> dict[str, object]:
    """The first violation within so many histories, or how many were run in vain."""
    for number, (seed, stress) in enumerate(_histories(histories, file), 1):
        try:
            found = check(seed, stress=stress)
        except Exception as error:  # noqa: BLE001 - whatever a fault leads to
            found = [f"{type(error).__name__}: {error}"]
        if found:
            history = f"{seed}/{stress}" if stress else str(seed)
            return {"histories": number, "found": found[0], "history": history}
    return {"histories": histories, "found": "", "history": ""}


def _histories(count: int, file: str) -> Iterator[tuple[int, str]]:
    """Those that once failed, then seeds: every other one under one kind of stress, of what the
    faulty file is for."""
    yield from ONCE_FAILED[:count]
    kinds = cycle(("script",) if file in _SCRIPTS else [kind for kind in KINDS if kind])
    for number in range(count - len(ONCE_FAILED)):
        yield number // 2, next(kinds) if number % 2 else ""


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
