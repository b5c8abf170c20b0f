"""`elastic torchrun` does what the installed torchrun does with the same command line."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.running import SCRIPTS, Place
from tests.job_process import DIE_WITH_PARENT
from tests.waiting import eventually

SCRIPT = SCRIPTS / "under_torchrun.py"
OURS = "elastic.torchrun"
THEIRS = "torch.distributed.run"
_DEADLINE_S = 120.0
# What elastic adds, what imports of torch set, and what tests or shells set.
NOT_COMPARED = {"GLOO_SOCKET_IFNAME", "RES_OPTIONS", "_ELASTIC_RUN_DIRECTORY", "_ELASTIC_WORKER"}
NOT_COMPARED |= {"TORCHINDUCTOR_CACHE_DIR", "SHLVL", "_", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"}
RANDOM = {"MASTER_PORT", "TORCHELASTIC_RUN_ID"}
"""Unless the command line gives them."""
_RANDOM_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}_\w{8}|(?<=myrun)_\w{8}")
_LONG = pytest.mark.long


@dataclass
class Ended:
    """A command line that has ended, and what it has left."""

    code: int
    out: list[str]
    err: str
    seen: dict[str, dict[str, object]] = field(default_factory=dict)
    """What each process has written, by RANK-ATTEMPT."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """Lines of the files below --log-dir, by their names without random parts."""

    @property
    def script_err(self) -> list[str]:
        """The lines of standard error that a script has written, sorted."""
        return sorted(line for line in self.err.splitlines() if re.search(r"\berr \d$", line))


class Launcher:
    """A torchrun, ours or theirs, in a directory of its own. shared: that of the scripts of a job
    with several launchers."""

    def __init__(
        self, module: str, place: Place, directory: Path, shared: Path | None = None
    ) -> None:
        (directory / "tmp").mkdir(parents=True)
        self.module, self.directory, self._place = module, directory, place
        self._shared = shared or directory
        self.process: subprocess.Popen[str] | None = None

    def start(
        self,
        options: Sequence[str],
        action: str,
        arguments: Sequence[str] = (),
        program: Sequence[str] = (str(SCRIPT),),
        **environment: str,
    ) -> None:
        options = [option.replace("LOGS", str(self.directory / "logs")) for option in options]
        command = [sys.executable, "-m", self.module, *options, *program]
        state = {
            "XDG_STATE_HOME": str(self.directory / "state"),
            "PYTHONPATH": str(SCRIPTS),
            "TMPDIR": str(self.directory / "tmp"),  # torchrun leaves directories there
        }
        self.process = subprocess.Popen(
            [*DIE_WITH_PARENT, *command, action, str(self._shared), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._place.environment, **state, **environment},
        )

    def end(self, text: str = "") -> Ended:
        assert self.process is not None
        out, err = self.process.communicate(text, timeout=_DEADLINE_S)
        seen = {p.stem: json.loads(p.read_text()) for p in self._shared.glob("*-*.json")}
        return Ended(self.process.returncode, sorted(out.splitlines()), err, seen, self._files())

    def _files(self) -> dict[str, list[str]]:
        logs = self.directory / "logs"
        found = [path for path in logs.rglob("*") if path.is_file()]
        return {
            _RANDOM_NAME.sub("RANDOM", str(path.relative_to(logs))): sorted(
                path.read_text().splitlines()
            )
            for path in found
            if path.name != "error.json"
        }


@pytest.fixture
def both(place: Place, tmp_path: Path) -> Iterator[tuple[Launcher, Launcher]]:
    pair = tuple(Launcher(m, place, tmp_path / m) for m in (OURS, THEIRS))
    yield pair  # type: ignore[misc]
    for launcher in pair:
        if launcher.process is not None and launcher.process.poll() is None:
            launcher.process.kill()
            launcher.process.wait()


def run_both(
    both: tuple[Launcher, Launcher],
    options: Sequence[str],
    action: str = "ends",
    arguments: Sequence[str] = (),
    *,
    text: str = "",
    **environment: str,
) -> tuple[Ended, Ended]:
    for launcher in both:
        launcher.start(options, action, arguments, **environment)
    return both[0].end(text), both[1].end(text)


def assert_same(ours: Ended, theirs: Ended, different: Mapping[str, str] = {}) -> None:
    """different: variables that differ, each with our value."""
    assert ours.code == theirs.code, ours.err
    assert ours.out == theirs.out
    assert ours.script_err == theirs.script_err
    assert ours.files == theirs.files
    assert ours.seen.keys() == theirs.seen.keys()
    for name, mine in ours.seen.items():
        other = theirs.seen[name]
        assert_same_environment(mine.pop("environment"), other.pop("environment"), different)
        assert mine == other


def assert_same_environment(mine: object, other: object, different: Mapping[str, str]) -> None:
    assert isinstance(mine, dict)
    assert isinstance(other, dict)
    assert mine.keys() - NOT_COMPARED == other.keys() - NOT_COMPARED
    for name in other.keys() - NOT_COMPARED:
        if name in different:
            assert mine[name] == different[name]
        elif name == "TORCHELASTIC_ERROR_FILE":
            assert Path(mine[name]).parts[-3:] == Path(other[name]).parts[-3:]
        elif name not in RANDOM or (name == "MASTER_PORT" and "MASTER_PORT" in different):
            assert within(mine[name]) == within(other[name]), name


def within(value: str) -> str:
    return value.replace(OURS, "").replace(THEIRS, "")


ADDRESS = {"MASTER_ADDR": "127.0.0.1"}
"""torchrun gives the host's own name."""

