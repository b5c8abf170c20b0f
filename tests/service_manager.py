"""A service manager as daemons see it: a socket that receives their notices."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 60.0


class FakeServiceManager:
    """Collects what is sent to `NOTIFY_SOCKET`, one list of assignments for each message."""

    def __init__(self, path: Path, *, watchdog_s: float | None = None) -> None:
        self.path = path
        self.messages: list[list[str]] = []
        self._watchdog_s = watchdog_s
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def environment(self) -> dict[str, str]:
        """The daemon's environment, without WATCHDOG_PID, since the pid is not known before."""
        found = {"NOTIFY_SOCKET": str(self.path)}
        if self._watchdog_s is not None:
            found["WATCHDOG_USEC"] = str(int(self._watchdog_s * 1e6))
        return found

    def count(self, assignment: str) -> int:
        return sum(assignment in message for message in self.messages)

    def all_of(self, name: str) -> list[str]:
        """The values of this name, oldest first."""
        found = [a for message in self.messages for a in message]
        return [a.partition("=")[2] for a in found if a.startswith(f"{name}=")]

    def wait_for(self, start: str, *, after: int = 0) -> int:
        """The index of the first message from `after` on that has an assignment with this start."""
        end = time.monotonic() + DEADLINE_S
        with self._changed:
            while True:
                for index in range(after, len(self.messages)):
                    if any(a.startswith(start) for a in self.messages[index]):
                        return index
                left_s = end - time.monotonic()
                assert left_s > 0, f"no {start} after {after} among {self.messages}"
                self._changed.wait(left_s)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join(DEADLINE_S)
        self._socket.close()
        self.path.unlink()

    def _read(self) -> None:
        while data := self._socket.recv(4096):
            with self._changed:
                self.messages.append(data.decode().split("\n"))
                self._changed.notify_all()


@contextlib.contextmanager
def service_manager(path: Path, *, watchdog_s: float | None = None) -> Iterator[FakeServiceManager]:
    with contextlib.closing(FakeServiceManager(path, watchdog_s=watchdog_s)) as manager:
        yield manager
