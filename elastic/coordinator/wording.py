"""Sentences for the typed reasons with which a job ends."""

from __future__ import annotations

from elastic.core.coordinator.effects import EndJob, RefuseNewcomers
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
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS and failure.place:
        seen = f" {effect.message}." if effect.message else ""
        return (
            f"the script hangs at the same place ({failure.place}) on different nodes before "
            f"another step is committed, so other nodes cannot help; {what}.{seen}{log}"
        )
    if effect.verdict is Verdict.SAME_FAILURE_NO_PROGRESS:
        return (
            f"the script fails the same way again before another step is committed, so restarting "
            f"cannot help; {what}.{log}"
        )
    return (
        f"more than {max_restarts} workers failed within {window_s:g} s, the last one: {what}."
        f"{log} Raise --max-restarts if such failures are expected"
    )


def refusal(effect: RefuseNewcomers) -> str:
    """Why newcomers are not let into the group, and what to do about it."""
    failure = effect.failure
    return (
        "workers that join fail in the same way each time, so none is let in for "
        f"{effect.retry_s:.0f} s and the group trains on as it is; the last one, "
        f"{failure.worker}: {failure.message}. Mend the script or the node: the next worker that "
        "starts runs it as it is then"
    )
