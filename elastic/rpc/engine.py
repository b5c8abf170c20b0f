"""Starts gRPC's event engine so that a lack of sockets raises an error and does not crash."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc.aio

from elastic.errors import TransientError

_LOOK_S = 1.0


def start_engine() -> None:
    """Call it on the event loop, before anything else of gRPC. Raises TransientError.

    gRPC's completion queue starts a thread and only then asks for a pair of sockets; if the system
    refuses them, the process ends with a segmentation fault. So gRPC gets a pair that exists.

    gRPC's thread wakes the loop by a byte through that pair, and does not check whether the byte
    arrived. So a timer writes such a byte now and then.
    """
    try:
        pair = socket.socketpair()
    except OSError as error:
        raise TransientError(
            f"gRPC cannot start: the system refused a pair of sockets: {error.strerror}; see "
            "`ulimit -n`, or try again"
        ) from error
    spare = [pair]
    made = socket.socketpair

    def give(*arguments: Any, **named: Any) -> tuple[socket.socket, socket.socket]:
        return spare.pop() if spare else made(*arguments, **named)

    socket.socketpair = give
    try:
        grpc.aio.init_grpc_aio()
    finally:
        socket.socketpair = made
        for unused in spare:  # gRPC had started before
            for end in unused:
                end.close()
    if not spare:
        _look_now_and_then(asyncio.get_running_loop(), pair[1])


def _look_now_and_then(loop: asyncio.AbstractEventLoop, to_loop: socket.socket) -> None:
    try:
        to_loop.send(b"1", socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass  # the pair is full: the loop is about to look
    except OSError:
        return  # gRPC has ended
    loop.call_later(_LOOK_S, _look_now_and_then, loop, to_loop)
