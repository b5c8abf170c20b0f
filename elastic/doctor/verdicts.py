"""What a check says: the fault if there is one, how bad it is, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Result(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A job runs, but worse than it could."""
    ERROR = "error"
    """A job does not run, or is lost when something fails."""


class Fault(enum.Enum):
    """Every fault that `elastic doctor` can name; docs/DOCTOR.md has them all."""

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
    """One line of the table."""

    check: str
    subject: str
    found: str
    result: Result = Result.OK
    fault: Fault | None = None
    remedy: str = ""
    may_pass: bool = False
    """It may be well later, without anything being changed on this node."""

    def __post_init__(self) -> None:
        is_ok = self.result is Result.OK
        assert is_ok == (self.fault is None) == (not self.remedy), "a fault has a name and a remedy"


def worst(verdicts: Iterable[Verdict]) -> Result:
    """Of all of them; OK of none."""
    found = {verdict.result for verdict in verdicts}
    return next((one for one in (Result.ERROR, Result.WARNING) if one in found), Result.OK)
