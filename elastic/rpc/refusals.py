"""Reports what strangers are refused, without letting them fill the job's events and its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from elastic.rpc.security import Report

AT_ONCE = 10
EVERY_S = 300.0
"""After AT_ONCE refusals one more is reported in so many seconds: 288 a day at most."""


class SparingReport:
    """Passes on the first refusals and then few of them, each with the number left out before it.

    One caller that is refused may call a thousand times a second. Other events are not for it.
    """

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._may_report = float(AT_ONCE)
        self._since = clock()
        self._left_out = 0

    def __call__(self, name: str, /, **fields: Any) -> None:
        now = self._clock()
        earned = (now - self._since) / EVERY_S
        self._since, self._may_report = now, min(float(AT_ONCE), self._may_report + earned)
        if self._may_report < 1.0:
            self._left_out += 1
            return
        self._may_report -= 1.0
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        self._report(name, **fields)
