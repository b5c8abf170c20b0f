"""Tells the service manager that runs this daemon, such as systemd, how it is: sd_notify(3).

The daemon's condition is looked at in beats of its event loop. So a loop that hangs sends no
watchdog beat, and what was not heard once is said again. Nothing here delays or ends the daemon:
a message that cannot be sent at once is dropped, and the next beat tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

NOTICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""They are this process's own: its children must not speak for it."""

_BEAT_S = 2.0
_STARTING_BEAT_S = 0.25
_LEAST_BEAT_S = 0.01
_START_EXTENDED_S = 30.0  # by each beat: a start that waits for etcd is no start that hangs
_SUCCESSOR_S = 60.0  # as long as a trial start may take
_MOST_STATUS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """What a service manager can know of a daemon."""

    ready: bool
    status: str
    """One line for people."""


class ServiceNotice:
    """One daemon's line to its service manager; without one nothing is ever sent.

    Use `of_environment`.
    """

    def __init__(self, variables: Mapping[str, str], pid: int | None = None) -> None:
        self._variables = dict(variables)
        self._address = _address(variables.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(variables, os.getpid() if pid is None else pid)
        self._condition: Callable[[], Condition] | None = None
        self._said_ready = False
        self._said_status = ""
        self._reloading = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceNotice:
        """Takes its variables out of the environment, so that no child process inherits them."""
        found = {name: environment.pop(name) for name in NOTICE_VARIABLES if name in environment}
        return cls(found)

    def hand_on(self, environment: MutableMapping[str, str]) -> None:
        """Put them back, for the program that takes this one's place in the process.

        It has time to start before the watchdog counts as before.
        """
        environment.update(self._variables)
        if self._watchdog_s is not None:
            patient_s = max(self._watchdog_s, _SUCCESSOR_S)
            self._send([f"WATCHDOG_USEC={_microseconds(patient_s)}"])

    @contextlib.contextmanager
    def telling(self, condition: Callable[[], Condition]) -> Iterator[None]:
        """Within, the running loop's beats tell of `condition`."""
        if self._address is None:
            yield
            return
        self._condition = condition
        beats = asyncio.get_running_loop().create_task(self._beat())
        try:
            yield
        finally:
            beats.cancel()

    def stopping(self, within_s: float) -> None:
        """The daemon ends, in `within_s` seconds at most."""
        self._say(self._news())  # by itself: systemd does not look at READY=1 beside STOPPING=1
        self._send([f"EXTEND_TIMEOUT_USEC={_microseconds(within_s)}", "STOPPING=1"])

    def reloading(self) -> None:
        """The daemon begins anew, until it says `reloaded` or its successor is ready."""
        self._reloading = True
        now = time.clock_gettime(time.CLOCK_MONOTONIC)
        self._send(["RELOADING=1", f"MONOTONIC_USEC={_microseconds(now)}"])

    def reloaded(self) -> None:
        """It goes on as it was."""
        self._reloading, self._said_ready = False, False
        self._say(self._news())

    # ---- beats

    async def _beat(self) -> None:
        while True:
            self._say([*self._news(), *self._signs_of_life()])
            await asyncio.sleep(self._interval_s())

    def _interval_s(self) -> float:
        usual_s = _BEAT_S if self._said_ready else _STARTING_BEAT_S
        if self._watchdog_s is not None:
            usual_s = min(usual_s, self._watchdog_s / 2)
        return max(usual_s, _LEAST_BEAT_S)

    def _signs_of_life(self) -> list[str]:
        signs = ["WATCHDOG=1"] if self._watchdog_s is not None else []
        if not self._said_ready or self._reloading:
            signs.append(f"EXTEND_TIMEOUT_USEC={_microseconds(_START_EXTENDED_S)}")
        return signs

    def _news(self) -> list[str]:
        """What the service manager has not heard yet."""
        if self._condition is None:
            return []
        found, news = self._condition(), []
        if found.ready and not self._said_ready and not self._reloading:
            news.append("READY=1")
            if self._watchdog_s is not None:  # the program before may have asked for more
                news.append(f"WATCHDOG_USEC={_microseconds(self._watchdog_s)}")
        status = " ".join(found.status.split())[:_MOST_STATUS]
        if status != self._said_status:
            news.append(f"STATUS={status}")
        return news

    def _say(self, assignments: list[str]) -> None:
        """What was sent is not said again."""
        if not assignments or not self._send(assignments):
            return
        for assignment in assignments:
            if assignment == "READY=1":
                self._said_ready = True
            if assignment.startswith("STATUS="):
                self._said_status = assignment.removeprefix("STATUS=")

    def _send(self, assignments: list[str]) -> bool:
        """False if nobody takes it now."""
        if self._address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
                line.setblocking(False)
                line.sendto("\n".join(assignments).encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def _address(text: str) -> str | None:
    """A path, or a name among the abstract ones; other kinds are for virtual machines."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _watchdog_s(variables: Mapping[str, str], pid: int) -> float | None:
    """None where no beats are asked for, or those of another process."""
    try:
        microseconds = int(variables.get("WATCHDOG_USEC", ""))
        whose = int(variables.get("WATCHDOG_PID", pid))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and whose == pid else None


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
