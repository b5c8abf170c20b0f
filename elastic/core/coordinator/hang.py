"""What is known of the last hang: who kept the others waiting, and where."""

from __future__ import annotations

from elastic.core.diagnosis import Diagnosis, Odd
from elastic.core.membership import WorkerId, WorkerStatus


class Hang:
    """The newest verdict, for the words with which its workers are replaced."""

    def __init__(self) -> None:
        self._odd: dict[WorkerId, Odd] = {}
        self._generation, self._at = 0, 0.0
        self.text = ""
        """The verdict in words; empty before the first."""

    def explained(self, generation: int, verdict: Diagnosis, now: float) -> None:
        """The members of this generation have told where they are."""
        self._odd = {odd.worker: odd for odd in verdict.odd}
        self._generation, self._at = generation, now
        self.text = verdict.text

    def of(self, worker: WorkerStatus, now: float) -> tuple[str, str]:
        """(in words, as "hung 20 s in train.py:47"; FILE:LINE of the script, where it waits for
        nobody) of one that has not come out of the group that hung; empty where not known."""
        odd = self._odd.get(worker.worker)
        if odd is None or worker.generation != self._generation:
            return "", ""
        if odd.frame is None:
            return odd.doing, ""
        lasts_s = odd.place_s + now - self._at
        return f"hung {lasts_s:.0f} s in {odd.frame.short_place}", odd.frame.place
