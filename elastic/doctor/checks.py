"""Judges what the probes found: pure functions from findings to verdicts, which name the fault if
there is one, how severe it is, and what to do about it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
    Peer,
    Resolution,
    SharedMemory,
)
from elastic.version import release_of


class Result(enum.Enum):
    """How severe a finding is."""

    OK = "ok"
    WARNING = "warning"
    """A job runs, but not as well as it could."""
    ERROR = "error"
    """A job does not run, or does not survive a failure."""


class Fault(enum.Enum):
    """Every fault that `elastic doctor` can name; docs/DOCTOR.md explains each."""

    PACKAGE_VERSION = "package-version"
    RELEASE_DIFFERS = "release-differs"
    TORCH_DIFFERS = "torch-differs"
    NAME_UNKNOWN = "name-unknown"
    NAME_SERVER_SILENT = "name-server-silent"
    NAME_SLOW = "name-slow"
    ADDRESS_NOT_OWN = "address-not-own"
    PEER_ABSENT = "peer-absent"
    PEER_SILENT = "peer-silent"
    PORT_BLOCKED = "port-blocked"
    CLOCK_DIFFERS = "clock-differs"
    ETCD_UNREACHABLE = "etcd-unreachable"
    ETCD_REFUSES = "etcd-refuses"
    ETCD_TOO_OLD = "etcd-too-old"
    ETCD_SLOW = "etcd-slow"
    ETCD_ALARM = "etcd-alarm"
    ETCD_FILLING = "etcd-filling"
    COORDINATOR_UNREACHABLE = "coordinator-unreachable"
    CERTIFICATE_UNUSABLE = "certificate-unusable"
    CERTIFICATE_EXPIRES = "certificate-expires"
    KEY_EXPOSED = "key-exposed"
    DISK_FULL = "disk-full"
    DISK_LOW = "disk-low"
    NOT_WRITABLE = "not-writable"
    SHM_SMALL = "shm-small"
    OPEN_FILES_LOW = "open-files-low"
    CHECKPOINT_UNUSABLE = "checkpoint-unusable"
    CHECKPOINT_SLOW = "checkpoint-slow"
    CHECKPOINT_NOT_SHARED = "checkpoint-not-shared"
    ALL_REDUCE_FAILED = "all-reduce-failed"
    NETWORK_SLOW = "network-slow"
    TORCH_UNUSABLE = "torch-unusable"
    GPU_UNUSED = "gpu-unused"
    GPU_MISSING = "gpu-missing"
    GPU_FAULTY = "gpu-faulty"
    NCCL_FAULTY = "nccl-faulty"
    PROBE_HANGS = "probe-hangs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one check: a line of the table, and a remedy if there is a fault."""

    check: str
    subject: str
    found: str
    result: Result = Result.OK
    fault: Fault | None = None
    remedy: str = ""
    may_pass: bool = False
    """The fault may go away without a change on this node."""

    def __post_init__(self) -> None:
        is_ok = self.result is Result.OK
        assert is_ok == (self.fault is None) == (not self.remedy), "a fault has a name and a remedy"


def worst(verdicts: Iterable[Verdict]) -> Result:
    """The most severe result; OK if there are no verdicts."""
    found = {verdict.result for verdict in verdicts}
    return next((one for one in (Result.ERROR, Result.WARNING) if one in found), Result.OK)


_MIB, _GIB = 2**20, 2**30

ETCD_AT_LEAST = {(3, 5): (3, 5, 23), (3, 6): (3, 6, 5)}
"""The oldest fit version of each MAJOR.MINOR. Older ones revoke healthy leases after a change of
leader, and 3.5.0 to 3.5.4 can lose writes that they have acknowledged."""
FAULTY_NCCL = ((2, 28, 3), (2, 28, 8))
"""The first and the last version in which an aborted communicator can hang."""
SLOW_NAME_S = 1.0
CLOCK_WARNING_S, CLOCK_ERROR_S = 0.5, 30.0
"""From the first on, times in events and reports cannot be compared; from the second on, new
certificates may not be valid yet."""
SLOW_ETCD_S, TOO_SLOW_ETCD_S = 0.1, 0.5
"""After 1 s elastic gives a call up and asks another member. etcd's own limit for a healthy disk is
10 ms for a write."""
EXPIRES_SOON_S = 14 * 86_400.0
ETCD_QUOTA_BYTES = 2 * _GIB
"""etcd's default for --quota-backend-bytes."""
FILLING_SHARE, FULL_SHARE = 0.5, 0.9
"""Shares of its quota from which a database counts as filling and as almost full. etcd with
compaction keeps the database of many jobs far below the first."""
FULL_BYTES, LOW_BYTES = 256 * _MIB, 5 * _GIB
FULL_INODES = 1_000
SMALL_SHM_BYTES = 64 * _MIB
"""The default of a container; a data loader with workers dies with so little."""
SHM_PER_WORKER_BYTES = 512 * _MIB
FEW_FILES = 1024
"""A worker needs a socket for each peer, and data loaders pass tensors as descriptors."""
SLOW_CHECKPOINT_BYTES_PER_S = 20 * _MIB
SLOW_NETWORK_BYTES_PER_S = 100 * _MIB
"""Slightly less than a link of 1 Gbit/s carries."""


