"""The whole examination of a node: every probe with a deadline, all at once where they can be."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elastic.checkpoint.directory import open_directory
from elastic.doctor import checks, machine
from elastic.doctor.checks import Verdict
from elastic.doctor.conversation import Protection
from elastic.doctor.findings import Accelerator, AllReduce, Coordinator, EtcdMember
from elastic.doctor.machine import TrialFailed, TrialProcess
from elastic.doctor.meeting import Meeting, Stage
from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.rpc.control_client import ControlClient
from elastic.rpc.security import Security, Tls, require_protection
from elastic.runtime.network import interface_of
from elastic.runtime.off_loop import off_loop
from elastic.runtime.own_address import require_own
from elastic.settings.doctor import MachineSettings
from elastic.settings.limits import is_ip_address
from elastic.store.etcd.client import MemberHealth, members_health
from elastic.store.etcd.endpoints import EtcdOptions
from elastic.store.etcd.server import VERSION_PREFIX
from elastic.store.etcd.store import EtcdStore
from elastic.store.job_keys import JobKeys
from elastic.store.leader_watch import find_leader
from elastic.timeouts import timeout
from elastic.version import __version__, release_of

T = TypeVar("T")

_PROBE_S = 15.0
"""What a probe of this machine may take: one that takes longer hangs."""
_IMPORT_S = 60.0
"""To import torch from a slow file system."""
_ALL_REDUCE_S = 20.0
_COORDINATOR_S = 3.0
_LOOK_S = 3.0
"""For a file that another node has written to be seen here: file systems keep what they have listed
for a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The node to examine: its settings, and what is made of them."""

    settings: MachineSettings
    node: str
    etcd: EtcdOptions | None
    security: Security
    directories: Sequence[tuple[Path, str]]
    """Where it writes, and what."""


async def examine(subject: Subject) -> list[Verdict]:
    """All verdicts, in the order in which things are needed. Raises ConfigurationError."""
    return await _Examination(subject).run()


class _Examination:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._settings = subject.settings
        self._trial = TrialProcess()
        self._torch = machine.version_of("torch") or "none"

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
            self._in_time("versions", lambda: list(checks.packages(machine.packages()))),
            *(
                self._in_time("disk", functools.partial(_directory, path, of))
                for path, of in self._subject.directories
            ),
            self._in_time(
                "shared memory",
                lambda: [checks.shared_memory(machine.shared_memory(s.nproc_per_node))],
            ),
            self._in_time("open files", lambda: [checks.open_files(machine.open_files())]),
        ]
        if isinstance(security, Tls):
            probe = functools.partial(machine.certificate, security.files, security.job)
            probes.append(self._in_time("certificates", lambda: list(checks.certificate(probe()))))
        if (url := s.checkpoint_dir) is not None:
            speed = functools.partial(machine.checkpoint_speed, url)
            probes.append(self._in_time("checkpoints", lambda: [checks.checkpoint_speed(speed())]))
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
            self._in_time("names", functools.partial(_resolution, name, of))
            for name, of in names.items()
            if not is_ip_address(name)
        ]
        verdicts = [verdict for group in await asyncio.gather(*probes) for verdict in group]
        if host is not None:
            verdicts.append(await _own_address(host))
        return verdicts

    async def _torch_here(self) -> list[Verdict]:
        try:
            said = await self._trial.hear(_IMPORT_S)
        except TrialFailed as error:
            return list(checks.accelerator(Accelerator(error=str(error))))
        found = Accelerator(
            torch=str(said.get("torch", "")),
            cuda=str(said.get("cuda", "")),
            device_files=_gpu_files(),
            devices=tuple(said.get("devices", ())),
            device_errors=tuple(said.get("device_errors", ())),
            nccl=str(said.get("nccl", "")),
            nccl_error=str(said.get("nccl_error", "")),
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
            return []  # etcd's own verdicts tell
        found = Coordinator()
        if leader is not None:
            found = await self._ask(leader.address)
        return [checks.coordinator(found, release=release_of(__version__))]

    async def _ask(self, address: str) -> Coordinator:
        try:
            client = ControlClient(address, security=self._subject.security, report=_quiet)
            try:
                await client.status(_COORDINATOR_S)
            finally:
                await client.close()
        except ElasticError as error:
            return Coordinator(address=address, error=str(error))
        return Coordinator(address=address)

    # ---- the other nodes

    def _meeting(self) -> Meeting:
        s, security = self._settings, self._subject.security
        require_protection(s.doctor_address, security, _quiet)
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
            await meeting.together(Stage.MET, marker=marker.name if marker else "")
            if marker is not None:
                await self._or_none(functools.partial(meeting.look, marker.sees))
            await meeting.together(Stage.LOOKED)
        finally:
            if marker is not None:
                await self._or_none(marker.remove)
        summed = await self._all_reduce(meeting)
        await meeting.together(Stage.DONE)
        verdicts = [
            verdict
            for peer in meeting.peers
            for verdict in checks.peer(peer, elastic=__version__, torch=self._torch)
        ]
        return [*verdicts, *(() if summed is None else [checks.all_reduce(summed)])]

    async def _marker(self) -> _Marker | None:
        """None: there is no directory, or it has a verdict of its own."""
        url = self._settings.checkpoint_dir
        if url is None:
            return None
        with contextlib.suppress(ElasticError):
            return await self._or_none(functools.partial(_Marker, url))
        return None

    async def _or_none(self, work: Callable[[], T]) -> T | None:
        """What hangs is not waited for."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with timeout(_PROBE_S):
                return await off_loop(work)
        return None

    async def _all_reduce(self, meeting: Meeting) -> AllReduce | None:
        nodes = len(meeting.others) + 1
        if nodes < 2:
            return None
        group = meeting.group()
        if isinstance(group, str):
            return None if any(peer.error for peer in meeting.peers) else _not_tried(nodes, group)
        rank, members, host, port = group
        meeting_place = {"rank": rank, "world": len(members), "host": host, "port": port}
        interface = await off_loop(
            lambda: interface_of(self._settings.node_host or meeting.own_address)
        )
        await self._trial.say({**meeting_place, "interface": interface, "timeout_s": _ALL_REDUCE_S})
        try:
            said = await self._trial.hear(_ALL_REDUCE_S + 5)
            return AllReduce(
                nodes=nodes,
                bytes_per_s=float(said["bytes_per_s"]),
                latency_s=float(said["latency_s"]),
            )
        except TrialFailed as error:
            return _not_tried(nodes, str(error))

    # ---- inside

    async def _in_time(self, name: str, probe: Callable[[], list[Verdict]]) -> list[Verdict]:
        try:
            async with timeout(_PROBE_S):
                return await off_loop(probe)
        except asyncio.TimeoutError:
            return [checks.hangs(name, _PROBE_S)]


