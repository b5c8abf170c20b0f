"""`elastic torchrun`: `elastic run` with torchrun's command line, output, logs and exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from elastic.cli.console import describe
from elastic.cli.launch import log_root
from elastic.cli.run import Command, Launched, run
from elastic.cli.torchrun_nodes import run_with_others
from elastic.core.legible import printable
from elastic.errors import ConfigurationError, ExitCode, refusal_of
from elastic.runtime.journal import Entry
from elastic.settings.limits import MAX_SECONDS
from elastic.settings.run import RunSettings
from elastic.settings.shared import Launch
from elastic.settings.sources import DeviceCounts, load_settings
from elastic.settings.torchrun import TorchrunOptions, parse
from elastic.v1 import local_pb2 as pb

_LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2, "CRITICAL": 2}
_SEVERITIES = {"info": 0, "warning": 1, "error": 2}
_UNSHOWN = {"incident", "worker_failed", "job_ended", "loop_paused", "process_stopped"}
_UNSHOWN |= {"coordinator_lost", "agent_ended"}
"""The table or the last line says it, or only INFO asks for it."""
_WIDEST = 60


def torchrun(argv: Sequence[str], device_counts: Callable[[], DeviceCounts]) -> int:
    """Run a job to its end; return the exit code, 1 for a failure or a signal as torchrun.

    Raises SystemExit for wrong usage, ConfigurationError, and TransientError if a new start may
    succeed.
    """
    return launch(parse(argv, os.environ), device_counts)


def launch(options: TorchrunOptions, device_counts: Callable[[], DeviceCounts]) -> int:
    """Run a job to its end; return the exit code. Raises as `torchrun`, except SystemExit."""
    for note in options.notes:
        print(printable(f"elastic: {note}"), file=sys.stderr)
    settings = _settings(options, device_counts)
    if options.no_python and shutil.which(options.script) is None:
        raise ConfigurationError(
            f"there is no program {options.script!r} to execute; give its path, or leave out "
            "--no-python for a Python script"
        )
    display = Display(options.script, os.environ.get("LOGLEVEL", ""))
    launched = Launched(
        display=display,
        host=options.master_addr if options.master_port is None else "",
        signals=_signals(options.signals),
        scripts=lambda logs: _scripts(options, settings.nproc_per_node, logs),
        executes=options.no_python or bool(options.interpreter),
    )
    argv = [options.script, *options.args]
    command = Command(settings=settings, argv=argv, launched=launched)
    if options.rendezvous is None:
        return run(command)
    return run_with_others(command, options.rendezvous)


def _settings(options: TorchrunOptions, device_counts: Callable[[], DeviceCounts]) -> RunSettings:
    """The settings of `elastic run`, of which ELASTIC_* variables may give those that torchrun has
    no option for."""
    meets = options.rendezvous
    given: dict[str, object] = {
        "script": options.script,
        "args": list(options.args),
        "module": options.module,
        "nproc_per_node": options.nproc_per_node,
        "nnodes": "1" if meets is None else f"{meets.least}:{meets.most}",
        "min_workers": "1",
        "spares": "0",  # after a failure, all workers are new
        "max_restarts": str(options.max_restarts),
        "restart_window_s": str(MAX_SECONDS),
        "launch": Launch.TORCHRUN.value,
        "stop_grace_s": str(options.shutdown_timeout_s),
    }
    settings = load_settings(RunSettings, given, os.environ, None, device_counts)
    return dataclasses.replace(
        settings,
        min_workers=settings.nproc_per_node * (1 if meets is None else meets.least),
        gather_timeout_s=settings.gather_timeout_s if meets is None else meets.last_call_s,
        log_dir=settings.log_dir if settings.log_dir is not None else _logs(),
    )


def _logs() -> Path | None:
    """Where elastic's own logs go: None, the usual place, or a temporary one if this user cannot
    write there, as in a container without a home. torchrun runs there, too."""
    try:
        root = log_root()
        root.mkdir(parents=True, exist_ok=True)
        if os.access(root, os.W_OK | os.X_OK):
            return None
    except (ConfigurationError, OSError):
        pass
    return Path(tempfile.mkdtemp(prefix="elastic_"))


def _signals(names: str) -> tuple[signal.Signals, ...]:
    known = (name.strip() for name in names.split(","))
    numbers = (signal.Signals.__members__.get(name) for name in known)
    uncaught = (None, signal.SIGKILL, signal.SIGSTOP)
    return tuple(number for number in numbers if number not in uncaught)


def _scripts(options: TorchrunOptions, workers: int, logs: Path) -> pb.Torchrun:
    """How the scripts run. logs: where their files are without --log-dir. Raises
    ConfigurationError or TransientError if the directory cannot be made."""
    streams = []
    for rank in range(workers):
        hidden = bool(options.shown) and rank not in options.shown
        tee = options.streams_of(rank, options.tee)
        to_files = options.streams_of(rank, options.redirects) | tee
        to_console = 0 if hidden else tee
        streams.append(pb.Torchrun.Streams(to_files=to_files, to_console=to_console, hidden=hidden))
    program = [options.interpreter, "-u", *(["-m"] if options.module else [])]
    return pb.Torchrun(
        run_id=options.run_id,
        role=options.role,
        signals=options.signals,
        log_dir=_run_directory(options, logs),
        streams=streams,
        prefix=options.prefix,
        stdout_filters=options.stdout_filters,
        stderr_filters=options.stderr_filters,
        master_addr=options.master_addr,
        master_port=options.master_port or 0,
        virtual_local_rank=options.virtual_local_rank,
        executes=options.no_python or bool(options.interpreter),
        program=[] if options.no_python or not options.interpreter else program,
    )


def _run_directory(options: TorchrunOptions, logs: Path) -> str:
    """Make the directory of this run's files, as torchrun names it; empty: none is wanted."""
    if options.log_dir == os.devnull:
        return ""
    base = Path(options.log_dir).absolute() if options.log_dir else logs
    try:
        base.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix=f"{options.run_id}_", dir=base)
    except OSError as error:
        raise refusal_of(
            f"cannot make a directory for logs in {base}: {error.strerror}; choose another with "
            "--log-dir",
            error,
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failed:
    """A script that failed."""

    rank: int
    local_rank: int
    exit_code: int
    pid: int
    host: str
    asked: bool
    """It was told to end, since another one had failed before."""
    unix_s: float
    error_file: str

    @classmethod
    def of(cls, entry: Entry) -> _Failed:
        told = entry.fields["details"]
        numbers = {name: int(told[name]) for name in ("rank", "local_rank", "exit_code", "pid")}
        asked = told["asked"] == "true"
        host, error_file = told["host"], told["error_file"]
        return cls(unix_s=entry.unix_s, host=host, error_file=error_file, asked=asked, **numbers)

    def recorded(self) -> Mapping[str, Any]:
        """What the script has left in its error file."""
        try:
            content = json.loads(Path(self.error_file).read_text(errors="replace"))
        except (OSError, ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def lines(self, number: int) -> list[str]:
        told = f" ({signal_name(self.exit_code)})" if self.exit_code < 0 else ""
        at = datetime.fromtimestamp(int(self.unix_s)).isoformat(sep="_")
        return [
            f"[{number}]:",
            f"  time      : {at}",
            f"  host      : {socket.getfqdn() if self.host == socket.gethostname() else self.host}",
            f"  rank      : {self.rank} (local_rank: {self.local_rank})",
            f"  exitcode  : {self.exit_code} (pid: {self.pid}) {told}",
            f"  error_file: {self.error_file or '<N/A>'}",
            *f"  traceback : {self._message()}".split("\n"),
        ]

    def _message(self) -> str:
        message = self.recorded().get("message")
        if isinstance(message, dict):
            extra = message.get("extraInfo")
            stack = extra.get("py_callstack") if isinstance(extra, dict) else None
            return str(stack or message.get("message", "<N/A>")).replace("\n", "\n  ")
        if isinstance(message, str):
            return message
        if self.exit_code < 0:
            name = signal_name(self.exit_code)
            return f"Signal {-self.exit_code} ({name}) received by PID {self.pid}"
        return "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


class Display:
    """Prints warnings as text, and at the end, if the scripts failed, torchrun's table of them.

    level: the LOGLEVEL of torchrun: with INFO, all events.
    """

    def __init__(self, name: str, level: str, err: TextIO | None = None) -> None:
        self._name = name
        self._least = _LEVELS.get(level.upper(), 1)
        self._err = err if err is not None else sys.stderr
        self._failed: list[_Failed] = []  # the first cause comes first
        self._known: set[str] = set()
        self._ending = ""
        self._is_told = False
        self._asked_to_end = False

    def entry(self, entry: Entry) -> None:
        text = describe(entry)
        if entry.name == "stop_requested":
            self._asked_to_end = True
        elif entry.name == "generation_formed" and entry.fields["world_size"]:
            self._failed = []  # all scripts have started again
        if text is None:
            return
        if entry.name == "script_ended":
            self._keep(entry, text)
            return
        if entry.name == "worker_failed" and entry.fields["worker"] not in self._known:
            self._tell(text)  # it could not start its script
            self._is_told = True
        if entry.name in ("job_ended", "agent_ended"):
            self._ending = text
        shown = _SEVERITIES[entry.severity] >= self._least and entry.name not in _UNSHOWN
        if shown or self._least == 0:
            self._tell(text)

    def output(self, _rank: int | None, _worker: str, line: str) -> None:
        """Show what a worker printed before its script had its own streams, or beside it."""
        print(printable(line, colours=True), file=self._err, flush=True)

    def told_to_end(self, name: str) -> None:
        """A signal came, which the scripts get, too."""
        self._asked_to_end = True
        self._tell(f"got {name}; the workers get it, too, and the job ends")

    def end(self, exit_code: int) -> None:
        """Print the table, and keep the first error where this process's own launcher reads it."""
        if exit_code == ExitCode.OK or self._asked_to_end:
            return
        if not self._failed or self._failed[0].asked:
            self._tell("" if self._is_told else self._ending)
            return
        self._err.write("\n".join(table(self._name, [f.lines for f in self._failed])) + "\n")
        self._err.flush()
        _hand_up(self._failed[0])

    def close(self) -> None:
        """There is nothing to close here; LiveDisplay needs it."""

    def _keep(self, entry: Entry, text: str) -> None:
        """Keep the failure, and tell the first one."""
        told, failed = entry.fields["details"], _Failed.of(entry)
        self._known.add(told["worker"])
        if not (failed.asked or self._asked_to_end or any(not f.asked for f in self._failed)):
            self._tell(f"{text} of {self._name}")
        self._failed.append(failed)
        self._failed.sort(key=lambda f: f.asked)  # stable: what was told to end is no cause

    def _tell(self, text: str) -> None:
        if text:
            print(printable(f"elastic: {text}"), file=self._err, flush=True)


def table(name: str, failures: Sequence[Callable[[int], list[str]]]) -> list[str]:
    """Return the lines of torchrun's table; the first failure is the root cause."""
    root, *others = [one(number) for number, one in enumerate(failures)]
    title = f"{name} FAILED"
    width = min(_WIDEST, max(map(len, [title, *root, *(line for o in others for line in o)])))
    told = [line for one in others for line in one] or ["  <NO_OTHER_FAILURES>"]
    thick, thin = "=" * width, "-" * width
    cause = "Root Cause (first observed failure):"
    return ["", thick, title, thin, "Failures:", *told, thin, cause, *root, thick]


def signal_name(exit_code: int) -> str:
    """Return the name of the signal that the negative exit code stands for."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return "<N/A>"


def _hand_up(failed: _Failed) -> None:
    """Copy the error to the file that a launcher has named for this process, as torchrun does."""
    path, recorded = os.environ.get("TORCHELASTIC_ERROR_FILE"), dict(failed.recorded())
    if not path or not recorded:
        return
    if isinstance(recorded.get("message"), dict):
        recorded["message"] = {**recorded["message"], "errorCode": failed.exit_code}
    try:
        Path(path).write_text(json.dumps(recorded))
    except OSError as error:
        told = f"cannot write the error file {path}: {error.strerror}"
        print(printable(f"elastic: {told}"), file=sys.stderr)