def packages(found: Sequence[Package]) -> Iterator[Verdict]:
    for package in found:
        if package.found is None:
            told = "not installed"
        elif _fits(package.found, package):
            yield _ok("versions", package.name, package.found)
            continue
        else:
            told = f"{package.found}; expected {_wanted(package)}"
        remedy = f"pip install '{package.name}{_specifier(package)}'"
        yield _error("versions", package.name, told, Fault.PACKAGE_VERSION, remedy)


def resolution(found: Resolution) -> Verdict:
    """Whether a name resolves, and fast."""
    subject = f"{found.name} ({found.of})"
    check = "names"
    if found.silent:
        remedy = (
            "no name server answers: check /etc/resolv.conf and the network, or add the host to "
            "/etc/hosts"
        )
        told = f"not resolved: {found.error}"
        return _error(check, subject, told, Fault.NAME_SERVER_SILENT, remedy, may_pass=True)
    if not found.addresses:
        remedy = "correct the name, or add it to the name server or to /etc/hosts of this node"
        return _error(check, subject, f"unknown: {found.error}", Fault.NAME_UNKNOWN, remedy)
    told = f"{', '.join(found.addresses)} in {_seconds(found.took_s)}"
    if found.took_s >= SLOW_NAME_S:
        remedy = (
            "peers look each other up when a group forms: fix the first name server of "
            "/etc/resolv.conf, or add the hosts to /etc/hosts"
        )
        return _warning(check, subject, told, Fault.NAME_SLOW, remedy)
    return _ok(check, subject, told)


def own_address(host: str, problem: str, *, unsure: bool) -> Verdict:
    """Whether `host`, which this machine gives to the others as its own, leads to it.

    `unsure`: it could not be found out now, for example because the network is not up.
    """
    if not problem:
        return _ok("address", host, "leads to this machine")
    remedy = "give another --node-host, one at which other nodes reach this machine"
    make = _warning if unsure else _error
    return make("address", host, problem, Fault.ADDRESS_NOT_OWN, remedy, may_pass=unsure)


def directory(found: Directory) -> Verdict:
    """Whether this user may write there, and whether there is room."""
    check, subject = "disk", f"{found.path} ({found.of})"
    if found.error:
        remedy = "give this user the right to write there, or choose another directory"
        return _error(check, subject, found.error, Fault.NOT_WRITABLE, remedy)
    told = f"{_size(found.free_bytes)} free"
    remedy = "free some space, or choose another directory"
    if found.free_inodes is not None and found.free_inodes < FULL_INODES:
        told = f"{told}, room for {found.free_inodes} files"
        remedy = "remove files (probably many small ones), or choose another directory"
        return _error(check, subject, told, Fault.DISK_FULL, remedy, may_pass=True)
    if found.free_bytes < FULL_BYTES:
        return _error(check, subject, told, Fault.DISK_FULL, remedy, may_pass=True)
    if found.free_bytes < LOW_BYTES:
        return _warning(check, subject, told, Fault.DISK_LOW, remedy)
    return _ok(check, subject, told)


def shared_memory(found: SharedMemory) -> Verdict:
    """Whether /dev/shm has room for the batches that data loaders with workers pass."""
    told = f"{_size(found.free_bytes)} of {_size(found.size_bytes)} free"
    remedy = (
        "data loaders with workers need it. docker run: --shm-size 8g; Kubernetes: an emptyDir of "
        "medium Memory at /dev/shm; a machine: mount -o remount,size=50% /dev/shm"
    )
    check, subject, fault = "shared memory", "/dev/shm", Fault.SHM_SMALL
    if found.free_bytes <= SMALL_SHM_BYTES:
        return _error(check, subject, told, fault, remedy)
    if found.free_bytes < SHM_PER_WORKER_BYTES * found.workers:
        told = f"{told}, for {found.workers} workers"
        return _warning(check, subject, told, fault, remedy)
    return _ok(check, subject, told)


