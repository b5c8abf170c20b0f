"""`start_engine` starts gRPC, or raises an error that says why it cannot."""

from __future__ import annotations

import subprocess
import sys

_STARTS = """
import asyncio, errno, socket
from elastic.errors import TransientError
from elastic.rpc.engine import start_engine
import grpc

made, asked = socket.socketpair, []

def pair(*_):
    asked.append(1)
    if len(asked) == FAILS:
        raise OSError(errno.EMFILE, "Too many open files")
    return made()

async def main():
    socket.socketpair = pair
    try:
        start_engine()
    except TransientError as error:
        print(error)
        return
    start_engine()
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(0)
    print("served", len(asked))

asyncio.run(main())
"""


def outcome(fails: int) -> str:
    script = _STARTS.replace("FAILS", str(fails))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_grpc_that_gets_no_socket_pair_raises_a_transient_error() -> None:
    assert outcome(1).startswith("gRPC cannot start: the system refused a pair of sockets: Too")


def test_grpc_makes_no_socket_pair_besides_those_of_start_engine() -> None:
    assert outcome(3) == "served 2"  # one for each call of start_engine
