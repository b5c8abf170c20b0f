"""Defines the settings of `elastic agent`: names, defaults, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from elastic.settings import shared
from elastic.settings.fields import Naming, Relation, group, setting
from elastic.settings.limits import (
    COMMAND,
    DURATION,
    DURATION_OR_ZERO,
    FILE,
    LEASE,
    NODE_NAME,
    YES_OR_NO,
    KeptLogs,
    PortRange,
    one_of,
)
from elastic.settings.security import SecuritySettings
from elastic.settings.shared import Console, Launch, OnQuarantine
from elastic.settings.store import StoreSettings


def _renewed_in_time(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    if values["isolation_timeout_s"] < values["node_ttl_s"]:
        yield (
            f"{naming.mention('isolation_timeout_s')} is less than "
            f"{naming.mention('node_ttl_s')}: the node would stop its workers between two renewals "
            f"of its lease; raise {naming.name('isolation_timeout_s')} or lower "
            f"{naming.name('node_ttl_s')}"
        )


def _enough_ports(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    ports, workers = values["worker_port_range"], values["nproc_per_node"]
    if ports is not None and ports.size < workers:
        yield (
            f"{naming.mention('worker_port_range')} has {ports.size} ports, and each of the "
            f"{workers} workers of {naming.mention('nproc_per_node')} listens at one; widen "
            f"{naming.name('worker_port_range')}: twice as many ports as workers leave room for "
            "workers that are being replaced"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """Validated settings of one `elastic agent`; `load_settings` builds it."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(("isolation_timeout_s", "node_ttl_s"), _renewed_in_time),
        Relation(("worker_port_range", "nproc_per_node"), _enough_ports),
    )

    script: Path | None = field(default=None, metadata=shared.SCRIPT)
    args: tuple[str, ...] = field(default=(), metadata=shared.ARGS)
    module: bool = field(default=False, metadata=shared.MODULE)
    job: str = field(default="job", metadata=shared.JOB)
    run_id: str = field(default="default", metadata=shared.RUN_ID)
    node_name: str | None = field(default=None, metadata=shared.NODE_NAME)
    node_host: str | None = field(default=None, metadata=shared.NODE_HOST)
    machine: str | None = setting(
        None,
        "Name of this node's machine; failures and quarantine count for the machine. Unset: the "
        "host name. In a container, give the name of the container's host.",
        NODE_NAME,
    )
    worker_port_range: PortRange | None = field(default=None, metadata=shared.WORKER_PORT_RANGE)
    nproc_per_node: int = field(default=1, metadata=shared.NPROC_PER_NODE)
    spares: int = field(default=1, metadata=shared.SPARES)
    checkpoint_dir: str | None = field(default=None, metadata=shared.SHARED_CHECKPOINT_DIR)
    checkpoint_every: int = field(default=100, metadata=shared.CHECKPOINT_EVERY)
    record_samples: bool = setting(
        False, "Tell the coordinator which samples were used, for its ledger.", YES_OR_NO
    )
    log_dir: Path | None = field(default=None, metadata=shared.LOG_DIR)
    keep_logs: KeptLogs = field(default=KeptLogs(runs=100, text="100"), metadata=shared.KEEP_LOGS)
    state_dir: Path | None = field(default=None, metadata=shared.STATE_DIR)
    http_address: str | None = field(default=None, metadata=shared.HTTP_ADDRESS_OF_A_NODE)
    metrics_address: str | None = field(default=None, metadata=shared.METRICS_ADDRESS)
    console: Console = field(default=Console.RANK0, metadata=shared.CONSOLE)
    seed: int = field(default=0, metadata=shared.SEED)
    start_timeout_s: float = field(default=600.0, metadata=shared.START_TIMEOUT_S)
    join_timeout_s: float = field(default=10.0, metadata=shared.JOIN_TIMEOUT_S)
    silence_timeout_s: float = field(default=60.0, metadata=shared.SILENCE_TIMEOUT_S)
    first_step_timeout_s: float = field(default=600.0, metadata=shared.FIRST_STEP_TIMEOUT_S)
    grace_s: float = setting(
        30.0,
        "Seconds for which workers outlive an agent that is killed or restarts.",
        DURATION_OR_ZERO,
    )
    drain_timeout_s: float = setting(
        15.0,
        "Seconds that a draining node's workers get to reach a step boundary.",
        DURATION_OR_ZERO,
    )
    preemption_file: Path | None = setting(
        None, "A file that appears when the node is about to be taken away.", FILE
    )
    preemption_command: tuple[str, ...] | None = setting(
        None, "A command that exits with 0 when the node is about to be taken away.", COMMAND
    )
    preemption_interval_s: float = setting(
        5.0, "Seconds between checks for a notice of preemption.", DURATION
    )
    on_quarantine: OnQuarantine = setting(
        OnQuarantine.WAIT,
        "What the agent does when its node is in quarantine: wait until it is cleared, or exit, "
        "so that another machine can take its place.",
        one_of(OnQuarantine),
    )
    node_ttl_s: float = setting(10.0, "Seconds of silence after which etcd drops a node.", LEASE)
    isolation_timeout_s: float = field(default=120.0, metadata=shared.ISOLATION_TIMEOUT_S)
    launch: Launch = field(default=Launch.AUTO, metadata=shared.LAUNCH)
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))
    store: StoreSettings = field(metadata=group("etcd"))
