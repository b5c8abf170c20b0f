"""Sentences for the typed reasons with which a job ends."""

from __future__ import annotations

from elastic.core.coordinator.effects import EndJob
from elastic.core.restarts import Verdict


def ending(effect: EndJob, max_restarts: int, window_s: float) -> str:
    """Why the job ended and what to do about it; empty for a good end."""
    failure = effect.failure
    if failure is None or effect.verdict is None:
        return effect.message
    what = f"worker {failure.worker}: {failure.message}"
    log = f" Its log: {failure.log}." if failure.log else ""
    if effect.verdict is Verdict.NOT_RETRYABLE:
        return f"{what}.{log}"
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS:
        return (
            f"the script fails the same way again before another step is committed, so restarting "
            f"can not help; {what}.{log}"
        )
    return (
        f"more than {max_restarts} workers failed within {window_s:g} s, the last one: {what}."
        f"{log} Raise --max-restarts if that is to be expected"
    )
