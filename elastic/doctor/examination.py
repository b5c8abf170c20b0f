"""Examines a node: probes the machine, torch in a separate process, and what the job needs, then
compares with the other nodes. Each probe has a deadline; they run at the same time where they can.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from elastic.checkpoint.catalog import require_parent
from elastic.checkpoint.directory import CheckpointDirectory, open_directory
from elastic.core.documents import Unreadable, parse
from elastic.doctor import checks
from elastic.doctor.checks import Verdict
from elastic.doctor.findings import (
    Accelerator,
    AllReduce,
    Certificate,
    CheckpointSpeed,
    Coordinator,
    Directory,
    EtcdMember,
    OpenFiles,
    Package,
    Resolution,
    SharedMemory,
)
from elastic.doctor.meeting import Meeting, Protection, Stage
from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.rpc.certificates import (
    Role,
    load_certificate,
    readable_by_others,
    verification_problem,
)
from elastic.rpc.control_client import ControlClient
from elastic.rpc.security import Security, Tls, no_report, require_protection
from elastic.runtime.network import interface_of, require_own_address
from elastic.runtime.off_loop import off_loop
from elastic.settings.doctor import MachineSettings
from elastic.settings.limits import is_ip_address
from elastic.settings.masking import masked_url
from elastic.settings.tls_files import TlsFiles
from elastic.store.etcd.client import MemberHealth, members_health
from elastic.store.etcd.endpoints import EtcdOptions
from elastic.store.etcd.server import VERSION_PREFIX
from elastic.store.etcd.store import EtcdStore
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import find_leader
from elastic.timeouts import timeout
from elastic.version import DISTRIBUTION, __version__, release_of

T = TypeVar("T")

_PROBE_S = 15.0
"""Seconds for a probe of this machine; one that takes longer hangs."""
_IMPORT_S = 60.0
"""Seconds to import torch, maybe from a slow file system."""
_ALL_REDUCE_S = 20.0
_COORDINATOR_S = 3.0
_LOOK_S = 3.0
"""Seconds until a file that another node has written must be seen here: file systems cache listings
for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The node to examine: its settings, and what `elastic doctor` derived from them."""

    settings: MachineSettings
    node: str
    etcd: EtcdOptions | None
    security: Security
    directories: Sequence[tuple[Path, str]]
    """The local directories that elastic writes to, and what for."""


async def examine(subject: Subject) -> list[Verdict]:
    """All verdicts, in the order in which a job needs things. Raises ConfigurationError."""
    return await _Examination(subject).run()


class _Examination:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._settings = subject.settings
        self._trial = TrialProcess()
        self._trial_error = ""
        self._torch = version_of("torch") or "none"

    async def run(self) -> list[Verdict]:
        meeting = self._meeting() if self._settings.peers else None
        try:
            if meeting is not None:
                await meeting.start()
            await self._trial.start({"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"})
            groups = await asyncio.gather(
                self._here(), self._names(), self._etcd(), self._coordinator(), self._torch_here()
            )
            verdicts = [verdict for group in groups for verdict in group]
            if meeting is not None:
                verdicts += await self._with_others(meeting)
            return verdicts
        finally:
            if meeting is not None:
                await meeting.close()
            await self._trial.close()

    # ---- this machine

    async def _here(self) -> list[Verdict]:
        s, security = self._settings, self._subject.security
        probes = [
            _run_probe("versions", checks.packages, packages),
            *(
                _run_probe("disk", checks.directory, directory, path, of)
                for path, of in self._subject.directories
            ),
            _run_probe("shared memory", checks.shared_memory, shared_memory, s.nproc_per_node),
            _run_probe("open files", checks.open_files, open_files),
        ]
        if isinstance(security, Tls):
            files, job = security.files, security.job
            probes.append(_run_probe("certificates", checks.certificate, certificate, files, job))
        if (url := s.checkpoint_dir) is not None:
            probes.append(_run_probe("checkpoints", checks.checkpoint_speed, checkpoint_speed, url))
        return [verdict for group in await asyncio.gather(*probes) for verdict in group]

    async def _names(self) -> list[Verdict]:
        names = dict[str, str]()
        if self._subject.etcd is not None:
            names |= {endpoint.host: "etcd" for endpoint in self._subject.etcd.endpoints}
        names |= {_host_of(peer): "peer" for peer in self._settings.peers}
        host = self._settings.node_host
        if host is not None:
            names[host] = "this node"
        probes = [
            _run_probe("names", checks.resolution, resolve, name, of)
            for name, of in names.items()
            if not is_ip_address(name)
        ]
        verdicts = [verdict for group in await asyncio.gather(*probes) for verdict in group]
        if host is not None:
            verdicts.append(await _own_address(host))
        return verdicts

    async def _torch_here(self) -> list[Verdict]:
        try:
            answer = await self._trial.receive(_IMPORT_S)
        except TrialFailed as error:
            self._trial_error = str(error)
            return list(checks.accelerator(Accelerator(error=str(error))))
        device_files = [n for n in os.listdir("/dev") if n.removeprefix("nvidia").isdigit()]
        found = Accelerator(
            torch=str(answer.get("torch", "")),
            cuda=str(answer.get("cuda", "")),
            device_files=len(device_files),
            devices=tuple(answer.get("devices", ())),
            device_errors=tuple(answer.get("device_errors", ())),
            nccl=str(answer.get("nccl", "")),
            nccl_error=str(answer.get("nccl_error", "")),
            workers=self._settings.nproc_per_node,
        )
        return list(checks.accelerator(found))

    # ---- what the job needs

    async def _etcd(self) -> list[Verdict]:
        options = self._subject.etcd
        if options is None:
            return []
        key = JobKeys(self._settings.job).node("doctor")
        members = await members_health(options, key)
        return [
            verdict
            for one in members
            for verdict in checks.etcd_member(_member(one, alone=len(members) == 1))
        ]

    async def _coordinator(self) -> list[Verdict]:
        options = self._subject.etcd
        if options is None:
            return []
        try:
            async with EtcdStore(options) as store:
                leader = await find_leader(store, job=self._settings.job)
        except ElasticError:
            return []  # etcd's own verdicts say why
        found = Coordinator()
        if leader is not None:
            found = await self._ask(leader.address)
        return [checks.coordinator(found, release=release_of(__version__))]

    async def _ask(self, address: str) -> Coordinator:
        try:
            client = ControlClient(address, security=self._subject.security, report=no_report)
            try:
                answer = await client.status(_COORDINATOR_S)
            finally:
                await client.close()
        except ElasticError as error:
            return Coordinator(address=address, error=str(error))
        return Coordinator(address=address, version=answer.version)

    # ---- the other nodes

    def _meeting(self) -> Meeting:
        s, security = self._settings, self._subject.security
        require_protection(s.doctor_address, security, no_report)
        protection = None
        if isinstance(security, Tls):
            try:
                protection = Protection.of(security.files, security.job)
            except (OSError, ValueError) as error:
                raise ConfigurationError(
                    f"the certificate {security.files.certificate} cannot be used ({error}); run "
                    "`elastic doctor` without --peers to see what is wrong with it"
                ) from error
        return Meeting(
            s.peers,
            own_address=s.doctor_address,
            node=self._subject.node,
            job=s.job,
            elastic=__version__,
            torch=self._torch,
            timeout_s=s.peer_timeout_s,
            ports=s.worker_port_range,
            protection=protection,
        )

    async def _with_others(self, meeting: Meeting) -> list[Verdict]:
        await meeting.meet()
        marker = await self._marker()
        try:
            await meeting.barrier(Stage.MET, marker=marker.name if marker else "")
            if marker is not None:
                await self._or_none(functools.partial(meeting.check_markers, marker.sees))
            await meeting.barrier(Stage.LOOKED)
        finally:
            if marker is not None:
                await self._or_none(marker.remove)
        summed = await self._all_reduce(meeting)
        await meeting.barrier(Stage.DONE)
        verdicts = [
            verdict
            for peer in meeting.peers
            for verdict in checks.peer(peer, elastic=__version__, torch=self._torch)
        ]
        return [*verdicts, *(() if summed is None else [checks.all_reduce(summed)])]

    async def _marker(self) -> Marker | None:
        """None if there is no checkpoint directory, or if it fails: that has its own verdict."""
        url = self._settings.checkpoint_dir
        if url is None:
            return None
        return await self._or_none(functools.partial(Marker, url))

    async def _or_none(self, work: Callable[[], T]) -> T | None:
        """Run `work` in a thread; None if it takes more than `_PROBE_S`, or if storage fails."""
        with contextlib.suppress(asyncio.TimeoutError, ElasticError):
            async with timeout(_PROBE_S):
                return await off_loop(work)
        return None

    async def _all_reduce(self, meeting: Meeting) -> AllReduce | None:
        nodes = len(meeting.others) + 1
        if nodes < 2:
            return None
        if self._trial_error:  # its next line may be the late answer to something else
            told = f"PyTorch cannot be used on this node: {self._trial_error}"
            return AllReduce(nodes=nodes, error=told)
        group = meeting.group()
        if isinstance(group, str):
            unreached = any(peer.error for peer in meeting.peers)
            return None if unreached else AllReduce(nodes=nodes, error=group)
        rank, members, host, port = group
        meeting_place = {"rank": rank, "world": len(members), "host": host, "port": port}
        interface = await off_loop(
            lambda: interface_of(self._settings.node_host or meeting.own_address)
        )
        await self._trial.send(
            {**meeting_place, "interface": interface, "timeout_s": _ALL_REDUCE_S}
        )
        try:
            answer = await self._trial.receive(2 * _ALL_REDUCE_S + 5)
            return AllReduce(
                nodes=nodes,
                bytes_per_s=float(answer.get("bytes_per_s", 0.0)),
                latency_s=float(answer["latency_s"]),
                stalled_bytes=int(answer.get("stalled_bytes", 0)),
                error=str(answer.get("stalled", "")),
            )
        except TrialFailed as error:
            return AllReduce(nodes=nodes, error=str(error))


async def _run_probe(
    name: str,
    judge: Callable[[T], Verdict | Iterable[Verdict]],
    probe: Callable[..., T],
    *of: object,
) -> list[Verdict]:
    """The verdicts of `judge` on what `probe` finds. The probe may hang, so it runs in a thread."""
    try:
        async with timeout(_PROBE_S):
            found = await off_loop(lambda: probe(*of))
    except asyncio.TimeoutError:
        return [checks.hangs(name, _PROBE_S)]
    verdicts = judge(found)
    return [verdicts] if isinstance(verdicts, Verdict) else list(verdicts)


async def _own_address(host: str) -> Verdict:
    try:
        await require_own_address(host)
    except ConfigurationError as error:
        return checks.own_address(host, str(error), unsure=False)
    except TransientError as error:
        return checks.own_address(host, str(error), unsure=True)
    return checks.own_address(host, "", unsure=False)


def _member(found: MemberHealth, *, alone: bool) -> EtcdMember:
    told, _, advice = found.error.rpartition("; ")
    return EtcdMember(
        endpoint=found.endpoint,
        version=found.version,
        alone=alone,
        in_memory=found.version.startswith(VERSION_PREFIX),
        commit_s=found.commit_s,
        errors=found.errors,
        size_bytes=found.size_bytes,
        used_bytes=found.used_bytes,
        quota_bytes=found.quota_bytes,
        error=told or found.error,
        unreachable=bool(found.error) and not found.is_refusal,
        advice=advice if told else "",
    )


def _host_of(peer: str) -> str:
    """The host in HOST, HOST:PORT or [HOST]:PORT."""
    return peer[1:].partition("]")[0] if peer.startswith("[") else peer.partition(":")[0]


class Marker:
    """A file in the checkpoint directory that the other nodes look for. Its methods block."""

    def __init__(self, url: str) -> None:
        self._directory = open_directory(url)
        self.name = f".doctor-seen-{os.urandom(8).hex()}"
        self._directory.write(self.name, b"seen")

    def sees(self, other: str) -> bool:
        """Whether the file of another node is here; waits for it for `_LOOK_S` at most.

        Raises TransientError if the storage does not answer by then, and ConfigurationError.
        """
        ends = time.monotonic() + _LOOK_S
        while True:
            is_last = time.monotonic() >= ends
            try:
                if other in self._directory.list():
                    return True
            except TransientError:
                if is_last:
                    raise
            if is_last:
                return False
            time.sleep(0.1)

    def remove(self) -> None:
        with contextlib.suppress(ElasticError):
            self._directory.remove(self.name)


_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<bounds>[^;]*)(?P<marker>;.*)?")
_AT_LEAST = re.compile(r">=\s*([0-9.]+)")
_BELOW = re.compile(r"<\s*([0-9.]+)")
_PIECE_BYTES = 2**20
_TRIED_S = 0.5
"""Seconds for which a file is written to the checkpoint directory, up to `_TRIED_BYTES`."""
_TRIED_BYTES = 64 * 2**20
_SHM = "/dev/shm"


def packages() -> list[Package]:
    """The packages that elastic requires, with their installed versions."""
    found = []
    try:
        required = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:  # elastic runs from its sources
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
    """The installed version, found without importing the package; None: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve(name: str, of: str) -> Resolution:
    """Resolve a name as any program does: from files first, then from name servers."""
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
    """Check the directory, or its nearest parent that exists, for free space and write access."""
    there = path
    try:
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        system = os.statvfs(there)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # else the free space says more
            return Directory(path=str(path), of=of, error=f"{error.strerror} ({there})")
        system = os.statvfs(there)
    return Directory(
        path=str(path),
        of=of,
        free_bytes=system.f_bavail * system.f_frsize,
        free_inodes=system.f_favail if system.f_files else None,
    )