def open_files(found: OpenFiles) -> Verdict:
    told = f"{found.soft} (hard limit {found.hard})"
    if found.soft >= FEW_FILES:
        return _ok("open files", "limit", told)
    remedy = (
        f"raise it: ulimit -n {max(FEW_FILES, min(found.hard, 65536))}; systemd: LimitNOFILE=; "
        "docker run: --ulimit nofile=65536"
    )
    return _error("open files", "limit", told, Fault.OPEN_FILES_LOW, remedy)


def checkpoint_speed(found: CheckpointSpeed) -> Verdict:
    """Whether checkpoints can be written, and at least at `SLOW_CHECKPOINT_BYTES_PER_S`."""
    check = "checkpoints"
    if found.error:
        return _error(
            check,
            found.url,
            found.error,
            Fault.CHECKPOINT_UNUSABLE,
            found.advice,
            may_pass=found.may_pass,
        )
    write = found.size_bytes / max(found.write_s, 1e-9)
    read = found.size_bytes / max(found.read_s, 1e-9)
    told = f"writes {_size(write)}/s, reads {_size(read)}/s"
    if write < SLOW_CHECKPOINT_BYTES_PER_S:
        remedy = (
            "choose a faster directory, or save less often with --checkpoint-every; training goes "
            "on while a checkpoint is written, but leaving waits for it"
        )
        return _warning(check, found.url, told, Fault.CHECKPOINT_SLOW, remedy)
    return _ok(check, found.url, told)


def certificate(found: Certificate) -> Iterator[Verdict]:
    """Whether the certificate can be used, for how long, and whether its key is private."""
    check = "certificates"
    if found.error:
        told, _, remedy = found.error.rpartition("; ")
        remedy = remedy if told else "issue another one: elastic certs issue, see docs/SECURITY.md"
        yield _error(check, found.path, told or found.error, Fault.CERTIFICATE_UNUSABLE, remedy)
    elif found.distrusted:
        remedy = "give the authority that signed it as --tls-ca, or have that of --tls-ca sign it"
        told = f"the authority of --tls-ca does not verify it: {found.distrusted}"
        yield _error(check, found.path, told, Fault.CERTIFICATE_UNUSABLE, remedy)
    else:
        left_s = found.not_after_s - found.now_s
        told = f"valid for {left_s / 86_400:.0f} days"
        if left_s < EXPIRES_SOON_S:
            remedy = (
                "issue another one, and replace the files: elastic loads them without a restart"
            )
            told = f"valid for {left_s / 3600:.0f} hours"
            yield _warning(check, found.path, told, Fault.CERTIFICATE_EXPIRES, remedy)
        else:
            yield _ok(check, found.path, told)
    if found.exposed_key:
        remedy = f"chmod 600 {found.exposed_key}"
        told = "other users of this machine can read or write it"
        yield _warning(check, found.exposed_key, told, Fault.KEY_EXPOSED, remedy)


def etcd_member(found: EtcdMember) -> Iterator[Verdict]:
    """Whether the member answers, is new enough, reports no error, and commits fast."""
    check, subject = "etcd", found.endpoint
    if found.error:
        if found.unreachable:
            remedy = (
                "start it, correct --etcd, or open the network to it; http or https must match etcd"
            )
            fault = Fault.ETCD_UNREACHABLE
            yield _error(check, subject, found.error, fault, remedy, may_pass=True)
        else:
            remedy = found.advice or "see docs/MANY_NODES.md"
            yield _error(check, subject, found.error, Fault.ETCD_REFUSES, remedy)
        return
    yield from _etcd_version(found)
    yield from _etcd_errors(found)
    if found.size_bytes:
        yield _etcd_size(found)
    yield _etcd_speed(found)


def _etcd_version(found: EtcdMember) -> Iterator[Verdict]:
    if found.in_memory:
        yield _in_memory(found)
        return
    version = _numbers(found.version)[:3]
    line = version[:2]
    newest = max(ETCD_AT_LEAST)
    if line > newest or (line in ETCD_AT_LEAST and version >= ETCD_AT_LEAST[line]):
        yield _ok("etcd", found.endpoint, f"version {found.version}")
        return
    wanted = " or ".join(".".join(map(str, least)) for least in ETCD_AT_LEAST.values())
    remedy = (
        "upgrade one member after the other: older ones revoke healthy leases after a change of "
        "leader, and 3.5.0 to 3.5.4 can lose acknowledged writes"
    )
    told = f"version {found.version or 'unknown'}; expected at least {wanted}"
    yield _error("etcd", found.endpoint, told, Fault.ETCD_TOO_OLD, remedy)


