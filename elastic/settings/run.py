"""Defines the settings of `elastic run`: names, defaults, limits."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from elastic.settings import shared
from elastic.settings.fields import Naming, Relation, group, setting
from elastic.settings.limits import LISTENING_ADDRESS, NODES, KeptLogs, NodeRange, integer, one_of
from elastic.settings.security import SecuritySettings
from elastic.settings.shared import Console, Launch


class OutputMode(enum.Enum):
    """How `elastic run` itself reports: a live line, JSON lines, or auto: live on a terminal."""

    AUTO = "auto"
    LIVE = "live"
    JSON = "json"


def _reachable(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    most = values["nproc_per_node"] * values["nnodes"].maximum
    least = values["min_workers"]
    if least is not None and least > most:
        yield (
            f"{naming.mention('min_workers')} can never be reached: "
            f"{naming.mention('nproc_per_node')} x {naming.mention('nnodes')} gives at most "
            f"{most} workers; lower {naming.name('min_workers')} or raise "
            f"{naming.name('nproc_per_node')} or {naming.name('nnodes')}"
        )


def _one_style(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    if values["output"] is OutputMode.LIVE and values["console"] is Console.JSON:
        yield (
            f"{naming.mention('output')} and {naming.mention('console')} cannot be used together: "
            "JSON is for programs, a live line for people; remove one"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Validated settings of one `elastic run`; `load_settings` builds it and checks the limits.

    This class only asserts relations between its fields.
    """

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(("min_workers", "nproc_per_node", "nnodes"), _reachable),
        Relation(("output", "console"), _one_style),
    )

    script: Path | None = field(default=None, metadata=shared.SCRIPT)
    args: tuple[str, ...] = field(default=(), metadata=shared.ARGS)
    module: bool = field(default=False, metadata=shared.MODULE)
    nproc_per_node: int = field(default=1, metadata=shared.NPROC_PER_NODE)
    nnodes: NodeRange = setting(NodeRange(1, 1), "Nodes as N or MIN:MAX.", NODES)
    min_workers: int | None = setting(
        None,
        "Train only with at least this many workers; unset: the least of --nnodes.",
        integer(1),
    )
    spares: int = field(default=1, metadata=shared.SPARES)
    max_restarts: int = field(default=100, metadata=shared.MAX_RESTARTS)
    restart_window_s: float = field(default=3600.0, metadata=shared.RESTART_WINDOW_S)
    checkpoint_dir: str | None = field(default=None, metadata=shared.CHECKPOINT_DIR)
    checkpoint_every: int = field(default=100, metadata=shared.CHECKPOINT_EVERY)
    keep_checkpoints: int = field(default=3, metadata=shared.KEEP_CHECKPOINTS)
    ledger: Path | None = field(default=None, metadata=shared.LEDGER)
    curve: Path | None = field(default=None, metadata=shared.CURVE)
    tensorboard: Path | None = field(default=None, metadata=shared.TENSORBOARD)
    log_dir: Path | None = field(default=None, metadata=shared.LOG_DIR)
    keep_logs: KeptLogs = field(default=KeptLogs(runs=100, text="100"), metadata=shared.KEEP_LOGS)
    console: Console = field(default=Console.RANK0, metadata=shared.CONSOLE)
    output: OutputMode = setting(
        OutputMode.AUTO,
        "Progress as a live line or JSON lines: live, json, or auto (live on a terminal).",
        one_of(OutputMode),
    )
    listen: str | None = setting(
        None, "HOST:PORT of the coordinator; unset: a private Unix socket.", LISTENING_ADDRESS
    )
    http_address: str | None = field(default=None, metadata=shared.HTTP_ADDRESS_OF_A_NODE)
    metrics_address: str | None = field(default=None, metadata=shared.METRICS_ADDRESS)
    job: str = field(default="job", metadata=shared.JOB)
    launch: Launch = field(default=Launch.AUTO, metadata=shared.LAUNCH)
    seed: int = field(default=0, metadata=shared.SEED)
    start_timeout_s: float = field(default=600.0, metadata=shared.START_TIMEOUT_S)
    join_timeout_s: float = field(default=10.0, metadata=shared.JOIN_TIMEOUT_S)
    gather_timeout_s: float = field(default=30.0, metadata=shared.GATHER_TIMEOUT_S)
    hang_timeout_s: float = field(default=60.0, metadata=shared.HANG_TIMEOUT_S)
    silence_timeout_s: float = field(default=60.0, metadata=shared.SILENCE_TIMEOUT_S)
    first_step_timeout_s: float = field(default=600.0, metadata=shared.FIRST_STEP_TIMEOUT_S)
    pause_timeout_s: float = field(default=600.0, metadata=shared.PAUSE_TIMEOUT_S)
    hang_factor: float = field(default=10.0, metadata=shared.HANG_FACTOR)
    straggler_action: shared.StragglerAction = field(
        default=shared.StragglerAction.REPORT, metadata=shared.STRAGGLER_ACTION
    )
    stop_grace_s: float = field(default=30.0, metadata=shared.STOP_GRACE_S)
    security: SecuritySettings = field(default_factory=SecuritySettings, metadata=group("TLS"))

    def __post_init__(self) -> None:
        assert 1 <= self.nnodes.minimum <= self.nnodes.maximum, self.nnodes
        assert 1 <= self.min_world_size <= self.max_world_size, (self.min_workers, self)

    @property
    def min_world_size(self) -> int:
        """The fewest workers that train: `min_workers`, or the minimum of `nnodes` if unset."""
        return self.nnodes.minimum if self.min_workers is None else self.min_workers

    @property
    def max_world_size(self) -> int:
        return self.nproc_per_node * self.nnodes.maximum
