"""What workers print reaches their logs as far as the disk takes it, and never waits for it."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.runtime import log_writer
from elastic.runtime.log_writer import KEPT_BYTES, LogWriter, _Log, open_output, output_name
from tests.waiting import eventually

until = functools.partial(eventually, deadline_s=60.0)
LINE = b"%07d a line of a worker's output\n"
LINE_BYTES = len(LINE % 0)


class Output:
    """A worker's output, and its log, which only writes when the test wants it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.memfd_create("output")
        self._appended = os.open(f"/proc/self/fd/{self.descriptor}", os.O_WRONLY | os.O_APPEND)
        self.path = path
        self.log = _Log("w", str(path), self.descriptor)
        self.lines = 0

    def print(self, lines: int) -> None:
        os.write(self._appended, b"".join(LINE % (self.lines + n) for n in range(lines)))
        self.lines += lines

    def write(self) -> None:
        while self.log.write():
            pass

    @property
    def held_bytes(self) -> int:
        return 512 * os.fstat(self.descriptor).st_blocks

    def close(self) -> None:
        self.log.close()
        os.close(self._appended)


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    made = Output(tmp_path / "w.log")
    yield made
    made.close()


def test_a_log_is_rotated_and_together_with_the_older_one_has_the_newest_lines(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "LOG_BYTES", 100 * LINE_BYTES)
    monkeypatch.setattr(log_writer, "_PIECE_BYTES", 5 * LINE_BYTES + 3)
    for _ in range(50):
        output.print(13)  # the log is full in the middle of a line
        output.write()
    older = output.path.with_name("w.log.1")
    newest, before = output.path.read_bytes(), older.read_bytes()
    assert {output.path, older} == set(output.path.parent.iterdir())
    assert 90 * LINE_BYTES <= len(before) <= 100 * LINE_BYTES
    assert len(newest) <= 100 * LINE_BYTES
    first = int(newest[:7])
    assert before.endswith(LINE % (first - 1))
    assert newest == b"".join(LINE % n for n in range(first, 650))
    assert output.path.stat().st_mode & 0o777 == 0o600


def test_output_waits_in_memory_for_a_full_disk(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.log.path = "/dev/full"
    output.print(1000)
    output.write()
    assert output.log.look(0.0) == os.strerror(28)
    output.log.look(100.0)
    output.print(1)
    output.log.path = str(output.path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:777]))  # hardly any room
    output.write()
    assert output.log.look(101.0) == ""
    assert output.path.read_bytes() == b"".join(LINE % n for n in range(1001))


