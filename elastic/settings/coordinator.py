"""Defines the settings of `elastic coordinator`: names, defaults, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from elastic.settings import shared
from elastic.settings.fields import Naming, Relation, group, setting
from elastic.settings.limits import (
    DURATION,
    DURATION_OR_ZERO,
    FILE,
    LEASE,
    LISTENING_ADDRESS,
    REACHABLE_ADDRESS,
    integer,
    is_wildcard,
    one_of,
    port_of,
)
from elastic.settings.security import SecuritySettings
from elastic.settings.store import CoordinatorStoreSettings

DEFAULT_LISTEN = "0.0.0.0:29400"
"""Every interface, since agents come from other machines; the port that torchrun uses too."""


def _most_and_least(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    if values["max_workers"] is not None and values["min_workers"] > values["max_workers"]:
        yield (
            f"{naming.mention('min_workers')} is more than {naming.mention('max_workers')}; lower "
            f"{naming.name('min_workers')} or raise {naming.name('max_workers')}"
        )


def _known_port(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    if int(port_of(values["listen"])) == 0:
        yield f"{naming.mention('listen')} has no port that others can know; give a port from 1 on"


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """Validated settings of one `elastic coordinator`; `load_settings` builds it."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(("min_workers", "max_workers"), _most_and_least),
        Relation(("listen",), _known_port),
    )

    job: str = field(default="job", metadata=shared.JOB)
    run_id: str = field(default="default", metadata=shared.RUN_ID)
    listen: str = setting(
        DEFAULT_LISTEN,
        "HOST:PORT, or :PORT for every interface, at which to answer agents and operators.",
        LISTENING_ADDRESS,
    )
    advertise: str | None = setting(
        None,
        "HOST or HOST:PORT at which other machines reach this coordinator; without a port, the "
        "port of --listen. Unset: --listen, with this machine's address for a wildcard. Other "
        "machines resolve a name at each connection.",
        REACHABLE_ADDRESS,
    )
    http_address: str | None = field(default=None, metadata=shared.HTTP_ADDRESS_OF_A_COORDINATOR)
    metrics_address: str | None = field(default=None, metadata=shared.METRICS_ADDRESS)
    min_workers: int = setting(1, "Train only with at least this many workers.", integer(1))
    max_workers: int | None = setting(
        None,
        "Train with at most this many workers; unset: no limit. After a decrease the surplus "
        "workers wait as soon as a coordinator with the new limit leads.",
        integer(1),
    )
    checkpoint_dir: str | None = field(default=None, metadata=shared.SHARED_CHECKPOINT_DIR)
    keep_checkpoints: int = field(default=3, metadata=shared.KEEP_CHECKPOINTS)
    ledger: Path | None = setting(
        None,
        "Record in this file which samples each committed step used; the nodes need "
        "--record-samples.",
        FILE,
    )
    curve: Path | None = field(default=None, metadata=shared.CURVE)
    tensorboard: Path | None = field(default=None, metadata=shared.TENSORBOARD)
    max_restarts: int = field(default=100, metadata=shared.MAX_RESTARTS)
    restart_window_s: float = field(default=3600.0, metadata=shared.RESTART_WINDOW_S)
    gather_timeout_s: float = field(default=30.0, metadata=shared.GATHER_TIMEOUT_S)
    join_timeout_s: float = field(default=10.0, metadata=shared.JOIN_TIMEOUT_S)
    hang_timeout_s: float = field(default=60.0, metadata=shared.HANG_TIMEOUT_S)
    first_step_timeout_s: float = field(default=600.0, metadata=shared.FIRST_STEP_TIMEOUT_S)
    pause_timeout_s: float = field(default=600.0, metadata=shared.PAUSE_TIMEOUT_S)
    hang_factor: float = field(default=10.0, metadata=shared.HANG_FACTOR)
    straggler_action: shared.StragglerAction = field(
        default=shared.StragglerAction.REPORT, metadata=shared.STRAGGLER_ACTION
    )
    stop_grace_s: float = field(default=30.0, metadata=shared.STOP_GRACE_S)
    leader_ttl_s: float = setting(
        3.0, "Seconds of silence after which another coordinator replaces the leader.", LEASE
    )
    isolation_timeout_s: float = field(default=120.0, metadata=shared.ISOLATION_TIMEOUT_S)
    agent_grace_s: float = setting(
        30.0,
        "Seconds to wait for a node whose agent is lost while its workers train.",
        DURATION_OR_ZERO,
    )
    planned_interval_s: float = setting(
        0.5, "Shortest time between two planned changes of the group.", DURATION_OR_ZERO
    )
    join_debounce_s: float = setting(
        0.1, "Seconds to wait for more newcomers before the first one joins.", DURATION_OR_ZERO
    )
    quarantine_after: int = setting(
        3,
        "Failures within the quarantine window after which a node is kept out; 0: never.",
        integer(0),
    )
    quarantine_window_s: float = setting(
        600.0, "Seconds for which a failure counts against its node.", DURATION
    )
    after_end: shared.AfterEnd = setting(
        shared.AfterEnd.EXIT,
        "What the coordinator does after the end of the run: exit with its code, or serve its "
        "records until a signal comes, for supervisors that restart every process. A run that "
        "all nodes have left goes on when they are back; serve waits for them.",
        one_of(shared.AfterEnd),
    )
    events_file: Path | None = setting(
        None,
        "Append events to this file as JSON lines, and open it again after a rotation; unset: "
        "standard output.",
        FILE,
    )
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))
    store: CoordinatorStoreSettings = field(metadata=group("etcd"))

    @property
    def advertised(self) -> str | None:
        """HOST:PORT for others; None if the caller must find this machine's address."""
        if self.advertise is None:
            return None if is_wildcard(self.listen) else self.listen
        return self.advertise if port_of(self.advertise) else f"{self.advertise}:{self.port}"

    @property
    def port(self) -> str:
        return port_of(self.listen)