def _in_memory(found: EtcdMember) -> Verdict:
    """The verdict on a coordinator with --store memory in place of etcd."""
    told = f"the memory of a coordinator, {found.version}"
    if found.alone:
        return _ok("etcd", found.endpoint, f"{told}; no other coordinator can replace it")
    remedy = "give the address of the job's only coordinator as --etcd, and no other"
    told = f"{told}; it must be the only endpoint"
    return _error("etcd", found.endpoint, told, Fault.ETCD_REFUSES, remedy)


def _etcd_errors(found: EtcdMember) -> Iterator[Verdict]:
    for text in found.errors:
        remedy = "see the logs of etcd's members: a majority must run and reach each other"
        if "NOSPACE" in text or "space" in text:
            remedy = "etcdctl compact REVISION, etcdctl defrag, then etcdctl alarm disarm"
        elif "CORRUPT" in text:
            remedy = "remove this member and add it again with an empty data directory"
        yield _error("etcd", found.endpoint, text, Fault.ETCD_ALARM, remedy, may_pass=True)


def _etcd_size(found: EtcdMember) -> Verdict:
    quota = found.quota_bytes or ETCD_QUOTA_BYTES
    share = found.size_bytes / quota
    default = "" if found.quota_bytes else ", unless --quota-backend-bytes says otherwise"
    told = (
        f"its database has {_size(found.size_bytes)}, {_size(found.used_bytes)} of them in use; "
        f"it refuses writes from {_size(quota)} on{default}"
    )
    remedy = (
        "start etcd with --auto-compaction-retention=1h (or run etcdctl compact REVISION), then "
        "etcdctl defrag on each member; or raise --quota-backend-bytes"
    )
    if share >= FULL_SHARE and found.quota_bytes:
        return _error("etcd", found.endpoint, told, Fault.ETCD_FILLING, remedy, may_pass=True)
    if share >= FILLING_SHARE:
        return _warning("etcd", found.endpoint, told, Fault.ETCD_FILLING, remedy)
    return _ok("etcd", found.endpoint, told)


