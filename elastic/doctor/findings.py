"""Holds what the probes of `elastic doctor` found, as data. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A Python package that elastic needs."""

    name: str
    found: str | None
    """Its version; None: it is not installed."""
    at_least: str = ""
    below: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The addresses that a host's name resolves to."""

    name: str
    of: str
    """Whose name it is, for people: "this node", "peer", "etcd"."""
    addresses: tuple[str, ...] = ()
    took_s: float = 0.0
    error: str = ""
    silent: bool = False
    """No name server answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """A directory on this machine that elastic writes to."""

    path: str
    of: str
    """What it is for: "logs", "state", "temporary files", "checkpoints"."""
    free_bytes: int = 0
    free_inodes: int | None = None
    """None: the file system does not count them."""
    error: str = ""
    """Why this user cannot write there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemory:
    """/dev/shm, through which data loaders hand over batches."""

    size_bytes: int
    free_bytes: int
    workers: int
    """Workers on this node that share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFiles:
    """The limits on open descriptors of a process (RLIMIT_NOFILE)."""

    soft: int
    hard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpeed:
    """How fast a file was written to the checkpoint directory, with sync, and read."""

    url: str
    size_bytes: int = 0
    write_s: float = 0.0
    read_s: float = 0.0
    error: str = ""
    advice: str = ""
    may_pass: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The certificate with which this node takes part in the job."""

    path: str
    not_after_s: float = 0.0
    """Unix time."""
    now_s: float = 0.0
    error: str = ""
    """Why the certificate cannot be used, and what to do."""
    distrusted: str = ""
    """Why --tls-ca does not vouch for it."""
    exposed_key: str = ""
    """The key's path if other users can read or write it; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdMember:
    """One endpoint of etcd."""

    endpoint: str
    version: str = ""
    commit_s: tuple[float, ...] = ()
    """Seconds that each of several commits took, one after the other; they changed nothing."""
    errors: tuple[str, ...] = ()
    """Errors that the member itself reports, such as alarms or no leader."""
    size_bytes: int = 0
    """The size of its database; 0: unknown."""
    used_bytes: int = 0
    """The part of `size_bytes` that a defragmentation would leave."""
    quota_bytes: int = 0
    """The size at which it refuses writes; 0: it does not tell."""
    error: str = ""
    """Why it did not answer, or refused."""
    unreachable: bool = False
    in_memory: bool = False
    """The endpoint is a coordinator with --store memory."""
    alone: bool = True
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """The leader of the job, if there is one."""

    address: str = ""
    """Empty: there is no leader yet."""
    version: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another node, as its own doctor reports it and as this node reaches it."""

    address: str
    node: str = ""
    elastic: str = ""
    torch: str = ""
    clock_ahead_s: float = 0.0
    """The peer's wall clock minus this node's."""
    clock_error_s: float = 0.0
    """The error of `clock_ahead_s`: half of the shortest round trip."""
    worker_port: int = 0
    worker_port_error: str = ""
    sees_checkpoint: bool | None = None
    """Whether the peer's file in its checkpoint directory is in this node's too; None: unknown."""
    is_self: bool = False
    refused: bool = False
    """The machine answers, but no doctor of the job listens at the port."""
    error: str = ""
    """Why the peer was not reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """What torch finds in a separate process."""

    torch: str = ""
    cuda: str = ""
    """The CUDA version that torch was built for; empty: none."""
    device_files: int = 0
    """The number of GPUs by their files in /dev."""
    devices: tuple[str, ...] = ()
    """The names of the GPUs that torch sees."""
    device_errors: tuple[str, ...] = ()
    """Errors of GPUs that torch sees but that compute wrongly or not at all."""
    nccl: str = ""
    nccl_error: str = ""
    """Why the node's own GPUs cannot all-reduce."""
    workers: int = 1
    error: str = ""
    """Why the process reported nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """The speed of all-reduces over one process on each node."""

    nodes: int
    bytes_per_s: float = 0.0
    """Bus bandwidth: 2 (n - 1) / n of the tensor's bytes in each all-reduce over n nodes."""
    latency_s: float = 0.0
    """Seconds for an all-reduce of one number."""
    error: str = ""
    stalled_bytes: int = 0
    """Of all-reduces that failed with `error` although those of one number pass; 0: none."""
