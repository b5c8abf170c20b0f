"""The ends of a job, with their exit codes."""

from __future__ import annotations

from elastic.core.coordinator import effects as fx
from elastic.core.coordinator.decisions import GiveUp
from elastic.core.coordinator.stopping import Stop
from elastic.core.membership import Failure
from elastic.core.restarts import Verdict


def complete(stop: Stop | None) -> fx.EndJob:
    """Every script has ended, perhaps because the job was asked to stop."""
    if stop is None:
        return fx.EndJob(exit_code=0)
    return fx.EndJob(exit_code=stop.exit_code, message=stop.reason)


def failed(verdict: Verdict, failure: Failure, hang: str = "") -> fx.EndJob:
    """No restart follows this failure. hang: what is known of the last one, if it is of that."""
    exit_code = 78 if verdict is Verdict.NOT_RETRYABLE else 1
    message = hang if failure.place else ""
    return fx.EndJob(exit_code=exit_code, verdict=verdict, failure=failure, message=message)


def gave_up(decision: GiveUp) -> fx.EndJob:
    """The group never holds."""
    message = (
        "the group breaks again and again although no member is lost and no step is "
        f"committed; a member reported: {decision.detail}"
    )
    return fx.EndJob(exit_code=1, message=message)


def stopped(stop: Stop, *, in_time: bool, grace_s: float, restart_all: bool) -> fx.EndJob:
    """As asked; or the workers were not done with it when the grace was over."""
    if in_time:
        return fx.EndJob(exit_code=stop.exit_code, message=stop.reason)
    missed = "end" if restart_all else "reach a step boundary and save"
    message = f"the workers did not {missed} within {grace_s:g} s of: {stop.reason}"
    return fx.EndJob(exit_code=stop.exit_code, message=message)