def _etcd_speed(found: EtcdMember) -> Verdict:
    if not found.commit_s:
        return _ok("etcd", found.endpoint, "its speed was not measured")
    median = sorted(found.commit_s)[len(found.commit_s) // 2]
    told = f"commits in {_seconds(median)}, {_seconds(max(found.commit_s))} at most"
    remedy = (
        "put etcd's data on a local SSD that nothing else writes to, and its members close to each "
        "other and to the nodes"
    )
    if median >= TOO_SLOW_ETCD_S:
        return _error("etcd", found.endpoint, told, Fault.ETCD_SLOW, remedy, may_pass=True)
    if median >= SLOW_ETCD_S:
        return _warning("etcd", found.endpoint, told, Fault.ETCD_SLOW, remedy)
    return _ok("etcd", found.endpoint, told)


def coordinator(found: Coordinator, *, release: str) -> Verdict:
    """Whether the job's leader, if there is one, answers this node and has the same `release`, the
    MAJOR.MINOR of this elastic."""
    check = "coordinator"
    if found.error:
        subject = found.address or "leader"
        remedy = (
            "open the network to its port, give it an --advertise that this node reaches, and use "
            "certificates of the same job and authority"
        )
        fault = Fault.COORDINATOR_UNREACHABLE
        return _error(check, subject, found.error, fault, remedy, may_pass=True)
    if not found.address:
        return _ok(check, "leader", "none yet")
    if found.version and release_of(found.version) != release:
        remedy = "install one release (MAJOR.MINOR) everywhere; coordinators are upgraded first"
        told = f"the leader has elastic {found.version}, this node {release}"
        return _error(check, found.address, told, Fault.RELEASE_DIFFERS, remedy)
    return _ok(check, found.address, "answers")


def peer(found: Peer, *, elastic: str, torch: str) -> Iterator[Verdict]:
    """Whether this node reaches the peer and fits it. `elastic`, `torch`: this node's versions."""
    subject = f"{found.node} ({found.address})" if found.node else found.address
    if found.is_self:
        yield _ok("peers", found.address, "this node")
        return
    if found.error:
        yield _unreached(found, subject)
        return
    yield _ok("peers", subject, "answers")
    if release_of(found.elastic) != release_of(elastic):
        remedy = "install one release (MAJOR.MINOR) of elastic on all nodes"
        told = f"elastic {found.elastic}, here {elastic}"
        yield _error("versions", subject, told, Fault.RELEASE_DIFFERS, remedy)
    if found.torch != torch:
        remedy = (
            "install one version of torch on all nodes: the protocols of gloo and NCCL may differ"
        )
        told = f"torch {found.torch}, here {torch}"
        yield _warning("versions", subject, told, Fault.TORCH_DIFFERS, remedy)
    yield _clock(found, subject)
    yield _worker_port(found, subject)
    if found.sees_checkpoint is not None:
        yield _shared(found, subject)


def _unreached(found: Peer, subject: str) -> Verdict:
    if found.refused:
        remedy = (
            "start `elastic doctor` on that node at the same time, with the same --doctor-address "
            "and certificates"
        )
        return _error("peers", subject, found.error, Fault.PEER_ABSENT, remedy, may_pass=True)
    remedy = (
        "is the machine up, and does a firewall or security group let this node through to that "
        "port? A job needs all ports between its nodes, or those of --worker-port-range and of "
        "net.ipv4.ip_local_port_range"
    )
    return _error("peers", subject, found.error, Fault.PEER_SILENT, remedy, may_pass=True)


def _clock(found: Peer, subject: str) -> Verdict:
    off_s = abs(found.clock_ahead_s)
    sure_s = max(0.0, off_s - found.clock_error_s)  # the least that it can be
    ahead = "ahead" if found.clock_ahead_s > 0 else "behind"
    told = f"{_seconds(off_s)} {ahead} of this node's (within {_seconds(found.clock_error_s)})"
    if sure_s < CLOCK_WARNING_S:
        return _ok("clock", subject, told)
    remedy = "run chrony or systemd-timesyncd on both nodes, with the same servers"
    make = _error if sure_s >= CLOCK_ERROR_S else _warning
    return make("clock", subject, told, Fault.CLOCK_DIFFERS, remedy)


def _worker_port(found: Peer, subject: str) -> Verdict:
    told = f"a worker's port, {found.worker_port}"
    if not found.worker_port_error:
        return _ok("ports", subject, f"{told}, can be reached")
    remedy = (
        "let the nodes reach each other at the ports of workers: all, or those of "
        "--worker-port-range and of net.ipv4.ip_local_port_range"
    )
    told = f"{told}, cannot be reached: {found.worker_port_error}"
    return _error("ports", subject, told, Fault.PORT_BLOCKED, remedy)


def _shared(found: Peer, subject: str) -> Verdict:
    if found.sees_checkpoint:
        return _ok("checkpoints", subject, "has the same directory")
    remedy = (
        "give all nodes and coordinators the same place: a directory on a shared file system that "
        "is mounted on each, or a URL"
    )
    told = "what that node wrote to --checkpoint-dir is missing in this node's"
    return _error("checkpoints", subject, told, Fault.CHECKPOINT_NOT_SHARED, remedy)


def accelerator(found: Accelerator) -> Iterator[Verdict]:
    """Whether torch works here, and with the GPUs that there are."""
    if found.error:
        remedy = "reinstall torch in this environment, then try: python -c 'import torch'"
        yield _error("torch", "import", found.error, Fault.TORCH_UNUSABLE, remedy)
        return
    yield _ok("torch", "import", f"{found.torch}, {_built_for(found)}")
    yield from _gpus(found)
    if found.nccl:
        yield _nccl(found)


def _gpus(found: Accelerator) -> Iterator[Verdict]:
    check = "GPUs"
    seen, there = len(found.devices), found.device_files
    if there and not seen:
        missing = "a matching driver" if found.cuda else "a build of torch for CUDA"
        remedy = (
            f"install {missing}, and let the container or unit use the devices; "
            "CUDA_VISIBLE_DEVICES may hide them too"
        )
        told = f"{there} in /dev, but torch ({_built_for(found)}) sees none"
        yield _error(check, "torch", told, Fault.GPU_UNUSED, remedy)
    elif seen:
        yield _ok(check, "torch", f"{seen}: {', '.join(dict.fromkeys(found.devices))}")
    if seen and found.workers > seen:
        remedy = "give --nproc-per-node gpu, or let this node use more GPUs"
        told = f"{found.workers} workers and {seen} GPUs"
        yield _error(check, "--nproc-per-node", told, Fault.GPU_MISSING, remedy)
    for text in found.device_errors:
        remedy = "nvidia-smi -q, dmesg for Xid messages; drain the machine: elastic drain MACHINE"
        yield _error(check, "computing", text, Fault.GPU_FAULTY, remedy)


def _nccl(found: Accelerator) -> Verdict:
    first, last = FAULTY_NCCL
    version = _numbers(found.nccl)[:3]
    if found.nccl_error:
        remedy = (
            "run again with NCCL_DEBUG=INFO, and check drivers, topology and NCCL_SOCKET_IFNAME"
        )
        told = f"{found.nccl}: {found.nccl_error}"
        return _error("NCCL", "this node's GPUs", told, Fault.NCCL_FAULTY, remedy)
    if first <= version <= last:
        remedy = "install another version of nvidia-nccl: this one can hang when a peer is lost"
        return _error("NCCL", "version", found.nccl, Fault.NCCL_FAULTY, remedy)
    return _ok("NCCL", "version", found.nccl)


def all_reduce(found: AllReduce) -> Verdict:
    """Whether an all-reduce over the nodes works, and is fast enough for gradients."""
    subject = f"gloo, {found.nodes} nodes"
    if found.stalled_bytes:
        remedy = (
            "the ports are open, but the network is too slow or loses large packets: is it the "
            "fast one (--node-host)? Is its MTU the same on all nodes (ping -M do -s 1472 NODE)?"
        )
        told = (
            f"one number takes {_seconds(found.latency_s)}, but {_size(found.stalled_bytes)} do "
            f"not pass: {found.error}"
        )
        return _error("all-reduce", subject, told, Fault.NETWORK_SLOW, remedy)
    if found.error:
        remedy = (
            "the nodes must reach each other at all ports, or those of --worker-port-range and "
            "net.ipv4.ip_local_port_range, and know their own address (--node-host)"
        )
        return _error("all-reduce", subject, found.error, Fault.ALL_REDUCE_FAILED, remedy)
    told = f"{_size(found.bytes_per_s)}/s, {_seconds(found.latency_s)} for one number"
    if found.bytes_per_s < SLOW_NETWORK_BYTES_PER_S:
        remedy = (
            "is this the fast network (--node-host)? Over it, gradients of 1 GiB take "
            f"{_seconds(_GIB / max(found.bytes_per_s, 1.0))} a step"
        )
        return _warning("all-reduce", subject, told, Fault.NETWORK_SLOW, remedy)
    return _ok("all-reduce", subject, told)


def hangs(probe: str, deadline_s: float) -> Verdict:
    """The verdict on a probe that did not end in time."""
    remedy = "repair the file system or the device that it waits for: it would hold up a job"
    told = f"has not ended within {deadline_s:g} s"
    return _error(probe, "probe", told, Fault.PROBE_HANGS, remedy, may_pass=True)


# ---- inside


def _ok(check: str, subject: str, found: str) -> Verdict:
    return Verdict(check=check, subject=subject, found=found)


def _warning(
    check: str, subject: str, found: str, fault: Fault, remedy: str, *, may_pass: bool = False
) -> Verdict:
    fields: dict[str, Any] = {"fault": fault, "remedy": remedy, "may_pass": may_pass}
    return Verdict(check=check, subject=subject, found=found, result=Result.WARNING, **fields)


def _error(
    check: str, subject: str, found: str, fault: Fault, remedy: str, *, may_pass: bool = False
) -> Verdict:
    fields: dict[str, Any] = {"fault": fault, "remedy": remedy, "may_pass": may_pass}
    return Verdict(check=check, subject=subject, found=found, result=Result.ERROR, **fields)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0); anything after the numbers is ignored."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def _fits(version: str, package: Package) -> bool:
    found = _numbers(version)
    above = not package.at_least or found >= _numbers(package.at_least)
    return above and (not package.below or found < _numbers(package.below))


def _wanted(package: Package) -> str:
    """The bounds in words; a package that does not fit has at least one."""
    bounds = {"at least ": package.at_least, "below ": package.below}
    return " and ".join(f"{word}{version}" for word, version in bounds.items() if version)


def _specifier(package: Package) -> str:
    bounds = {">=": package.at_least, "<": package.below}
    return ",".join(f"{sign}{version}" for sign, version in bounds.items() if version)


def _built_for(found: Accelerator) -> str:
    return f"for CUDA {found.cuda}" if found.cuda else "for CPUs"


def _size(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", _GIB), ("MiB", _MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.1f} ms"
