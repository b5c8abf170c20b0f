"""Keeps torch from asking the name server for the names of its peers.

torch looks up the name of each peer that connects to a store, at both ends and while all wait
(c10d::detail::formatSockAddr), only to show it in messages. So each recovery would depend on the
name server: one lost answer costs a second or more, a name server that is down much more. After one
look-up has failed, torch makes no other in that process and in processes forked from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import socket
import threading
from collections.abc import Iterator

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

_AT_ONCE = datetime.timedelta(milliseconds=10)
_PATIENCE_S = 1.0
_RETRY = 1  # index of `retry` in glibc's struct __res_state, whose first members are ints
_STDERR = 2


def never_look_up_peers() -> None:
    """Make torch's first look-up fail without asking a server. For some milliseconds, what is
    written to stderr is lost. Does nothing if the C library is not glibc."""
    try:
        libc = ctypes.CDLL(None)
        libc.__res_init()
        libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        resolver = libc.__res_state()  # this thread's own
    except (AttributeError, OSError):
        return
    tries, resolver[_RETRY] = resolver[_RETRY], 0
    try:
        with contextlib.suppress(OSError), _silenced():
            _connect_in_vain()
    finally:
        resolver[_RETRY] = tries


def _connect_in_vain() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(_PATIENCE_S)  # independent of socket.setdefaulttimeout()
    port = listener.getsockname()[1]

    def hang_up() -> None:
        with listener, contextlib.suppress(OSError):  # close it: torch may try again
            listener.accept()[0].close()

    hangs_up = threading.Thread(target=hang_up, daemon=True)
    hangs_up.start()
    with contextlib.suppress(DistNetworkError):
        TCPStore("127.0.0.1", port, is_master=False, timeout=_AT_ONCE)
    hangs_up.join()


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard stderr, where torch would report the failure at length."""
    kept, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)