ROWS = {
    "one worker": ([], {}),
    "standalone": (["--standalone", "--nproc_per_node=2"], {}),
    "role and tee": (["--nproc-per-node", "2", "--role", "trainer", "-t", "3"], {}),
    "tee one": (["--nproc-per-node", "2", "--log-dir", "LOGS", "-t", "0:1,1:2", "-r", "3"], {}),
    "redirects": (["--nproc-per-node", "2", "--log_dir", "LOGS", "-r", "0:1,1:3"], {}),
    "only rank 1": (["--nproc-per-node", "2", "--local-ranks-filter", "1"], {}),
    "only rank 0, tee": (
        ["--nproc-per-node=2", "--log-dir=LOGS", "--local_ranks_filter=0", "--tee=3"],
        {},
    ),
    "filters": (
        ["--nproc-per-node=2", "--log-dir=LOGS", "-t3", "--duplicate-stdout-filters", "out 1,x"],
        {},
    ),
    "prefix": (
        ["--nproc-per-node=2", "-t", "3"],
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank} ${local_rank}> "},
    ),
    "no files": (["--log-dir", "/dev/null"], {}),
    "virtual local rank": (
        ["--nproc-per-node=2", "--virtual-local-rank"],
        {"CUDA_VISIBLE_DEVICES": "3,5"},
    ),
    "variables": ([], {"PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "5", "PET_NNODES": "1"}),
    "run path": (["--run-path", "--nproc-per-node=2"], {}),
    "another interpreter": (["--nproc-per-node=2"], {"PYTHON_EXEC": sys.executable}),
    "run id": (["--rdzv-backend=c10d", "--rdzv-id=myrun", "--log-dir=LOGS", "-r3"], {}),
    "local address": (["--rdzv-backend=c10d", "--local-addr=127.0.0.1"], {}),
    "auto": (["--nproc-per-node", "auto"], {"CUDA_VISIBLE_DEVICES": ""}),
    "cpu": (["--nproc-per-node", "cpu"], {}),
}
FAST = {"tee one"}


@pytest.mark.parametrize(
    "row", [pytest.param(name, marks=() if name in FAST else _LONG) for name in ROWS]
)
def test_a_row_gives_what_torchrun_gives(both: tuple[Launcher, Launcher], row: str) -> None:
    options, environment = ROWS[row]
    arguments = ["rank ${local_rank}", "$$x", "--nproc-per-node", "7"]
    ours, theirs = run_both(both, options, arguments=arguments, **environment)
    assert theirs.code == 0, theirs.err
    assert_same(ours, theirs, ADDRESS)


@_LONG
def test_static_rendezvous_has_the_given_address_and_port(both: tuple[Launcher, Launcher]) -> None:
    for launcher, port in zip(both, (29631, 29632), strict=True):
        launcher.start(["--nproc-per-node=2", f"--master-port={port}"], "reduces")
    ours, theirs = (launcher.end() for launcher in both)
    assert ours.out.count("sum 1") == 2
    assert [e.seen["0-0"]["environment"]["TORCHELASTIC_RUN_ID"] for e in (ours, theirs)] == [  # type: ignore[index]
        "none",
        "none",
    ]
    assert_same(ours, theirs, {"MASTER_PORT": "29631", **ADDRESS})


@_LONG
def test_a_port_in_use_is_named(both: tuple[Launcher, Launcher]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        both[0].start(["--nproc-per-node=2", f"--master-port={taken.getsockname()[1]}"], "ends")
        ours = both[0].end()
    assert ours.code == 1
    assert re.search(r"^elastic: worker .* --master-port", ours.err, re.MULTILINE), ours.err
    assert "Root Cause" not in ours.err


@_LONG
def test_wrong_usage_and_a_missing_script_are_refused(both: tuple[Launcher, Launcher]) -> None:
    """torchrun ends with 1 for both."""
    refused = {}
    for name, options, program in (
        ("value", ["--nnodes=0"], [str(SCRIPT)]),
        ("script", [], ["none.py"]),
        ("program", ["--no-python"], ["no-such-program"]),
        ("usage", ["--unknown"], [str(SCRIPT)]),
    ):
        both[0].start(options, "ends", (), program)
        refused[name] = both[0].end().code
    assert refused == {"value": 2, "script": 78, "program": 78, "usage": 2}


@_LONG
def test_a_module_and_a_program_run(both: tuple[Launcher, Launcher]) -> None:
    for options, program in (
        (["-m"], ["under_torchrun"]),
        (["--no-python"], [sys.executable, str(SCRIPT)]),
    ):
        for launcher in both:
            launcher.start(["--nproc-per-node=2", *options], "ends", ["${local_rank}"], program)
        assert_same(both[0].end(), both[1].end(), ADDRESS)


@_LONG
def test_standard_input_is_the_commands(both: tuple[Launcher, Launcher]) -> None:
    ours, theirs = run_both(both, [], "reads", text="a line\n")
    assert "read a line" in theirs.out
    assert_same(ours, theirs, ADDRESS)


@pytest.mark.parametrize(
    "action", ["fails", pytest.param("raises", marks=_LONG), pytest.param("killed", marks=_LONG)]
)
def test_a_failure_ends_the_job_with_torchruns_table(
    both: tuple[Launcher, Launcher], action: str
) -> None:
    ours, theirs = run_both(both, ["--nproc-per-node=2"], action)
    assert_same(ours, theirs, ADDRESS)
    assert ours.code == 1
    mine, other = table_of(ours.err), table_of(theirs.err)
    for told in (mine, other):
        for unlike in ("time", "host", "error_file", "traceback"):
            del told[unlike]
    assert mine == other
    if action == "raises":
        assert "ValueError: no such corpus" in ours.err.rpartition("Root Cause")[2]


def table_of(err: str) -> dict[str, str]:
    """The fields of the root cause."""
    title = re.search(r"^(.*) FAILED$", err, re.MULTILINE)
    root = err.rpartition("Root Cause (first observed failure):")[2]
    fields = dict(
        re.findall(
            r"^  (time|host|rank|exitcode|error_file|traceback) *: (.*)$", root, re.MULTILINE
        )
    )
    assert title is not None, err
    fields["exitcode"] = re.sub(r"pid: \d+", "pid", fields["exitcode"]).strip()
    return {"title": title[1], **fields}


@_LONG
def test_a_script_that_does_not_end_is_killed_after_the_shutdown_timeout(
    both: tuple[Launcher, Launcher],
) -> None:
    options = ["--nproc-per-node=2", "--shutdown-timeout=1"]
    ours, theirs = run_both(both, options, "ignores", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    assert_same(ours, theirs, ADDRESS)
    assert table_of(ours.err)["exitcode"].startswith("5 ")
    assert "-9 (pid" in theirs.err
    assert "-9 (pid" not in ours.err  # its supervisor is killed with it, and cannot tell


def test_a_restart_is_a_new_attempt_of_all(both: tuple[Launcher, Launcher]) -> None:
    options = ["--nproc-per-node=2", "--max-restarts=2", "--log-dir=LOGS", "-r3"]
    ours, theirs = run_both(both, options, "recovers")
    assert ours.seen.keys() == {"0-0", "1-0", "0-1", "1-1"}
    assert_same(ours, theirs, ADDRESS)


@_LONG
def test_restarts_are_limited_for_the_whole_job(both: tuple[Launcher, Launcher]) -> None:
    ours, theirs = run_both(both, ["--nproc-per-node=2", "--max-restarts=2"], "fails")
    assert {name.partition("-")[2] for name in ours.seen} == {"0", "1", "2"}
    assert_same(ours, theirs, ADDRESS)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(signal.SIGTERM, [], marks=_LONG),
        pytest.param(signal.SIGINT, []),
        pytest.param(signal.SIGHUP, [], marks=_LONG),
        pytest.param(signal.SIGQUIT, [], marks=_LONG),
        pytest.param(signal.SIGUSR1, ["--signals-to-handle=SIGUSR1"], marks=_LONG),
    ],
)
def test_a_signal_reaches_the_workers_as_it_is(
    both: tuple[Launcher, Launcher], number: signal.Signals, options: list[str]
) -> None:
    for launcher in both:
        launcher.start(["--nproc-per-node=2", *options], "waits")
    for launcher in both:
        ready = launcher.directory.glob
        eventually(lambda r=ready: len(list(r("*-ready"))) == 2, deadline_s=_DEADLINE_S)  # type: ignore[misc]
        assert launcher.process is not None
        pid = launcher.process.pid  # torchrun's handlers come after its workers
        eventually(lambda p=pid: catches(p, number), deadline_s=_DEADLINE_S)  # type: ignore[misc]
        launcher.process.send_signal(number)
    ours, theirs = (launcher.end() for launcher in both)
    assert ours.code == theirs.code == 1
    for launcher in both:
        told = [path.read_text() for path in launcher.directory.glob("*-signal")]
        assert told == [number.name] * 2, (launcher.module, ours.err)


def test_a_wrapped_command_runs_its_job_as_elastic_torchrun(place: Place, tmp_path: Path) -> None:
    """The command fills in the values of torch's parser as `accelerate launch` does."""
    command = tmp_path / "launches"
    command.write_text(
        f"""#!{sys.executable}
import sys
from torch.distributed import run
arguments = run.get_args_parser().parse_args(sys.argv[1:])
arguments.nproc_per_node, arguments.nnodes, arguments.master_port = 2, "1", None
run.run(arguments)
print("the command goes on")
"""
    )
    command.chmod(0o755)
    (tmp_path / "job").mkdir()
    given = ["--max_restarts", "1", str(SCRIPT), "recovers", str(tmp_path / "job")]
    wrapped = [sys.executable, "-m", "elastic.cli", "wrap", str(command), *given]
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [*DIE_WITH_PARENT, *wrapped],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
        env={**os.environ, **place.environment, **state},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "the command goes on"
    assert {p.stem for p in (tmp_path / "job").glob("*.json")} == {"0-0", "1-0", "0-1", "1-1"}
    assert "elastic: failed (exitcode: 4)" in ended.stderr
