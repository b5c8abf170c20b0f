"""Reports the daemon's condition to its service manager, such as systemd, with sd_notify(3).

Beats of the daemon's event loop look at the condition. So a loop that hangs sends no watchdog beat.
Nothing here delays or ends the daemon: a message that cannot be sent at once is dropped, and the
next beat sends it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

NOTICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Variables for this process alone: its children must not send messages in its name."""

_BEAT_S = 2.0
_STARTING_BEAT_S = 0.25
_LEAST_BEAT_S = 0.01
_START_EXTENDED_S = 30.0  # by each beat: a start that waits for etcd does not hang
_MOST_STATUS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """The condition of a daemon that its service manager is told."""

    ready: bool
    status: str
    """One line for people."""


class ServiceNotice:
    """Sends a daemon's messages to its service manager; without one it sends nothing.

    Create it with `of_environment`.
    """

    def __init__(self, variables: Mapping[str, str], pid: int | None = None) -> None:
        self._address = _address(variables.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(variables, os.getpid() if pid is None else pid)
        self._condition: Callable[[], Condition] | None = None
        self._reported_ready = False
        self._reported_status = ""

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceNotice:
        """Return an instance; remove its variables, so that no child process inherits them."""
        found = {name: environment.pop(name) for name in NOTICE_VARIABLES if name in environment}
        return cls(found)

    @contextlib.contextmanager
    def telling(self, condition: Callable[[], Condition]) -> Iterator[None]:
        """Have the running loop's beats report `condition` in this context."""
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
        """Report that the daemon will end, within `within_s` seconds."""
        # In a message of its own: systemd ignores READY=1 beside STOPPING=1.
        self._report(self._changes())
        self._send([f"EXTEND_TIMEOUT_USEC={_microseconds(within_s)}", "STOPPING=1"])

    # ---- beats

    async def _beat(self) -> None:
        while True:
            self._report([*self._changes(), *self._signs_of_life()])
            await asyncio.sleep(self._interval_s())

    def _interval_s(self) -> float:
        usual_s = _BEAT_S if self._reported_ready else _STARTING_BEAT_S
        if self._watchdog_s is not None:
            usual_s = min(usual_s, self._watchdog_s / 2)
        return max(usual_s, _LEAST_BEAT_S)

    def _signs_of_life(self) -> list[str]:
        signs = ["WATCHDOG=1"] if self._watchdog_s is not None else []
        if not self._reported_ready:
            signs.append(f"EXTEND_TIMEOUT_USEC={_microseconds(_START_EXTENDED_S)}")
        return signs

    def _changes(self) -> list[str]:
        """Return the assignments that the service manager has not got yet."""
        if self._condition is None:
            return []
        found, changes = self._condition(), []
        if found.ready and not self._reported_ready:
            changes.append("READY=1")
        status = " ".join(found.status.split())[:_MOST_STATUS]
        if status != self._reported_status:
            changes.append(f"STATUS={status}")
        return changes

    def _report(self, assignments: list[str]) -> None:
        """Send assignments and remember those sent, so that `_changes` does not repeat them."""
        if not assignments or not self._send(assignments):
            return
        for assignment in assignments:
            if assignment == "READY=1":
                self._reported_ready = True
            if assignment.startswith("STATUS="):
                self._reported_status = assignment.removeprefix("STATUS=")

    def _send(self, assignments: list[str]) -> bool:
        """Return False if the message cannot be sent now."""
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
    """Return the address of a Unix socket; None for other kinds, used by virtual machines."""
    if text.startswith("@"):
        return "\0" + text[1:]
    return text if text.startswith("/") else None


def _watchdog_s(variables: Mapping[str, str], pid: int) -> float | None:
    """Return the watchdog's interval; None if it is not meant for this process or is off."""
    try:
        microseconds = int(variables.get("WATCHDOG_USEC", ""))
        whose = int(variables.get("WATCHDOG_PID", pid))
    except ValueError:
        return None
    return microseconds / 1e6 if microseconds > 0 and whose == pid else None


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)
