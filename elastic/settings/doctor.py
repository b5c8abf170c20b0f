"""Defines the settings of `elastic doctor`, among them those of a node that it checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from elastic.settings import shared
from elastic.settings.fields import group, setting
from elastic.settings.limits import DURATION, LISTENING_ADDRESS, PEERS, PortRange, one_of
from elastic.settings.security import SecuritySettings
from elastic.settings.store import StoreSettings


class FailOn(enum.Enum):
    """The least severe finding that makes the command fail."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSettings:
    """The doctor's settings without etcd's, for a doctor that is given no etcd."""

    job: str = field(default="job", metadata=shared.JOB)
    node_name: str | None = field(default=None, metadata=shared.NODE_NAME)
    node_host: str | None = field(default=None, metadata=shared.NODE_HOST)
    worker_port_range: PortRange | None = field(default=None, metadata=shared.WORKER_PORT_RANGE)
    nproc_per_node: int = field(default=1, metadata=shared.NPROC_PER_NODE)
    checkpoint_dir: str | None = field(default=None, metadata=shared.SHARED_CHECKPOINT_DIR)
    log_dir: Path | None = field(default=None, metadata=shared.LOG_DIR)
    state_dir: Path | None = field(default=None, metadata=shared.STATE_DIR)
    peers: tuple[str, ...] = setting(
        (),
        "Nodes that run `elastic doctor` at the same time (they may include this one): HOST or "
        "HOST:PORT, separated by commas.",
        PEERS,
    )
    doctor_address: str = setting(
        "0.0.0.0:29410",
        "HOST:PORT at which this doctor listens for other nodes' doctors; its port is also the "
        "default for peers.",
        LISTENING_ADDRESS,
    )
    peer_timeout_s: float = setting(30.0, "Seconds to wait for other nodes' doctors.", DURATION)
    fail_on: FailOn = setting(
        FailOn.ERROR,
        "What ends the command with an exit code other than 0: error, warning (errors too) or "
        "never.",
        one_of(FailOn),
    )
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorSettings(MachineSettings):
    """Validated settings of one `elastic doctor`; `load_settings` builds it."""

    store: StoreSettings = field(metadata=group("etcd"))
