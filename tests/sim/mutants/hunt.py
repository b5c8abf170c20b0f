"""Runs histories on a source with a planted fault until one of them breaks a promise."""

from __future__ import annotations

import gc
import json
import signal
import sys

from tests.sim.checkers import violations
from tests.sim.draw import plan
from tests.sim.mutants.survey import Known
from tests.sim.pool import hurry
from tests.sim.world import World

_HISTORIES_A_COLLECTION = 50
_PATIENCE_S = 20


def main() -> None:
    hurry()
    signal.signal(signal.SIGALRM, _give_up)
    print(json.dumps(hunt([Known(*known) for known in json.load(sys.stdin)])))


def _give_up(*_: object) -> None:
    raise TimeoutError("the history does not end")


def hunt(histories: list[Known]) -> dict[str, object]:
    """Return the first violation, and in how many histories the fault has changed anything."""
    changed = 0
    for number, (seed, stress, fingerprint) in enumerate(histories, 1):
        signal.alarm(_PATIENCE_S)
        try:
            journal = World(plan(seed, stress)).run()
            found = violations(journal)
            changed += journal.fingerprint() != fingerprint
        except Exception as error:  # noqa: BLE001 - a fault can raise anything
            found = [f"{type(error).__name__}: {error}"]
        if found:
            history = f"{seed}/{stress}" if stress else str(seed)
            return {"histories": number, "found": found[0], "history": history, "changed": changed}
        if number % _HISTORIES_A_COLLECTION == 0:
            gc.collect()
    return {"histories": len(histories), "found": "", "history": "", "changed": changed}


if __name__ == "__main__":
    main()
