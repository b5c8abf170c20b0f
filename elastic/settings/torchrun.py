"""The command line of `elastic torchrun`: torchrun's options, and what elastic has for each.

Names, numbers of arguments, defaults and PET_ variables are those of the parser of torch 2.13
(torch/distributed/run.py), which a test compares with this table. It is a table of its own because
importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import enum
import re
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import ConfigurationError
from elastic.settings.limits import MAX_SECONDS

_ENVIRONMENT_PREFIX = "PET_"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


class Answer(enum.Enum):
    """What `elastic torchrun` does with an option."""

    MAPPED = 1
    NO_EFFECT = 2
    """Accepted, with one line that says why it has no effect."""
    REFUSED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """An option of torchrun."""

    flags: tuple[str, ...]
    """As torch's parser has them; those with underscores are derived."""
    default: Any = None
    kind: Callable[[str], Any] = str
    switch: bool = False
    choices: tuple[str, ...] | None = None
    answer: Answer = Answer.MAPPED
    text: str
    """The help; why it has no effect; or what to do instead."""
    in_environment: bool = True
    """PET_NAME gives it, too."""

    @property
    def name(self) -> str:
        """The key of its value, and the end of its variable's name."""
        return self.long.removeprefix("--").replace("-", "_")

    @property
    def long(self) -> str:
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def spellings(self) -> tuple[str, ...]:
        """All flags. The spelling with hyphens comes before that with underscores, as in torch."""
        underscored = "--" + self.name
        return (*self.flags, underscored) if underscored not in self.flags else self.flags