def shared_memory(workers: int) -> SharedMemory:
    """The size of /dev/shm; 0 if there is none."""
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
    """The limits of this process; other processes on this node inherit them in the same way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2**63 - 1
    return OpenFiles(
        soft=most if soft == resource.RLIM_INFINITY else soft,
        hard=most if hard == resource.RLIM_INFINITY else hard,
    )


def certificate(files: TlsFiles, job: str) -> Certificate:
    """Load the job's certificate, and verify it with the job's authority."""
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
    """Write a file with sync, read it, and remove it."""
    shown = masked_url(url)
    try:
        place = open_directory(url)
        place.probe()
        require_parent(place)
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
    """The trial process reported an error or nothing; the text says what is wrong."""


class TrialProcess:
    """Runs `elastic.worker.trial`. Start it early, since it imports torch; close it at the end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None
        self._errors = b""  # the end of what it has written to standard error

    async def start(self, environment: Mapping[str, str]) -> None:
        """`environment` is added to this process's own."""
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MOST_LINE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._draining = asyncio.create_task(self._drain(self._process.stderr))

    async def _drain(self, errors: asyncio.StreamReader | None) -> None:
        """Read standard error to its end: NCCL_DEBUG may write more than a pipe holds."""
        assert errors is not None
        while piece := await errors.read(_MOST_LINE):
            self._errors = (self._errors + piece)[-_MOST_LINE:]

    async def send(self, meeting: Mapping[str, Any]) -> None:
        """Send the group to all-reduce with."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(meeting).encode() + b"\n")
            await self._process.stdin.drain()

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line from the process. Raises TrialFailed."""
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
            answer = parse(line)
        except Unreadable:
            raise TrialFailed(f"it wrote {line[:200]!r}") from None
        if answer.get("error"):
            raise TrialFailed(str(answer["error"]))
        return answer

    async def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.gather(self._draining, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(5.0):  # a process that is blocked in the kernel does not end
                await self._process.wait()
        # Otherwise Python closes the transport only after the loop has ended.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()

    async def _last_words(self) -> str:
        assert self._process is not None
        assert self._draining is not None
        code = await self._process.wait()
        await asyncio.wait({self._draining}, timeout=1.0)  # its children may keep it open
        text = self._errors.decode(errors="replace").strip()
        return (text.splitlines() or [f"it ended with exit code {code}"])[-1][:500]