def test_the_memory_of_output_that_a_disk_does_not_take_is_bounded(output: Output) -> None:
    for second in range(10):
        output.print(KEPT_BYTES // LINE_BYTES // 2)
        reason = output.log.look(float(second))
        assert output.held_bytes < KEPT_BYTES + 2 * log_writer._PIECE_BYTES + 4096 or second < 2
        assert bool(reason) == (second > log_writer._SILENT_S)
    output.write()
    note, *lines = output.path.read_bytes().split(b"\n")[1:-1]
    lost = int(note.removeprefix(b"[elastic: ").split()[0])
    assert lost + len(b"\n".join(lines)) + 1 == output.lines * LINE_BYTES
    lost_lines = lost // LINE_BYTES
    assert [int(line[:7]) for line in lines[1:]] == list(range(lost_lines + 1, output.lines))
    assert len(lines) * LINE_BYTES >= KEPT_BYTES


def test_a_writer_tells_what_one_that_was_killed_has_freed_without_writing_it(
    output: Output, tmp_path: Path
) -> None:
    output.print((log_writer.KEPT_BYTES + (8 << 20)) // LINE_BYTES)
    hangs = _Log("w", str(tmp_path / "w.log"), os.dup(output.descriptor))
    hangs.look(0.0)
    hangs.look(2.0)
    hangs.close()
    output.log = _Log("w", str(output.path), output.descriptor)
    output.write()
    told, *lines = output.path.read_bytes().splitlines()[1:]
    lost = int(told.split()[1])
    assert b"lost here" in told
    assert b"\0" not in output.path.read_bytes()
    assert lost + sum(len(line) + 1 for line in lines) == output.lines * LINE_BYTES
    assert lines[-1] == (LINE % (output.lines - 1)).rstrip()


def test_nothing_of_surplus_outputs_of_ended_workers_is_kept_for_a_disk_that_hangs(
    output: Output,
) -> None:
    output.print(KEPT_BYTES // LINE_BYTES)
    output.log.look(0.0, 0)
    assert output.held_bytes >= KEPT_BYTES - LINE_BYTES
    output.log.look(2.0, 0)
    assert output.held_bytes <= 4096
    output.write()
    assert output.path.stat().st_size < 100  # how much is lost


def test_a_disk_that_works_loses_nothing_however_fast_the_output_is(output: Output) -> None:
    for now in range(3):
        output.print(2 * KEPT_BYTES // LINE_BYTES)
        assert output.log.look(float(now)) == ""
        output.write()
    output.log.look(3.0)
    assert output.held_bytes < KEPT_BYTES + 2 * log_writer._PIECE_BYTES
    assert output.path.stat().st_size == output.lines * LINE_BYTES


def test_output_goes_on_in_a_new_log_after_its_directory_was_removed(output: Output) -> None:
    output.path = output.path.parent / "gone" / "w.log"
    output.log.path = str(output.path)
    output.print(3)
    output.write()
    assert output.path.read_bytes() == b"".join(LINE % n for n in range(3))


def test_a_log_that_was_replaced_by_a_link_is_not_written(output: Output, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    output.path.symlink_to("other")
    output.print(1)
    output.write()
    assert output.log.look(0.0)
    assert (tmp_path / "other").read_bytes() == b""


def test_a_script_that_opens_its_output_anew_is_written_from_its_start(output: Output) -> None:
    output.print(100)
    output.write()
    with open(f"/proc/self/fd/{output.descriptor}", "wb") as anew:
        anew.write(b"anew\n")
    output.log.look(0.0)
    output.write()
    assert output.path.read_bytes().endswith(b"output\nanew\n")


# ---- the process


Start = Callable[[str], "Worker"]


class Worker:
    """A process that prints what it is told, and the log for it."""

    def __init__(self, writer: LogWriter, name: str, log: Path) -> None:
        self.log = log
        output, end = writer.new_output(name)
        with open(end, "ab") as appended:
            self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=appended)
        writer.write(name, self.process.pid, str(log), output)

    def print(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def has_logged(self, text: bytes) -> bool:
        return self.log.exists() and self.log.read_bytes() == text


_CONSTANTS = ("CLEANER_S", "_KEPT_LOGS", "_KEPT_OUTPUTS", "_LEFT_BEHIND_S")


def _become_writer_in_a_fresh_process(control: socket.socket) -> None:
    """The zygote has one thread. This process may have gRPC's, which do not survive a fork."""
    control.set_inheritable(True)
    code = [
        "import socket",
        "from elastic.runtime import log_writer",
        *(f"log_writer.{name} = {getattr(log_writer, name)!r}" for name in _CONSTANTS),
        f"log_writer._become_writer(socket.socket(fileno={control.fileno()}))",
    ]
    os.execv(sys.executable, [sys.executable, "-c", "\n".join(code)])


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogWriter]:
    monkeypatch.setattr(log_writer, "_become_writer", _become_writer_in_a_fresh_process)
    made = LogWriter()
    yield made
    made.close()
    if made._pid:
        os.kill(made._pid, signal.SIGCONT)
        until(lambda: os.waitpid(made._pid, os.WNOHANG)[0] == made._pid)


@pytest.fixture
def start(writer: LogWriter, tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def start(name: str) -> Worker:
        started.append(Worker(writer, name, tmp_path / f"{name}.log"))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


def test_another_writer_goes_on_where_a_killed_one_has_stopped(
    writer: LogWriter, start: Start
) -> None:
    worker = start("w1")
    worker.print(b"before\n")
    until(lambda: worker.has_logged(b"before\n"))
    os.kill(writer._pid, signal.SIGKILL)
    killed, _ = os.waitpid(writer._pid, 0)
    worker.print(b"after\n")
    writer.child_ended(killed)
    assert writer._pid != killed
    until(lambda: worker.has_logged(b"before\nafter\n"))
    later = start("w2")
    later.print(b"later\n")
    until(lambda: later.has_logged(b"later\n"))


def test_the_writer_ends_when_all_that_its_workers_have_left_is_written(
    writer: LogWriter, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "CLEANER_S", 30.0)  # on a busy machine
    worker, other = start("w1"), start("w2")
    os.kill(writer._pid, signal.SIGSTOP)
    worker.print(b"last words")
    other.print(b"x" * 1_000_000)
    worker.end()
    other.end()
    writer.close()
    os.kill(writer._pid, signal.SIGCONT)
    ended, status = os.waitpid(writer._pid, 0)
    writer._pid = 0
    assert (ended > 0, status) == (True, 0)
    assert worker.has_logged(b"last words")
    assert other.has_logged(b"x" * 1_000_000)


def test_a_worker_that_prints_nothing_has_a_log(start: Start, tmp_path: Path) -> None:
    start("w1")
    until((tmp_path / "w1.log").exists)


def test_the_operator_is_told_once_of_a_log_that_cannot_be_written(
    writer: LogWriter, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "w1.log").mkdir()
    worker = start("w1")
    worker.print(b"one\n")
    told: list[tuple[str, str]] = []
    until(lambda: told.append(heard) if (heard := writer.heard()) else told)
    (tmp_path / "w2.log").mkdir()
    start("w2").print(b"two\n")
    until(lambda: told.append(heard) if (heard := writer.heard()) else len(told) > 1)
    assert told == [("w1", "Is a directory"), ("w2", "Is a directory")]
    for name in ("w1", "w2"):
        (tmp_path / f"{name}.log").rmdir()
    until(lambda: worker.has_logged(b"one\n"))


def test_the_writer_ends_though_the_disk_takes_nothing(
    writer: LogWriter, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "w1.log").mkdir()
    worker = start("w1")
    worker.print(b"one\n")
    writer.close()
    assert os.waitpid(writer._pid, 0)[1] == 0
    writer._pid = 0


def test_the_newest_logs_of_ended_workers_are_kept(
    writer: LogWriter, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_KEPT_LOGS", 3)
    monkeypatch.setattr(log_writer, "_LEFT_BEHIND_S", 0.0)
    monkeypatch.setattr(log_writer, "_KEPT_OUTPUTS", 1)
    for number in range(10):
        worker = start(f"w{number}")
        worker.print(b"%d\n" % number)
        until(lambda worker=worker: worker.log.exists())  # type: ignore[misc]
        worker.log.with_name(f"{worker.log.name}.1").touch()
        worker.end()
        writer.worker_ended(f"w{number}")
    newest = {f"w{n}.log{end}" for n in (7, 8, 9) for end in ("", ".1")}
    until(lambda: {path.name for path in tmp_path.iterdir()} == newest)
    assert len(writer._outputs) == 1


def test_an_output_is_not_taken_for_another_workers() -> None:
    output = os.memfd_create(output_name("w1"))
    path = f"/proc/{os.getpid()}/fd/{output}"
    opened = open_output("w1", path)
    with pytest.raises(OSError, match="No such file"):
        open_output("w2", path)
    os.close(output)
    os.close(opened)