def _directory(path: Path, of: str) -> list[Verdict]:
    return [checks.directory(machine.directory(path, of))]


def _resolution(name: str, of: str) -> list[Verdict]:
    return [checks.resolution(machine.resolve(name, of))]


async def _own_address(host: str) -> Verdict:
    try:
        await require_own(host)
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
        error=told or found.error,
        unreachable=bool(found.error) and not found.is_refusal,
        advice=advice if told else "",
    )


def _not_tried(nodes: int, why: str) -> AllReduce:
    return AllReduce(nodes=nodes, error=why)


def _host_of(peer: str) -> str:
    """Of HOST, HOST:PORT or [HOST]:PORT."""
    return peer[1:].partition("]")[0] if peer.startswith("[") else peer.partition(":")[0]


def _gpu_files() -> int:
    return len([name for name in os.listdir("/dev") if name.removeprefix("nvidia").isdigit()])


def _quiet(name: str, /, **fields: object) -> None:
    """What connections report is not asked for."""


class _Marker:
    """A file in the checkpoint directory, for which the other nodes look. Its calls block."""

    def __init__(self, url: str) -> None:
        self._directory = open_directory(url)
        self.name = f".doctor-seen-{os.urandom(8).hex()}"
        self._directory.write(self.name, b"seen")

    def sees(self, other: str) -> bool:
        """Whether the file of another node is here, also if it takes a moment to show."""
        ends = time.monotonic() + _LOOK_S
        while True:
            if other in self._directory.list():
                return True
            if time.monotonic() >= ends:
                return False
            time.sleep(0.1)

    def remove(self) -> None:
        """Leave nothing."""
        with contextlib.suppress(ElasticError):
            self._directory.remove(self.name)
