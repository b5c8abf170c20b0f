"""What the probes of `elastic doctor` found, as plain data. Times in seconds, sizes in bytes."""

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
    """What a host's name resolves to."""

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
    """Where elastic writes on this machine."""

    path: str
    of: str
    """What it is for: "logs", "state", "temporary files", "checkpoints"."""
    free_bytes: int = 0
    free_inodes: int | None = None
    """None: the file system does not count them."""
    error: str = ""
    """Why nothing can be written there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemory:
    """/dev/shm, through which data loaders hand over batches."""

    size_bytes: int
    free_bytes: int
    workers: int
    """Workers on this node that share it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFiles:
    """The limits of open descriptors of a process, RLIMIT_NOFILE."""

    soft: int
    hard: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpeed:
    """A file was written to the checkpoint directory, synced, and read again."""

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
    """Why it cannot be used, and what to do."""
    distrusted: str = ""
    """Why --tls-ca does not vouch for it."""
    exposed_key: str = ""
    """The key's path, where others can read it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdMember:
    """One endpoint of etcd."""

    endpoint: str
    version: str = ""
    commit_s: tuple[float, ...] = ()
    """How long commits took that changed nothing, one after the other."""
    errors: tuple[str, ...] = ()
    """What the member says of itself: alarms, no leader."""
    error: str = ""
    """Why it did not answer, or refused."""
    unreachable: bool = False
    in_memory: bool = False
    """It is a coordinator with --store memory."""
    alone: bool = True
    """It is the only endpoint."""
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """The leader of the job, if there is one."""

    address: str = ""
    """Empty: nobody leads yet."""
    version: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The doctor of another node."""

    address: str
    node: str = ""
    elastic: str = ""
    torch: str = ""
    clock_ahead_s: float = 0.0
    """The peer's wall clock less this one's."""
    clock_error_s: float = 0.0
    """By how much that may be wrong: half of the round trip."""
    worker_port: int = 0
    worker_port_error: str = ""
    sees_checkpoint: bool | None = None
    """Whether what the peer wrote to its checkpoint directory is in this node's; None: no word."""
    is_self: bool = False
    refused: bool = False
    """Its machine answers, and nothing listens at the port."""
    error: str = ""
    """Why it was not reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """What torch finds in a process of its own."""

    torch: str = ""
    cuda: str = ""
    """The version that torch was built for; empty: for CPUs."""
    device_files: int = 0
    """GPUs by their files in /dev."""
    devices: tuple[str, ...] = ()
    """GPUs by torch, by name."""
    device_errors: tuple[str, ...] = ()
    """Of GPUs that torch sees and that cannot compute."""
    nccl: str = ""
    nccl_error: str = ""
    """Why the node's own GPUs cannot all-reduce."""
    workers: int = 1
    error: str = ""
    """Why the process could not say anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce:
    """Sums of tensors over one process on each node."""

    nodes: int
    backend: str = "gloo"
    bytes_per_s: float = 0.0
    """Of the bus: 2 (n - 1) / n of the tensor's bytes for each sum."""
    latency_s: float = 0.0
    """Of a sum of one number."""
    error: str = ""
