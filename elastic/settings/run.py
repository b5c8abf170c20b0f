"""What `elastic run` can be told besides the script and its arguments: names, defaults, limits."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT_PREFIX = "ELASTIC_"
JOB_NAME_MAX_LENGTH = 40


class Console(enum.Enum):
    """Whose output reaches the terminal."""

    RANK0 = "rank0"
    ALL = "all"
    NONE = "none"


class OutputMode(enum.Enum):
    """How `elastic run` itself reports: a live line, JSON lines, or live only on a terminal."""

    AUTO = "auto"
    LIVE = "live"
    JSON = "json"


class Limits(NamedTuple):
    """What a value must satisfy: as a phrase for people and as keywords of `pydantic.Field`."""

    text: str
    bounds: Mapping[str, Any] = {}


class Option(NamedTuple):
    """One setting as the user meets it; `name` is its key in Python, `default` its plain value."""

    name: str
    default: str | int | float | None
    help: str
    limits: Limits

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The spelling in the environment."""
        return ENVIRONMENT_PREFIX + self.name.upper()


class SettingDescription(NamedTuple):
    """One row of the generated help and of docs/SETTINGS.md."""

    name: str
    default: str | int | float | None
    help: str
    environment_name: str


def _whole(at_least: int) -> Limits:
    return Limits(f"a whole number, at least {at_least}", {"ge": at_least})


def _number(at_least: int) -> Limits:
    return Limits(f"a number, at least {at_least}", {"ge": at_least, "allow_inf_nan": False})


def _one_of(choices: type[enum.Enum]) -> Limits:
    return Limits("one of " + ", ".join(choice.value for choice in choices))


_DURATION = Limits("a number of seconds above 0", {"gt": 0, "allow_inf_nan": False})
_DURATION_OR_ZERO = Limits("a number of seconds, at least 0", {"ge": 0, "allow_inf_nan": False})
_DIRECTORY = Limits("a directory, not empty text")
_NODES = Limits("N or MIN:MAX nodes, with MIN at least 1 and at most MAX")
_PROCESSES = Limits("a whole number, at least 1, or one of auto, gpu, cpu")
_ADDRESS = Limits("HOST:PORT with a port of at most 65535, an IPv6 host in brackets")
_JOB_NAME = Limits(
    f"at most {JOB_NAME_MAX_LENGTH} lower-case letters, digits and inner hyphens",
    {"pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "max_length": JOB_NAME_MAX_LENGTH},
)


def _about(
    help_text: str, limits: Limits, *, name: str | None = None, default: str | None = None
) -> dict[str, Any]:
    """Makes a field one that users can set; `name` and `default` say what differs for them."""
    return {"help": help_text, "limits": limits, "name": name, "default": default}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Validated settings of one `elastic run`; `load_run_settings` builds it from what users wrote.

    Limits of single values are checked there. Here only the relations between fields are asserted.
    """

    nproc_per_node: int = field(
        default=1,
        metadata=_about(
            "Workers on each node; auto is the GPUs, or the CPUs where there are none.", _PROCESSES
        ),
    )
    nnodes_min: int = field(
        default=1, metadata=_about("Nodes as N or MIN:MAX.", _NODES, name="nnodes", default="1:1")
    )
    nnodes_max: int = 1
    min_workers: int | None = field(
        default=None,
        metadata=_about(
            "Train only with at least this many workers; unset: one per minimal node.", _whole(1)
        ),
    )
    spares: int = field(
        default=1, metadata=_about("Warm processes kept ready on each node.", _whole(0))
    )
    max_restarts: int = field(
        default=100,
        metadata=_about("Unplanned worker restarts allowed within the restart window.", _whole(0)),
    )
    restart_window_s: float = field(
        default=3600.0,
        metadata=_about("Seconds for which a restart counts against --max-restarts.", _DURATION),
    )
    checkpoint_dir: str | None = field(
        default=None,
        metadata=_about(
            "Where checkpoints go, a path or an fsspec URL; unset: none are kept.", _DIRECTORY
        ),
    )
    checkpoint_every: int = field(
        default=100, metadata=_about("Steps between checkpoints; 0: only when leaving.", _whole(0))
    )
    keep_checkpoints: int = field(default=3, metadata=_about("Newest checkpoints kept.", _whole(1)))
    ledger: Path | None = field(
        default=None,
        metadata=_about(
            "Record which samples each committed step used in this file.", Limits("a file")
        ),
    )
    log_dir: Path | None = field(
        default=None,
        metadata=_about(
            "Directory for the workers' logs; unset: elastic/logs in ~/.local/state.", _DIRECTORY
        ),
    )
    console: Console = field(
        default=Console.RANK0,
        metadata=_about("Whose output is shown: rank0, all or none.", _one_of(Console)),
    )
    output: OutputMode = field(
        default=OutputMode.AUTO,
        metadata=_about(
            "Progress as a live line or JSON lines: live, json, or auto (live on a terminal).",
            _one_of(OutputMode),
        ),
    )
    listen: str | None = field(
        default=None,
        metadata=_about("HOST:PORT of the coordinator; unset: a private Unix socket.", _ADDRESS),
    )
    job: str = field(default="job", metadata=_about("Name of the job.", _JOB_NAME))
    seed: int = field(default=0, metadata=_about("Seed of the jitter between restarts.", _whole(0)))
    start_timeout_s: float = field(
        default=600.0,
        metadata=_about("Seconds in which a started worker must reach its first step.", _DURATION),
    )
    join_timeout_s: float = field(
        default=10.0,
        metadata=_about(
            "Seconds in which members must answer and connect when a group forms.", _DURATION
        ),
    )
    gather_timeout_s: float = field(
        default=30.0,
        metadata=_about(
            "Seconds to wait for all workers before starting with fewer.", _DURATION_OR_ZERO
        ),
    )
    hang_timeout_s: float = field(
        default=60.0,
        metadata=_about(
            "Shortest time in one step that counts as a hang; 0: never.", _DURATION_OR_ZERO
        ),
    )
    hang_factor: float = field(
        default=10.0,
        metadata=_about("A step this many times longer than usual counts as a hang.", _number(1)),
    )
    stop_grace_s: float = field(
        default=30.0,
        metadata=_about("Seconds for saving after the first signal to stop.", _DURATION_OR_ZERO),
    )

    def __post_init__(self) -> None:
        assert 1 <= self.nnodes_min <= self.nnodes_max, (self.nnodes_min, self.nnodes_max)
        assert 1 <= self.min_world_size <= self.max_world_size, (self.min_workers, self)

    @property
    def min_world_size(self) -> int:
        """The fewest workers that train: `min_workers`, or one per minimal node where unset."""
        return self.nnodes_min if self.min_workers is None else self.min_workers

    @property
    def max_world_size(self) -> int:
        """The most workers there can be."""
        return self.nproc_per_node * self.nnodes_max


def run_options() -> Iterator[Option]:
    """Every setting that users can give, in the order of the help; `nnodes` is one of them."""
    for one in fields(RunSettings):
        if one.metadata:
            default = one.metadata["default"] or one.default
            yield Option(
                name=one.metadata["name"] or one.name,
                default=default.value if isinstance(default, enum.Enum) else default,
                help=one.metadata["help"],
                limits=one.metadata["limits"],
            )


def describe_run_settings() -> tuple[SettingDescription, ...]:
    """The rows from which the command's help and docs/SETTINGS.md are generated."""
    return tuple(
        SettingDescription(option.name, option.default, option.help, option.variable)
        for option in run_options()
    )
