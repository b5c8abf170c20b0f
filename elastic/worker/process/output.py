"""What a script prints: where its log takes no more, that is lost, and the script goes on."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE, errno.EROFS}


class LogStream(io.FileIO):
    """Writes to a descriptor. A full disk is no error of the script that prints: what is refused is
    lost, and a line says so as soon as there is space again."""

    def __init__(self, fd: int, on_lost: Callable[[str], None]) -> None:
        """on_lost: called with the reason when something is lost for the first time."""
        super().__init__(fd, "w", closefd=False)
        self._on_lost: Callable[[str], None] | None = on_lost
        self._lost_bytes = 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Take all of it, or as much as the file takes now."""
        try:
            if self._lost_bytes:
                note = f"\n[elastic: {self._lost_bytes} bytes of output are lost here]\n"
                super().write(note.encode())
                self._lost_bytes = 0
            return super().write(data)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            size = memoryview(data).nbytes
            self._lost_bytes += size
            tell, self._on_lost = self._on_lost, None
            if tell is not None:
                tell(os.strerror(error.errno))
            return size


def outlive_full_disk(on_lost: Callable[[str], None]) -> None:
    """From here on `sys.stdout` and `sys.stderr` raise no error for want of space; `on_lost` is
    called with the reason, once for each."""
    sys.stdout = _text(LogStream(1, on_lost), sys.stdout)
    sys.stderr = _text(LogStream(2, on_lost), sys.stderr)


def _text(log: LogStream, before: object) -> io.TextIOWrapper:
    """As Python has it for a terminal: by lines, so that a log shows what has happened."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    errors = getattr(before, "errors", None) or "backslashreplace"
    return io.TextIOWrapper(
        io.BufferedWriter(log), encoding=encoding, errors=errors, line_buffering=True
    )
