"""Probes of this machine: packages, names, directories, limits, certificates."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import re
import resource
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

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