def _separated(value: str) -> list[str]:
    """Split at commas; a double comma stands for a comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


TABLE = (
    Row(flags=("--nnodes",), default="1:1", text="Nodes: N or MIN:MAX."),
    Row(flags=("--nproc-per-node",), default="1", text="Workers: a number, gpu, cpu or auto."),
    Row(flags=("--rdzv-backend",), default="static", text="static or c10d. With one node, they "
        "differ only in MASTER_ADDR and MASTER_PORT."),
    Row(flags=("--rdzv-endpoint",), default="", text="HOST:PORT where nodes meet; with static: of "
        "MASTER_ADDR and MASTER_PORT."),
    Row(flags=("--rdzv-id",), default="none", text="TORCHELASTIC_RUN_ID, the same on all nodes."),
    Row(flags=("--rdzv-conf",), default="", text="NAME=VALUE,... for several nodes: join_timeout, "
        "last_call_timeout and is_host with c10d, timeout with static."),
    Row(flags=("--standalone",), switch=True, default=False,
        text="Ignore the other rendezvous options, and use a random run id."),
    Row(flags=("--max-restarts",), kind=int, default=0,
        text="Restarts of all workers before the job fails."),
    Row(flags=("--monitor-interval",), kind=float, default=0.1, answer=Answer.NO_EFFECT,
        text="the kernel tells elastic at once when a worker ends"),
    Row(flags=("--start-method",), default="spawn", choices=("spawn", "fork", "forkserver"),
        answer=Answer.NO_EFFECT, text="it is not for scripts, in torchrun neither"),
    Row(flags=("--event-log-handler",), default="null", answer=Answer.NO_EFFECT,
        text="`elastic events` shows what happens to the job"),
    Row(flags=("--role",), default="default", text="ROLE_NAME, and the prefix of --tee."),
    Row(flags=("-m", "--module"), switch=True, default=False,
        text="The script is a module's name, as for python -m."),
    Row(flags=("--no-python",), switch=True, default=False,
        text="The script is a program that is executed itself."),
    Row(flags=("--run-path",), switch=True, default=False,
        text="Run the script in the worker's interpreter; wins over -m and --no-python."),
    Row(flags=("--log-dir",), text="Make the directory ID_RANDOM for this run's logs here."),
    Row(flags=("-r", "--redirects"), default="0",
        text="Write to files: 1 stdout, 2 stderr, 3 both; or LOCAL_RANK:N,..."),
    Row(flags=("-t", "--tee"), default="0",
        text="Write to files and, with a prefix, to the console; as --redirects."),
    Row(flags=("--local-ranks-filter",), default="",
        text="Local ranks whose output reaches the console: 0,1."),
    Row(flags=("--duplicate-stdout-filters",), kind=_separated, default=[],
        text="Copy lines of --tee with one of these texts to filtered_stdout.log."),
    Row(flags=("--duplicate-stderr-filters",), kind=_separated, default=[],
        text="Copy lines of --tee with one of these texts to filtered_stderr.log."),
    Row(flags=("--node-rank",), kind=int, default=0, text="This node's rank, with static."),
    Row(flags=("--master-addr",), default="127.0.0.1",
        text="MASTER_ADDR, if --master-port is given, too."),
    Row(flags=("--master-port",), kind=int, text="MASTER_PORT, where a store listens."),
    Row(flags=("--local-addr",), text="The address at which other nodes reach this one; with one "
        "node: MASTER_ADDR, unless --master-port is given."),
    Row(flags=("--logs-specs",), in_environment=False, answer=Answer.REFUSED,
        text="elastic does not load torchrun's plug-ins for logs; leave it out, and use --log-dir, "
        "--redirects and --tee"),
    Row(flags=("--numa-binding",), in_environment=False, answer=Answer.REFUSED,
        choices=("node", "socket", "exclusive", "core-complex"),
        text="elastic does not bind workers to processors; leave it out, and bind the job with "
        "numactl, or each worker with: --no-python numactl ARGUMENTS python -u SCRIPT"),
    Row(flags=("--signals-to-handle",), default=_SIGNALS,
        text="Signals that are forwarded to the workers and end the job."),
    Row(flags=("--shutdown-timeout",), kind=int,
        text="Seconds until workers that should end are killed; unset: "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30."),
    Row(flags=("--virtual-local-rank",), switch=True, default=False,
        text="LOCAL_RANK is 0, and CUDA_VISIBLE_DEVICES the worker's own GPU."),
)  # fmt: skip

_ELASTIC_HAS = {
    "rdzv_backend": "--etcd, or a coordinator with --store memory",
    "rdzv_endpoint": "--etcd of `elastic agent`",
    "rdzv_id": "--job, and --run-id of `elastic agent`",
    "rdzv_conf": "--join-timeout-s and --gather-timeout-s",
    "standalone": "no such option: `elastic run` is for one machine, `elastic agent` for several",
    "role": "--job",
    "log_dir": "--log-dir",
    "redirects": "--log-dir, where all output is",
    "tee": "--console all",
    "local_ranks_filter": "--console rank0, all or none",
    "node_rank": "no such option: the coordinator gives the ranks",
    "master_addr": "--node-host of `elastic agent`",
    "master_port": "--worker-port-range of `elastic agent`",
    "local_addr": "--node-host of `elastic agent`",
    "shutdown_timeout": "--stop-grace-s; agents have --drain-timeout-s",
}
"""What a user of `elastic run` or `elastic agent` may have meant with an option of torchrun."""


def belongs_to_torchrun(flag: str) -> str | None:
    """Return "is an option of torchrun..." and what elastic has; None if torchrun has none."""
    for row in TABLE:
        if flag.replace("_", "-") in row.flags:
            own = _ELASTIC_HAS.get(row.name)
            told = "is an option of torchrun, which `elastic torchrun` takes"
            return f"{told}; elastic itself has {own}" if own else told
    return None


_UNUSED_VARIABLES = {
    "TORCHELASTIC_HEALTH_CHECK_PORT": "set ELASTIC_HTTP_ADDRESS=HOST:PORT, which serves /healthz",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "elastic does not wait for such a process",
    "TORCH_ELASTIC_WORKER_IDENTICAL": "all nodes must have the same --nproc-per-node anyway",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "the store at MASTER_PORT belongs to the workers alone",
}
_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"

_LAST_PORT = 65535
_DEFAULT_PORT, _DEFAULT_STATIC_PORT = 29400, 29500  # torch's
_TO_COORDINATOR = 1000  # far from MASTER_PORT + 1, which is often another job's MASTER_PORT
_MASK = re.compile(r"[0123]")
_MASKS = re.compile(r"\d+:[0123](,\d+:[0123])*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """How the nodes of a job meet."""

    least: int
    most: int
    """How many nodes there are."""
    host: str
    port: int
    """Where the coordinator listens."""
    given_by: str
    """The options that decide where that is, as people should read them."""
    node_rank: int | None
    """None: the nodes find out the order of their ranks."""
    is_host: bool | None
    """Whether the coordinator runs here; None: if `host` is this machine."""
    local_addr: str
    """The address at which other nodes reach this one; empty: found out."""
    join_timeout_s: float
    """How long nodes wait for the others."""
    last_call_s: float
    """How long they wait for more than `least`."""
    same: str
    """The options that must be the same on all nodes, as must --nproc-per-node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunOptions:
    """What a command line of torchrun asks for, on this node."""

    script: str
    args: tuple[str, ...]
    nproc_per_node: str
    run_id: str
    max_restarts: int
    role: str
    module: bool
    run_path: bool
    no_python: bool
    interpreter: str
    """PYTHON_EXEC: another interpreter for the script; empty: this one."""
    log_dir: str | None
    redirects: Mapping[int, int] | int
    tee: Mapping[int, int] | int
    shown: frozenset[int]
    """Local ranks whose output reaches the console; empty: all."""
    stdout_filters: tuple[str, ...]
    stderr_filters: tuple[str, ...]
    prefix: str
    master_addr: str
    """With `master_port`: where the scripts' store listens. Else the address of this node."""
    master_port: int | None
    signals: str
    shutdown_timeout_s: int
    virtual_local_rank: bool
    rendezvous: Rendezvous | None
    """None: there is only this node."""
    notes: tuple[str, ...] = field(default=())
    """One line for each thing given that has no effect."""

    def streams_of(self, local_rank: int, choice: Mapping[int, int] | int) -> int:
        """The streams of a local rank as --redirects and --tee number them."""
        return choice if isinstance(choice, int) else choice.get(local_rank, 0)


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> TorchrunOptions:
    """Parse torchrun's options, given as arguments or as PET_ variables.

    Raises SystemExit after --help, and with 2 after it has printed what is wrong with the usage.
    """
    parser = _parser(environment)
    values = parser.parse_args(argv)
    notes = _notes(values, environment)
    try:
        return _resolved(values, environment, notes)
    except ConfigurationError as error:
        parser.error(str(error))


