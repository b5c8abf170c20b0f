"""Starts gRPC's event engine in a way that can fail."""

from __future__ import annotations

import socket
from typing import Any

import grpc.aio

from elastic.errors import TransientError


def start_engine() -> None:
    """Called on the event loop, before anything else of gRPC. Raises TransientError.

    Its completion queue begins a thread and only then asks for a pair of sockets; if the system
    refuses that, the process ends with a segmentation fault. So it gets a pair that exists.
    """
    try:
        pair = socket.socketpair()
    except OSError as error:
        raise TransientError(
            f"gRPC cannot start, the system refuses it a pair of sockets: {error.strerror}; see "
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
        for unused in spare:  # it had started before
            for end in unused:
                end.close()
