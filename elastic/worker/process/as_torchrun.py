"""Gives a script of `elastic torchrun` what it has under torchrun: streams, log files, variables.

The script's process has the standard streams of the `elastic torchrun` command, or the files of
--redirects and --tee. Its supervisor copies what --tee asks for from these files to the console.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template

from elastic.v1 import local_pb2 as pb

STDOUT, STDERR = 1, 2
"""Numbers of the streams in --redirects and --tee, and of their descriptors."""
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_LOOK_S = 0.1
_PIECE_BYTES = 1 << 16
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NOT_EXECUTED = 127  # the shell's code for a command that is not there


def forwarded(run: pb.Torchrun) -> set[signal.Signals]:
    """Return the signals that the script's process group may get from the agent."""
    known = signal.Signals.__members__
    names = {name.strip() for name in run.signals.split(",")} - {"SIGKILL", "SIGSTOP"}
    return {known[name] for name in names if name in known}


def variables(
    run: pb.Torchrun, environment: Mapping[str, str], before: Mapping[str, str]
) -> dict[str, str]:
    """Return `environment`, that of a script of `elastic run`, as torchrun would set it.

    before: the environment of the worker. Raises ValueError for a local rank without a GPU in
    CUDA_VISIBLE_DEVICES, if each worker should see its own.
    """
    attempt = environment["TORCHELASTIC_RESTART_COUNT"]
    local_rank = int(environment["LOCAL_RANK"])
    directory = directory_of(run, attempt, local_rank)
    changed = {
        "ROLE_NAME": run.role,
        "TORCHELASTIC_RUN_ID": run.run_id,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": run.signals,
        "TORCHELASTIC_ERROR_FILE": "" if directory is None else str(directory / "error.json"),
    }
    if run.master_port:
        changed |= {"MASTER_ADDR": run.master_addr, "MASTER_PORT": str(run.master_port)}
    if run.virtual_local_rank:
        changed |= {"LOCAL_RANK": "0", _VISIBLE: _own_gpu(before.get(_VISIBLE), local_rank)}
    return {**environment, **changed}


def directory_of(run: pb.Torchrun, attempt: str, local_rank: int) -> Path | None:
    """Where the files of a script are; None if there are none."""
    return Path(run.log_dir) / f"attempt_{attempt}" / str(local_rank) if run.log_dir else None


def make_files(run: pb.Torchrun, local_rank: int, directory: Path) -> None:
    """Make the directory of a script, and the files to which it will write. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in (STDOUT, STDERR):
        if run.streams[local_rank].to_files & number:
            (directory / f"{_NAMES[number]}.log").touch()


def take_streams(
    run: pb.Torchrun, local_rank: int, directory: Path | None, own: Sequence[int]
) -> None:
    """Give this process its standard streams. own: the descriptors of the command's. Raises
    OSError."""
    wish = run.streams[local_rank]
    os.dup2(own[0], 0)
    for number in (STDOUT, STDERR):
        if wish.to_files & number and directory is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            source = os.open(directory / f"{_NAMES[number]}.log", flags, 0o666)
        else:
            source = os.open(os.devnull, os.O_WRONLY) if wish.hidden else os.dup(own[number])
        os.dup2(source, number)
        os.close(source)
    for descriptor in own:
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=False, write_through=True)  # type: ignore[union-attr]


def with_local_rank(arguments: Sequence[str], local_rank: int) -> list[str]:
    """Replace ${local_rank}, as torchrun does."""
    return [Template(one).safe_substitute(local_rank=local_rank) for one in arguments]


def execute(command: Sequence[str]) -> int:
    """Become another program; return an exit code if that is impossible."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, other programs do not
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"elastic: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
    return _NOT_EXECUTED


class Tee:
    """Copies what a script writes to its files to the console, line by line, with a prefix."""

    def __init__(
        self, run: pb.Torchrun, environment: Mapping[str, str], local_rank: int, own: Sequence[int]
    ) -> None:
        attempt = environment["TORCHELASTIC_RESTART_COUNT"]
        directory = directory_of(run, attempt, local_rank)
        prefix = run.prefix or "[${role_name}${local_rank}]:"
        names = {"role_name": run.role, "rank": environment["RANK"], "local_rank": local_rank}
        header = Template(prefix).safe_substitute(names).encode()
        self._ended = threading.Event()
        self._copies: list[threading.Thread] = []
        wanted = {STDOUT: run.stdout_filters, STDERR: run.stderr_filters}
        for number in (STDOUT, STDERR):
            if directory is not None and run.streams[local_rank].to_console & number:
                texts = [text.encode() for text in wanted[number]]
                filtered = directory.parent / f"filtered_{_NAMES[number]}.log" if texts else None
                path = directory / f"{_NAMES[number]}.log"
                copy = _copying(path, own[number], header, texts, filtered, self._ended.wait)
                self._copies.append(threading.Thread(target=copy, daemon=True))

    def start(self) -> None:
        for copy in self._copies:
            copy.start()

    def finish(self) -> None:
        """Copy what is left. The script has ended."""
        self._ended.set()
        for copy in self._copies:
            copy.join()


def _copying(
    path: Path,
    console: int,
    header: bytes,
    texts: Sequence[bytes],
    filtered: Path | None,
    wait: Callable[[float], bool],
) -> Callable[[], None]:
    def copy() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
            file = ends.enter_context(path.open("rb", buffering=0))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            duplicate = -1
            if filtered is not None:
                duplicate = os.open(filtered, flags, 0o666)
                ends.callback(os.close, duplicate)
            begun, ended = b"", False
            while True:
                piece = file.read(_PIECE_BYTES)
                if not piece:
                    if ended:
                        break
                    ended = wait(_LOOK_S)
                    continue
                *lines, begun = (begun + piece).split(b"\n")
                _write(console, b"".join(header + line + b"\n" for line in lines))
                _write(duplicate, _chosen(lines, header, texts))
            _write(console, header + begun if begun else b"")
            _write(duplicate, _chosen([begun], header, texts))

    return copy


def _chosen(lines: Sequence[bytes], header: bytes, texts: Sequence[bytes]) -> bytes:
    chosen = (line for line in lines if any(text in line for text in texts))
    return b"".join(header + line + b"\n" for line in chosen)


def _write(descriptor: int, data: bytes) -> None:
    while data and descriptor >= 0:
        data = data[os.write(descriptor, data) :]


def _own_gpu(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    gpus = visible.split(",")
    if local_rank >= len(gpus):
        raise ValueError(f"local rank {local_rank} has no GPU in {_VISIBLE}={visible}")
    return gpus[local_rank].strip()
