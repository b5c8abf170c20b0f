"""A process that owns a zygote: it prints the zygote's events and obeys commands, one a line.

Run it as `python -m tests.unit.agent.zygote_owner DIRECTORY GRACE_S`. The commands are
"kill WORKER SIGNAL", "let_go", "break", which cuts the connection, "close",
"spawn WORKER SECONDS [CODE [FILE]]" and "run WORKER SCRIPT".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from elastic.agent.zygote_process import ZygoteProcess
from elastic.runtime.log_writer import open_output
from elastic.runtime.orphans import adopt_orphans
from elastic.runtime.training_lease import TrainingLease
from elastic.v1 import local_pb2 as pb
from tests.job_process import WITHOUT_COMPILER


async def main(directory: Path, grace_s: float) -> None:
    adopt_orphans()
    lost = asyncio.Event()
    zygote = ZygoteProcess(
        run_directory=directory,
        log=directory / "zygote.log",
        environment={**WITHOUT_COMPILER, **os.environ, "OMP_NUM_THREADS": "1"},
        on_event=_heard,
        on_lost=lost.set,
        lease=TrainingLease.unlimited(),
        grace_s=grace_s,
    )
    workers = directory / "agent.sock"
    workers.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(_listen, workers)
    _say(event="found" if await zygote.open() else "started")
    running = asyncio.ensure_future(zygote.run())
    commands = asyncio.ensure_future(_obey(zygote, directory))
    losing = asyncio.ensure_future(lost.wait())
    await asyncio.wait({commands, losing}, return_when=asyncio.FIRST_COMPLETED)
    if lost.is_set():
        _say(event="lost", reason=str(zygote.exit_reason()))
    commands.cancel()
    running.cancel()
    server.close()


async def _obey(zygote: ZygoteProcess, directory: Path) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := (await reader.readline()).decode().split():
        command, *arguments = line
        if command == "spawn":
            zygote.spawn(_request(directory, *arguments))
        elif command == "run":
            zygote.spawn(_request_for(directory, *arguments))
        elif command == "kill":
            zygote.kill(arguments[0], signal.Signals(int(arguments[1])))
        elif command == "break":
            assert zygote._writer is not None
            zygote._writer.transport.abort()
        elif command == "let_go":
            zygote.let_go()
            return
        elif command == "close":
            await zygote.close()
            _say(event="closed")
            return


SCRIPT = """
import os, subprocess, sys, time
if sys.argv[3]:
    subprocess.run(["sh", "-c", f"setsid sh -c 'echo $$ > {sys.argv[3]}; exec sleep 1000' &"])
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


def _request(
    directory: Path, worker: str, seconds: str, code: str = "0", detached: str = ""
) -> pb.SpawnRequest:
    """detached: a file for the pid of a process that the worker starts and lets go of."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    return _request_for(directory, worker, str(script), seconds, code, detached)


def _request_for(directory: Path, worker: str, *argv: str) -> pb.SpawnRequest:
    return pb.SpawnRequest(
        worker=worker,
        socket_path=str(directory / "agent.sock"),
        log_path=str(directory / f"{worker}.log"),
        argv=argv,
    )


async def _listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept workers' connections as an agent would, and ignore what they say."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass
    writer.close()


def _heard(event: pb.ZygoteEvent) -> None:
    kind = event.WhichOneof("kind")
    if kind == "ready":
        found = {w.worker: [w.pid, w.log_path] for w in event.ready.workers}
        _say(event="ready", workers=found, keeper=event.ready.keeper)
    elif kind == "spawned":
        spawned = event.spawned
        output = open_output(spawned.worker, spawned.output)
        _say(event="spawned", worker=spawned.worker, pid=spawned.pid, output=output)
    elif kind == "notice":
        _say(event=event.notice.name, **event.notice.fields)
    elif kind == "not_spawned":
        _say(event=kind, worker=event.not_spawned.worker, reason=event.not_spawned.reason)
    else:
        exited = event.exited
        _say(event="exited", worker=exited.worker, code=exited.exit_code, signal=exited.signal)


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
