"""Defines the settings that several commands share, with the same help and limits."""

from __future__ import annotations

import enum

from elastic.settings import limits
from elastic.settings.fields import about
from elastic.settings.limits import (
    ARGUMENTS,
    DIRECTORY,
    DURATION,
    DURATION_OR_ZERO,
    FILE,
    HOST,
    HTTP_ADDRESS,
    JOB_NAME,
    KEPT_LOGS,
    PORTS,
    PROCESSES,
    RUN_NAME,
    integer,
    number,
    one_of,
)


class Console(enum.Enum):
    """The workers whose output reaches the terminal."""

    RANK0 = "rank0"
    ALL = "all"
    NONE = "none"
    JSON = "json"
    """All workers' output, each line as a JSON object."""


class Launch(enum.Enum):
    """How to start the script: as one that calls `elastic.init()`, as torchrun does, or auto.

    A script that never calls `elastic.init()` is restarted as a whole when the group changes.
    """

    AUTO = "auto"
    ELASTIC = "elastic"
    TORCHRUN = "torchrun"


class OnQuarantine(enum.Enum):
    """What an agent does while its node is kept out because it failed too often."""

    WAIT = "wait"
    EXIT = "exit"


class StragglerAction(enum.Enum):
    """What to do about a rank that holds up the others in every step."""

    REPORT = "report"
    REPLACE = "replace"


class AfterEnd(enum.Enum):
    """What a coordinator does when the run has ended."""

    EXIT = "exit"
    SERVE = "serve"


SCRIPT = about("The training script.", FILE, positional="SCRIPT")
ARGS = about(
    "The script's own arguments; in an environment variable quoted as for a shell, in a TOML file "
    "an array.",
    ARGUMENTS,
    positional="ARGUMENTS",
)
MODULE = about(
    "SCRIPT is the name of a module, which runs as with python -m.", limits.YES_OR_NO, short="-m"
)
NODE_NAME = about("Name of this node, unique in the job; unset: the host name.", limits.NODE_NAME)
NODE_HOST = about(
    "Name or address at which other nodes reach the workers of this one; unset: the address from "
    "which this machine reaches etcd.",
    HOST,
)
WORKER_PORT_RANGE = about(
    "Ports at which workers listen for their group; they skip ports in use. Unset: any. The "
    "kernel chooses the other ports of gloo and NCCL, see net.ipv4.ip_local_port_range.",
    PORTS,
)
STATE_DIR = about(
    "Directory for this node's sockets and tokens; unset: one in the user's runtime directory.",
    DIRECTORY,
)
JOB = about("Name of the job.", JOB_NAME)
RUN_ID = about(
    "Which run of the job this is. A run that has ended does not train again: a process that joins "
    "it exits with its code.",
    RUN_NAME,
)
LAUNCH = about(
    "How to start the script: elastic (it calls elastic.init), torchrun, or auto: elastic if it "
    "or a module beside it imports elastic.",
    one_of(Launch),
)
NPROC_PER_NODE = about(
    "Workers on each node: a number, gpu, cpu, or auto (GPUs, or CPUs if there are none).",
    PROCESSES,
)
SPARES = about("Warm processes kept ready on each node.", integer(0))
MAX_RESTARTS = about("Unplanned worker restarts allowed within the restart window.", integer(0))
RESTART_WINDOW_S = about("Seconds for which a restart counts against --max-restarts.", DURATION)
CHECKPOINT_DIR = about(
    "Where to keep checkpoints, a path or an fsspec URL; unset: nowhere.", DIRECTORY
)
SHARED_CHECKPOINT_DIR = about(
    "Where to keep checkpoints, a path or an fsspec URL that is the same place for the "
    "coordinators and all nodes; unset: nowhere.",
    DIRECTORY,
)
CHECKPOINT_EVERY = about(
    "Steps between checkpoints; 0: only at the end and when leaving.", integer(0)
)
KEEP_CHECKPOINTS = about("How many of the newest checkpoints to keep.", integer(1))
LEDGER = about("Record in this file which samples each committed step used.", FILE)
CURVE = about(
    "Write what the script reports of each committed step to this file: JSON lines, or CSV if its "
    "name ends with .csv.",
    FILE,
)
TENSORBOARD = about(
    "Write the reported values for TensorBoard to this directory; needs tensorboardX.", DIRECTORY
)
LOG_DIR = about(
    "Directory for the workers' logs; unset: elastic/logs in ~/.local/state.", DIRECTORY
)
CONSOLE = about(
    "Whose output to show: rank0, all or none. json: all output, each line as a JSON object.",
    one_of(Console),
)
KEEP_LOGS = about(
    "How many log directories of this job's runs to keep, how large they may be in all, or both: "
    "10, 5GB, or 10,5GB. The oldest go first, but never one that is in use.",
    KEPT_LOGS,
)
SEED = about("Seed of the jitter between restarts.", integer(0))
START_TIMEOUT_S = about(
    "Seconds in which a worker that has started, or got a slot, must call session.steps() or "
    "session.run().",
    DURATION,
)
JOIN_TIMEOUT_S = about(
    "Seconds in which members must answer and connect when a group forms.", DURATION
)
GATHER_TIMEOUT_S = about(
    "Seconds to wait for all workers before starting with fewer.", DURATION_OR_ZERO
)
HANG_TIMEOUT_S = about(
    "Shortest time in one step that counts as a hang; 0: never.", DURATION_OR_ZERO
)
SILENCE_TIMEOUT_S = about(
    "Seconds for which a worker's process may stay silent, for example while C code holds the "
    "interpreter; then another worker replaces it. 0: for ever. While a worker compiles, "
    "--first-step-timeout-s applies.",
    DURATION_OR_ZERO,
)
FIRST_STEP_TIMEOUT_S = about(
    "Shortest time that counts as a hang in the first step of a group or while torch.compile "
    "runs; 0: never. Compiling before the first step extends --start-timeout-s by as much.",
    DURATION_OR_ZERO,
)
PAUSE_TIMEOUT_S = about(
    "Seconds for which the others may wait for a worker that is between two steps or inside "
    "session.run, before that counts as a hang; 0: for ever.",
    DURATION_OR_ZERO,
)
HANG_FACTOR = about("A step this many times longer than usual counts as a hang.", number(1))
STRAGGLER_ACTION = about(
    "What to do when a rank holds up the others in every step: report it, or replace its worker.",
    one_of(StragglerAction),
)
STOP_GRACE_S = about("Seconds for saving after the first signal to stop.", DURATION_OR_ZERO)
ISOLATION_TIMEOUT_S = about(
    "Seconds for which a node that reaches neither etcd nor the leader may train on; must be the "
    "same for the coordinators and all nodes.",
    DURATION,
)
HTTP_ADDRESS_OF_A_NODE = about(
    "HOST:PORT for /metrics, /healthz and /readyz over HTTP, with `elastic run` also for the job's "
    "page; unset or off: none.",
    HTTP_ADDRESS,
)
HTTP_ADDRESS_OF_A_COORDINATOR = about(
    "HOST:PORT for the job's page, /metrics, /healthz and /readyz over HTTP; off: none; unset: "
    "127.0.0.1:9400 if that is free.",
    HTTP_ADDRESS,
)
METRICS_ADDRESS = about(
    "HOST:PORT for /metrics, /healthz and /readyz without the page; unset: /metrics is at "
    "--http-address; off: nowhere.",
    HTTP_ADDRESS,
)
