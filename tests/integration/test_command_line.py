"""Commands on a running job, strangers at its sockets, and scripts that run without an agent."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.rpc.framing import MAX_FRAME_BYTES, encode
from elastic.v1 import job_pb2, local_pb2
from tests.integration.running import SCRIPTS, Place, steps_of, wait_for_step
from tests.job_process import JobProcess
from tests.waiting import eventually

LATE_THREAD = """
import threading, time, elastic
elastic.init()
def late():
    threading.main_thread().join()
    time.sleep(0.3)  # of work
    print("ended", flush=True)
threading.Thread(target=late, name="elastic-late", daemon=True).start()
"""


@pytest.fixture(scope="module")
def running_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.closing(Place(tmp_path_factory.mktemp("running"))) as place:
        yield place


@pytest.fixture(scope="module")
def running(running_place: Place) -> JobProcess:
    """A job that has committed a checkpoint and trains on."""
    options = ["--checkpoint-dir", running_place.files / "c", "--checkpoint-every", "2"]
    options += ["--job", "watched", "--console", "all"]
    job = running_place.start("steady.py", "--epochs", 100_000, "--pace-s", 0.1, options=options)
    job.wait_for_event("checkpoint_committed")
    return job


def test_status_as_json_shows_group_and_pids(running: JobProcess, running_place: Place) -> None:
    def status_of_job() -> Any:
        result = running_place.elastic("status", "--job", "watched", "--output", "json")
        assert result.returncode == 0, result.stderr
        status = json.loads(result.stdout)
        return status if status["progress"]["committed"] >= 2 else None

    # Workers report steps every 0.2 s; a checkpoint's commit comes at once.
    status = eventually(status_of_job, "two committed steps")
    assert (status["job"], status["phase"], status["restarts"]) == ("watched", "running", 0)
    assert [m["worker"] for m in status["generation"]["members"]] == running.members()
    assert status["checkpoint_step"] >= 2
    pids = {w["worker"]: w["pid"] for node in status["nodes"] for w in node["workers"]}
    assert {worker: running.pid_of(worker) for worker in pids} == pids


def test_status_as_a_table_shows_the_pids(running: JobProcess, running_place: Place) -> None:
    result = running_place.elastic("status", "--job", "watched")
    assert result.returncode == 0, result.stderr
    for worker in running.members():
        assert str(running.pid_of(worker)) in result.stdout


def test_elastic_events_leaves_out_progress(running: JobProcess, running_place: Place) -> None:
    result = running_place.elastic("events", "--job", "watched", "--output", "json")
    assert result.returncode == 0, result.stderr
    told = [json.loads(line)["event"] for line in result.stdout.splitlines()]
    assert {"job_started", "generation_formed"} <= set(told)
    assert "progress" not in told
    assert set(told) <= {event["event"] for event in running.events}


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [(["--job", "other"], 75, "'other'"), (["--address", "127.0.0.1:9"], 75, "127.0.0.1:9")],
)
def test_status_of_an_unknown_job_fails_with_its_name(
    running_place: Place, arguments: list[str], code: int, name: str
) -> None:
    result = running_place.elastic("status", *arguments)
    assert result.returncode == code
    assert name in result.stderr


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        os.urandom(4096),
        b"GET / HTTP/1.1\r\nHost: elastic\r\n\r\n",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        (MAX_FRAME_BYTES).to_bytes(4, "big") + bytes(100),
        encode(local_pb2.WorkerMessage(hello=local_pb2.Hello(worker="nobody"))),
        encode(local_pb2.WorkerMessage(progress=job_pb2.Progress(committed=7))),
    ],
    ids=["nothing", "garbage", "http", "oversized", "cut short", "unknown worker", "no hello"],
)
def test_strangers_at_the_workers_socket_disturb_nobody(
    running: JobProcess, running_place: Place, noise: bytes
) -> None:
    (directory,) = running_place.run_directories()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(directory / "agent.sock"))
        stranger.sendall(noise)
        wait_for_step(running, max(steps_of(running), default=0) + 2)
    assert not running.named("worker_failed")
    assert len(running.named("generation_formed")) == 1


def test_each_line_of_worker_output_begins_with_its_rank(running: JobProcess) -> None:
    wait_for_step(running, 3)
    assert all(line.startswith(("[rank 0] ", "[rank 1] ")) for line in running.output)


def test_help_names_commands_and_their_options(place: Place) -> None:
    assert {"run", "status", "checkpoint"} <= set(place.elastic("--help").stdout.split())
    text = place.elastic("run", "--help").stdout
    assert "--nproc-per-node" in text
    assert "[job]" in text


def test_a_script_under_plain_python_trains_as_the_only_worker(place: Place) -> None:
    result = place.python(SCRIPTS / "steady.py", "--epochs", "1")
    assert result.returncode == 0, result.stderr
    *steps, weights = result.stdout.splitlines()
    assert steps == [f"step {n}" for n in range(1, 13)]

    job = place.start("steady.py", "--epochs", 1, nproc=1)
    assert job.wait() == 0, job.story()
    assert job.output[-1] == f"[rank 0] {weights}"


@pytest.mark.long
def test_plain_python_waits_for_elastic_threads_before_it_ends(place: Place) -> None:
    """A daemon thread that frees a tensor during Python's shutdown aborts the process."""
    script = place.files / "alone.py"
    script.write_text(LATE_THREAD)
    result = place.python(script)
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr


def test_output_to_a_terminal_is_text_with_a_live_line(place: Place, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    arguments = ["run", "--log-dir", tmp_path / "logs", SCRIPTS / "steady.py", "--epochs", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "elastic.cli", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **place.environment, "TERM": "xterm", "COLUMNS": "120"},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        shown = read_to_the_end(ours)
    assert process.returncode == 0, shown
    assert "[rank 0] step 12" in shown
    assert '"event"' not in shown
    assert "\x1b[" in shown, "no line was kept up to date"


def read_to_the_end(terminal: int) -> str:
    shown = b""
    with contextlib.suppress(OSError):  # EIO: nobody has it open any more
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    return shown.decode()


@pytest.mark.long
def test_script_arguments_of_the_environment_override_those_of_the_file(
    place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "elastic.toml"
    file.write_text(f'[job]\nscript = "{SCRIPTS / "steady.py"}"\nargs = ["--epochs", "7"]\n')
    arguments = ["run", "--log-dir", tmp_path / "logs", "--output", "json", "--config", file]
    result = place.elastic(*arguments, ELASTIC_ARGS="--epochs 2 --name 'a b'")
    assert result.returncode == 0, result.stderr
    (finished,) = [line for line in result.stderr.splitlines() if '"job_finished"' in line]
    assert json.loads(finished)["committed"] == 2 * 12  # 48 samples on one worker, 4 a step


@pytest.mark.long
def test_modules_in_the_current_directory_are_not_imported(place: Place) -> None:
    """`python train.py` does not import them either."""
    for name in ("logging", "queue", "torch"):
        (place.files / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    begin = "import sys; del sys.path[0]; from elastic.cli.main import main; main()"
    options = ["--log-dir", place.files / "logs", "--spares", "0"]
    result = place.python("-c", begin, "run", *options, SCRIPTS / "steady.py")
    assert result.returncode == 0, result.stderr
