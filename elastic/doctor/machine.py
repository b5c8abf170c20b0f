"""Probes of this machine: packages, names, directories, limits, certificates; and of torch, in a
process of its own, since elastic itself imports it nowhere but in workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.metadata
import json
import os
import re
import resource
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.doctor.findings import (
    Certificate,
    CheckpointSpeed,
    Directory,
    OpenFiles,
    Package,
    Resolution,
    SharedMemory,
)
from elastic.errors import ElasticError, TransientError
from elastic.rpc.certificates import (
    Role,
    load_certificate,
    readable_by_others,
    verification_problem,
)
from elastic.settings.masking import masked_url
from elastic.settings.tls_files import TlsFiles
from elastic.timeouts import timeout

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<bounds>[^;]*)(?P<marker>;.*)?")
_AT_LEAST = re.compile(r">=\s*([0-9.]+)")
_BELOW = re.compile(r"<\s*([0-9.]+)")
_PIECE_BYTES = 2**20
_TRIED_S = 0.5
"""So long the checkpoint directory is written to, and at most so much:"""
_TRIED_BYTES = 64 * 2**20
_SHM = "/dev/shm"


def packages() -> list[Package]:
    """What elastic requires, and what is installed of it."""
    found = []
    try:
        required = importlib.metadata.requires("elastic") or ()
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        return []
    for text in required:
        match = _REQUIREMENT.match(text)
        assert match, text
        if match["marker"]:  # an extra, or for another Python
            continue
        at_least, below = _AT_LEAST.search(match["bounds"]), _BELOW.search(match["bounds"])
        found.append(
            Package(
                name=match["name"],
                found=version_of(match["name"]),
                at_least=at_least[1] if at_least else "",
                below=below[1] if below else "",
            )
        )
    return found


def version_of(package: str) -> str | None:
    """The installed version, without an import; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve(name: str, of: str) -> Resolution:
    """Asks as any program does: files first, then name servers."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        silent = error.errno == socket.EAI_AGAIN
        return Resolution(name=name, of=of, error=str(error.strerror), silent=silent)
    except (OSError, UnicodeError) as error:
        return Resolution(name=name, of=of, error=str(error))
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return Resolution(name=name, of=of, addresses=tuple(addresses), took_s=time.monotonic() - began)


def directory(path: Path, of: str) -> Directory:
    """Room in the directory, or in the nearest one above it that exists, and the right to write."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
        system = os.statvfs(there)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # how little there is says more
            return Directory(path=str(path), of=of, error=f"{error.strerror} ({there})")
        system = os.statvfs(there)
    return Directory(
        path=str(path),
        of=of,
        free_bytes=system.f_bavail * system.f_frsize,
        free_inodes=system.f_favail if system.f_files else None,
    )


def shared_memory(workers: int) -> SharedMemory:
    """Of /dev/shm; none where there is none."""
    try:
        system = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(size_bytes=0, free_bytes=0, workers=workers)
    return SharedMemory(
        size_bytes=system.f_blocks * system.f_frsize,
        free_bytes=system.f_bavail * system.f_frsize,
        workers=workers,
    )


def open_files() -> OpenFiles:
    """Of this process, which others on this node inherit in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**63 - 1
    return OpenFiles(
        soft=most if soft == resource.RLIM_INFINITY else soft,
        hard=most if hard == resource.RLIM_INFINITY else hard,
    )


def certificate(files: TlsFiles, job: str) -> Certificate:
    """What the job's certificate says, and whether its authority vouches for it."""
    path = str(files.certificate)
    exposed = ""
    with contextlib.suppress(OSError):
        if files.key is not None and readable_by_others(files.key):
            exposed = str(files.key)
    try:
        own = load_certificate(files, job, Role.CLIENT)
    except ElasticError as error:
        return Certificate(path=path, error=str(error), exposed_key=exposed)
    return Certificate(
        path=path,
        not_after_s=own.not_after_s,
        now_s=time.time(),
        distrusted=verification_problem(files, Role.CLIENT),
        exposed_key=exposed,
    )


def checkpoint_speed(url: str) -> CheckpointSpeed:
    """Writes a file, synced, and reads it again; removes it."""
    shown = masked_url(url)
    try:
        place = open_directory(url)
        place.probe()
        return _measured(place, shown)
    except ElasticError as error:
        told, _, advice = str(error).rpartition("; ")
        return CheckpointSpeed(
            url=shown,
            error=told or str(error),
            advice=advice if told else "give another --checkpoint-dir",
            may_pass=isinstance(error, TransientError),
        )


def _measured(place: CheckpointDirectory, shown: str) -> CheckpointSpeed:
    name = f".doctor-{uuid.uuid4().hex}"
    piece = memoryview(os.urandom(_PIECE_BYTES))
    size = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal size
        ends = time.monotonic() + _TRIED_S
        while size < _TRIED_BYTES and (size == 0 or time.monotonic() < ends):
            size += len(piece)
            yield piece

    try:
        began = time.monotonic()
        place.write(name, pieces())
        written = time.monotonic()
        for _ in place.chunks(name):
            pass
        read = time.monotonic()
    finally:
        with contextlib.suppress(ElasticError):
            place.remove(name)
    return CheckpointSpeed(
        url=shown, size_bytes=size, write_s=written - began, read_s=read - written
    )


_COMMAND = (sys.executable, "-m", "elastic.worker.trial")
_MOST_LINE = 2**16


class TrialFailed(Exception):
    """It said nothing; the text says why."""


class TrialProcess:
    """Start it early: it imports torch meanwhile. Close it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment`: added to this process's own."""
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MOST_LINE,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    async def say(self, meeting: Mapping[str, Any] | None) -> None:
        """The peers to all-reduce with; None: there are none."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(meeting).encode() + b"\n" if meeting else b"\n")
            await self._process.stdin.drain()

    async def hear(self, timeout_s: float) -> dict[str, Any]:
        """Its next line. Raises TrialFailed."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with timeout(timeout_s):
                line = await self._process.stdout.readline()
                if not line:
                    raise TrialFailed(await self._last_words())
        except asyncio.TimeoutError:
            raise TrialFailed(f"no answer within {timeout_s:g} s") from None
        try:
            said = json.loads(line)
        except ValueError:
            raise TrialFailed(f"it wrote {line[:200]!r}") from None
        if not isinstance(said, dict):
            raise TrialFailed(f"it wrote {line[:200]!r}")
        if said.get("error"):
            raise TrialFailed(str(said["error"]))
        return said

    async def close(self) -> None:
        """End it, if it still runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(5.0):  # one in the kernel's hands does not end
                await self._process.wait()
        # Else the transport is closed when the loop is gone.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _last_words(self) -> str:
        assert self._process is not None
        assert self._process.stderr is not None
        said = (await self._process.stderr.read(2**16)).decode(errors="replace").strip()
        code = await self._process.wait()
        return (said.splitlines() or [f"it ended with {code}"])[-1][:500]