def options_of(given: argparse.Namespace, environment: Mapping[str, str]) -> TorchrunOptions:
    """Return what a program asks for that has filled in what torch's parser gives, such as
    `accelerate launch`. Raises ConfigurationError."""
    values = argparse.Namespace(**vars(given))
    for row in TABLE:
        value = getattr(values, row.name, None)
        value = row.default if value is None else value
        is_text = isinstance(value, str) and not row.switch
        setattr(values, row.name, row.kind(value) if is_text else value)
    values.nproc_per_node, values.nnodes = str(values.nproc_per_node), str(values.nnodes)
    return _resolved(values, environment, _notes(values, environment))


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic torchrun",
        description="Run a script as torchrun does, with torchrun's options (of torch 2.13).",
        epilog="Each option is also a variable: PET_NNODES for --nnodes. `elastic run` has the "
        "options of elastic itself, of which this command takes ELASTIC_* variables.",
    )
    for row in TABLE:
        _add(parser, row, environment)
    parser.add_argument("training_script", help="The script, or a module with -m.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def _add(parser: argparse.ArgumentParser, row: Row, environment: Mapping[str, str]) -> None:
    given = environment.get(_ENVIRONMENT_PREFIX + row.name.upper()) if row.in_environment else None
    text = row.text if row.answer is Answer.MAPPED else f"{row.answer.name.lower()}: {row.text}"
    text = text.replace("_", " ", 1) if row.answer is Answer.NO_EFFECT else text
    if row.switch:
        is_on = bool(given) and _integer(parser, row, str(given)) != 0
        parser.add_argument(
            *row.spellings, action="store_true", default=is_on, dest=row.name, help=text
        )
        return
    parser.add_argument(
        *row.spellings,
        dest=row.name,
        type=row.kind,
        default=row.default if given is None else given,  # argparse converts a text
        choices=row.choices,
        help=text,
    )


def _integer(parser: argparse.ArgumentParser, row: Row, given: str) -> int:
    try:
        return int(given)
    except ValueError:
        parser.error(f"{_ENVIRONMENT_PREFIX}{row.name.upper()} is {given!r}; expected 0 or 1")


def _notes(values: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return a line for each thing given that has no effect."""
    given = vars(values)
    notes = [
        f"{row.long} {given[row.name]} has no effect: {row.text}"
        for row in TABLE
        if row.answer is Answer.NO_EFFECT and given[row.name] != row.default
    ]
    notes += [
        f"{name} has no effect: {why}"
        for name, why in _UNUSED_VARIABLES.items()
        if environment.get(name)
    ]
    return notes


def _resolved(
    values: argparse.Namespace, environment: Mapping[str, str], notes: list[str]
) -> TorchrunOptions:
    for row in TABLE:
        if row.answer is Answer.REFUSED and getattr(values, row.name) is not None:
            raise ConfigurationError(f"{row.long} is not supported: {row.text}")
    if environment.get(_FILE_TIMER) == "1":
        raise ConfigurationError(
            f"{_FILE_TIMER}=1 is not supported: elastic has no server for timers of "
            "torch.distributed.elastic.timer; unset it"
        )
    least, most = _nodes(values)
    if values.module and values.no_python and not values.run_path:
        raise ConfigurationError(
            "-m and --no-python cannot be used together: leave out -m for a program, --no-python "
            "for a module"
        )
    if values.max_restarts < 0:
        raise ConfigurationError(f"--max-restarts {values.max_restarts}: expected 0 or more")
    if values.nproc_per_node not in ("auto", "cpu", "gpu") and not _is_count(values.nproc_per_node):
        raise ConfigurationError(
            f"--nproc-per-node {values.nproc_per_node}: expected a number, at least 1, gpu, cpu or "
            "auto"
        )
    rendezvous = _rendezvous(values, least, most, notes) if most > 1 else None
    if rendezvous is None:
        _require_first(values)
        master_addr, master_port, is_named = _meeting_point(values, notes)
    else:
        is_named, is_static = True, rendezvous.node_rank is not None
        master_addr, master_port = _static_endpoint(values) if is_static else ("", None)
    signals = _known_signals(values.signals_to_handle, notes)
    _note_unused_filters(values, notes)
    return TorchrunOptions(
        script=values.training_script,
        args=tuple(values.training_script_args),
        nproc_per_node=values.nproc_per_node,
        run_id=(values.rdzv_id if is_named else "") or str(uuid.uuid4()),
        max_restarts=values.max_restarts,
        role=values.role,
        module=values.module and not values.run_path,
        run_path=values.run_path,
        no_python=values.no_python and not values.run_path,
        interpreter="" if values.run_path else environment.get("PYTHON_EXEC", ""),
        log_dir=values.log_dir,
        redirects=_streams("--redirects", values.redirects),
        tee=_streams("--tee", values.tee),
        shown=_ranks(values.local_ranks_filter),
        stdout_filters=tuple(values.duplicate_stdout_filters),
        stderr_filters=tuple(values.duplicate_stderr_filters),
        prefix=environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        master_addr=master_addr,
        master_port=master_port,
        signals=signals,
        shutdown_timeout_s=_shutdown_timeout_s(values.shutdown_timeout, environment),
        virtual_local_rank=values.virtual_local_rank,
        rendezvous=rendezvous,
        notes=tuple(notes),
    )


def _is_count(text: str) -> bool:
    try:
        return int(text) >= 1
    except ValueError:
        return False


def _nodes(values: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the most nodes."""
    try:
        least, _, most = values.nnodes.partition(":")
        minimum, maximum = int(least), int(most or least)
    except ValueError:
        minimum = maximum = 0
    if not 0 < minimum <= maximum:
        raise ConfigurationError(f"--nnodes {values.nnodes}: expected N or MIN:MAX, from 1 on")
    if maximum > 1 and values.standalone:
        raise ConfigurationError(
            f"--nnodes {values.nnodes} and --standalone cannot be used together: a standalone job "
            "has one node; leave one of them out"
        )
    return minimum, maximum


def _require_first(values: argparse.Namespace) -> None:
    if values.node_rank != 0 and values.rdzv_backend == "static" and not values.standalone:
        raise ConfigurationError(
            f"--node-rank {values.node_rank}: --nnodes {values.nnodes} has only rank 0; give the "
            "number of nodes with --nnodes"
        )


def _rendezvous(values: argparse.Namespace, least: int, most: int, notes: list[str]) -> Rendezvous:
    """How several nodes meet, by the rules of torch's rendezvous backends."""
    backend = values.rdzv_backend
    if backend in ("etcd", "etcd-v2"):
        raise ConfigurationError(
            f"--rdzv-backend {backend} is not supported: the nodes meet at a coordinator, which "
            "runs on one of them; use --rdzv-backend c10d with --rdzv-endpoint HOST:PORT of that "
            "node, or `elastic agent --etcd` (docs/MANY_NODES.md)"
        )
    if backend not in ("static", "c10d"):
        raise ConfigurationError(f"--rdzv-backend {backend} is not known: use c10d or static")
    is_static = backend == "static"
    conf = _conf(values.rdzv_conf)
    join_timeout_s = _seconds(conf, "timeout" if is_static else "join_timeout", 600)
    last_call_s = 0 if is_static else _seconds(conf, "last_call_timeout", 30)
    is_host = None if is_static else _yes_or_no(conf, "is_host")
    notes += [f"--rdzv-conf {name} has no effect with {backend}" for name in conf]
    if is_static:
        if not 0 <= values.node_rank < most:
            raise ConfigurationError(
                f"--node-rank {values.node_rank}: --nnodes {values.nnodes} has the ranks 0 to "
                f"{most - 1}; give each node one of them"
            )
        if least < most:
            notes.append(f"--nnodes {values.nnodes} means {most} with static, in torchrun as well")
        least, is_host = most, values.node_rank == 0
        host, master_port = _static_endpoint(values)
        upwards = master_port + _TO_COORDINATOR <= _LAST_PORT
        port = master_port + (_TO_COORDINATOR if upwards else -_TO_COORDINATOR)
        option = "--rdzv-endpoint" if values.rdzv_endpoint.strip() else "--master-port"
        given_by = f"port {master_port} of {option} {'+' if upwards else '-'} {_TO_COORDINATOR}"
    else:
        notes += _no_effect(values, ("master_addr", "master_port", "node_rank"), "c10d")
        host, port = _endpoint(values.rdzv_endpoint, _DEFAULT_PORT)
        given_by = "--rdzv-endpoint"
    nnodes = values.nnodes if least < most else str(most)
    same = {
        "--nnodes": nnodes,
        "--max-restarts": values.max_restarts,
        "--rdzv-backend": backend,
        "--rdzv-id": values.rdzv_id,
    }
    return Rendezvous(
        least=least,
        most=most,
        host=host,
        port=port,
        given_by=given_by,
        node_rank=values.node_rank if is_static else None,
        is_host=is_host,
        local_addr=values.local_addr or "",
        join_timeout_s=join_timeout_s,
        last_call_s=last_call_s,
        same=" ".join(f"{flag} {value}" for flag, value in same.items()),
    )


def _static_endpoint(values: argparse.Namespace) -> tuple[str, int]:
    """Return MASTER_ADDR and MASTER_PORT of several nodes."""
    endpoint = values.rdzv_endpoint.strip()
    if endpoint:
        return _endpoint(endpoint, None)
    port = _DEFAULT_STATIC_PORT if values.master_port is None else values.master_port
    if not 0 < port <= _LAST_PORT:
        raise ConfigurationError(f"--master-port {port}: expected a port, from 1 to {_LAST_PORT}")
    return values.master_addr, port


def _endpoint(text: str, default_port: int | None) -> tuple[str, int]:
    """Return host and port of --rdzv-endpoint of several nodes, which cannot guess a random one."""
    host, colon, port = text.strip().rpartition(":")
    if default_port is not None and not colon:
        host, port = port, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise ConfigurationError(
            f"--rdzv-endpoint {text!r}: expected HOST:PORT, the same on all nodes, with a node's "
            f"name or address and a port from 1 to {_LAST_PORT}"
        )
    return host.strip("[]"), int(port)


def _conf(text: str) -> dict[str, str]:
    """Return the pairs of --rdzv-conf."""
    found: dict[str, str] = {}
    for pair in text.strip().split(",") if text.strip() else ():
        name, _, value = (part.strip() for part in pair.partition("="))
        if not name or not value:
            raise ConfigurationError(f"--rdzv-conf {text}: expected NAME=VALUE,NAME=VALUE")
        found[name] = value
    return found


def _seconds(conf: dict[str, str], name: str, default: int) -> int:
    """Take a number of seconds out of `conf`."""
    text = conf.pop(name, str(default))
    if not text.isdecimal() or not 0 < int(text) <= MAX_SECONDS:
        raise ConfigurationError(f"--rdzv-conf {name}={text}: expected a number of seconds")
    return int(text)


def _yes_or_no(conf: dict[str, str], name: str) -> bool | None:
    """Take a boolean out of `conf`, as torch reads it; None if it is not there."""
    text = conf.pop(name, None)
    if text is None:
        return None
    known = {"1": True, "true": True, "t": True, "yes": True, "y": True}
    known |= {"0": False, "false": False, "f": False, "no": False, "n": False}
    if text.lower() not in known:
        raise ConfigurationError(f"--rdzv-conf {name}={text}: expected true or false")
    return known[text.lower()]


def _meeting_point(values: argparse.Namespace, notes: list[str]) -> tuple[str, int | None, bool]:
    """Return MASTER_ADDR ("": elastic's choice), MASTER_PORT (None: any), and whether --rdzv-id
    counts, by the rules of torch's `run`."""
    backend, endpoint = values.rdzv_backend, values.rdzv_endpoint.strip()
    if values.rdzv_conf:
        notes.append(f"--rdzv-conf {values.rdzv_conf} has no effect: one node waits for no others")
    if values.standalone:
        given = {"--rdzv-backend": backend != "static", "--rdzv-endpoint": bool(endpoint)}
        given |= {"--rdzv-id": values.rdzv_id != "none"}
        notes += [f"{n} has no effect: --standalone is given" for n, is_ in given.items() if is_]
        notes += _no_effect(values, ("master_addr", "master_port", "node_rank"), "--standalone")
        return values.local_addr or "", None, False
    if backend == "static" and not endpoint and values.master_port is None:
        notes += _no_effect(values, ("master_addr",), "one node without --master-port")
        if values.rdzv_id != "none":
            notes.append("--rdzv-id has no effect without --master-port, in torchrun neither")
        return values.local_addr or "", None, False
    if backend == "static":
        notes += _no_effect(values, ("local_addr",), "static rendezvous")
        if not endpoint:
            if not 0 <= values.master_port <= _LAST_PORT:
                raise ConfigurationError(f"--master-port {values.master_port}: expected a port")
            return values.master_addr, values.master_port or None, True
        notes += _no_effect(values, ("master_addr", "master_port"), "--rdzv-endpoint")
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or int(port) > _LAST_PORT:
            raise ConfigurationError(f"--rdzv-endpoint {endpoint}: expected HOST:PORT")
        return host, int(port) or None, True
    if backend not in ("c10d", "etcd", "etcd-v2"):
        raise ConfigurationError(
            f"--rdzv-backend {backend} is not known: one node needs none; leave it out"
        )
    notes += _no_effect(values, ("master_addr", "master_port", "node_rank"), f"{backend}")
    if endpoint or backend != "c10d":
        notes.append(
            f"--rdzv-backend {backend} and --rdzv-endpoint have no effect: one node meets no others"
        )
    return values.local_addr or "", None, True


def _no_effect(values: argparse.Namespace, names: Sequence[str], because: str) -> Iterator[str]:
    for row in TABLE:
        if row.name in names and getattr(values, row.name) != row.default:
            yield f"{row.long} {getattr(values, row.name)} has no effect with {because}"


def _streams(flag: str, text: str) -> Mapping[int, int] | int:
    if _MASK.fullmatch(text):
        return int(text)
    if not _MASKS.fullmatch(text):
        raise ConfigurationError(
            f"{flag} {text}: expected 0 to 3, or local ranks with such numbers: 0:1,1:2"
        )
    return {int(rank): int(mask) for rank, mask in (one.split(":") for one in text.split(","))}


def _ranks(text: str) -> frozenset[int]:
    try:
        return frozenset(map(int, text.split(","))) if text else frozenset()
    except ValueError:
        raise ConfigurationError(
            f"--local-ranks-filter {text}: expected local ranks: 0,1,2"
        ) from None


def _known_signals(text: str, notes: list[str]) -> str:
    """Return the text; note the names in it that cannot be handled."""
    names = [one.strip() for one in text.split(",")]
    notes += [
        f"--signals-to-handle {name} has no effect: no process can handle that"
        for name in names
        if name in ("SIGKILL", "SIGSTOP") or name not in signal.Signals.__members__
    ]
    return text


def _note_unused_filters(values: argparse.Namespace, notes: list[str]) -> None:
    filters = (values.duplicate_stdout_filters, values.duplicate_stderr_filters)
    for name, texts in zip(("stdout", "stderr"), filters, strict=True):
        if texts and values.tee == "0":
            notes.append(f"--duplicate-{name}-filters has no effect without --tee")


def _shutdown_timeout_s(given: int | None, environment: Mapping[str, str]) -> int:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    text = str(given) if given is not None else environment.get(name, "30")
    if not text.isdecimal():
        flag = "--shutdown-timeout" if given is not None else name
        raise ConfigurationError(f"{flag} {text}: expected a number of seconds, at least 0")
    return int(text)
