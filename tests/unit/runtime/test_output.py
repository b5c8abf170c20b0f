"""An output that nobody reads, or that has no space, loses lines but holds nothing up."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.runtime.journal import Entry, JsonLines
from elastic.runtime.output import Output, never_blocking

LINE = "a line of some length\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def read_all(fd: int) -> str:
    with open(fd, "rb") as file:
        return file.read().decode()


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    stream = Output(writer)
    for number in range(1000):
        assert stream.write(f"{number}\n") == len(f"{number}\n")
    print("é\udcff", file=stream)  # a file's name may be undecodable
    stream.end()
    os.close(writer)
    assert read_all(reader).splitlines() == [*map(str, range(1000)), "é\\udcff"]
    assert stream.lost == 0


def test_an_unread_pipe_does_not_block_and_lost_lines_are_reported(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    stream = Output(writer, most_bytes=1 << 20)
    count = (2 << 20) // len(LINE)
    began_s = time.monotonic()
    for _ in range(count):
        stream.write(LINE)
    assert time.monotonic() - began_s < 30.0  # a blocking write would never return
    assert 0 < stream.lost < count
    lost = stream.lost
    text: list[str] = []
    reading = threading.Thread(target=lambda: text.append(read_all(reader)))
    reading.start()
    stream.drain(30.0)
    stream.write("the next one\n")
    stream.end(30.0)
    os.close(writer)
    reading.join(30.0)
    lines = text[0].splitlines(keepends=True)
    assert lines.count(LINE) == count - lost
    assert lines[-1] == "the next one\n"
    told = [line for line in lines[:-1] if line != LINE]  # each where the lines are missing
    assert told == [stream.tell_lost(int(line.split()[1])) for line in told]
    assert sum(int(line.split()[1]) for line in told) == lost


def test_end_gives_up_after_its_timeout_when_nobody_reads(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    stream = Output(writer)
    for _ in range((1 << 20) // len(LINE)):
        stream.write(LINE)
    began_s = time.monotonic()
    stream.end(0.2)
    assert 0.2 <= time.monotonic() - began_s < 30.0


def test_a_pipe_without_a_reader_loses_all_lines_and_buffers_none(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    stream = Output(writer)
    stream.write(LINE)
    stream.drain()
    for _ in range(100_000):
        stream.write(LINE)
    assert not stream._pieces
    assert stream.lost == 100_001
    stream.end(30.0)


def test_a_full_disk_costs_lines_until_there_is_space_again(tmp_path: Path) -> None:
    file = tmp_path / "events"
    fd = os.open("/dev/full", os.O_WRONLY)
    stream = Output(fd)
    lines = JsonLines(stream)
    for step in range(5):
        lines(Entry(unix_s=1.0, name="recovered", fields={"step": step}))
    stream.drain()
    assert stream.lost == 5
    kept = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(kept, fd)
    lines(Entry(unix_s=1.0, name="recovered", fields={"step": 5}, origin={"job": "digits"}))
    stream.end()
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(t["event"], t.get("lines"), t.get("step")) for t in told] == [
        ("events_lost", 5, None),
        ("recovered", None, 5),
    ]
    assert (told[0]["severity"], told[0]["job"]) == ("warning", "digits")
    os.close(fd)
    os.close(kept)


def test_a_line_that_was_written_in_part_is_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events"
    fd = os.open(file, os.O_WRONLY | os.O_CREAT)
    write, space = os.write, [9]

    def little_space(fd: int, data: memoryview) -> int:
        if not space[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, data[: space[0]])
        space[0] -= written
        return written

    stream = Output(fd)
    monkeypatch.setattr(os, "write", little_space)
    stream.write("first\n")
    stream.write("second\n")
    stream.drain()
    space[0] = 1000
    stream.write("third\n")
    stream.end()
    monkeypatch.undo()
    assert file.read_text() == "first\nsec\n" + stream.tell_lost(1) + "third\n"
    os.close(fd)


def test_never_blocking_replaces_stdout_and_stderr(tmp_path: Path) -> None:
    """Warnings that a library logs, tracebacks and prints all go through it, in their order."""
    file = tmp_path / "both"
    kept = [os.dup(fd) for fd in (1, 2)]
    target = os.open(file, os.O_WRONLY | os.O_CREAT)
    before = sys.stdout, sys.stderr
    try:
        for fd in (1, 2):
            os.dup2(target, fd)
        with never_blocking():
            assert sys.stdout is sys.stderr  # the order is kept
            assert isinstance(sys.stdout, Output)
            print("out")
            logging.lastResort.handle(  # type: ignore[union-attr]
                logging.LogRecord("asyncio", logging.ERROR, "", 0, "logged", None, None)
            )
            print("err", file=sys.stderr)
        assert (sys.stdout, sys.stderr) == before
    finally:
        for number, fd in enumerate(kept):
            os.dup2(fd, number + 1)
            os.close(fd)
        os.close(target)
    assert file.read_text().splitlines() == ["out", "logged", "err"]


def test_output_has_the_interface_of_a_text_stream(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    stream = Output(writer)
    assert (stream.writable(), stream.isatty(), stream.fileno()) == (True, False, writer)
    assert stream.encoding == "utf-8"
    with pytest.raises(io.UnsupportedOperation):
        stream.read()
    stream.end()


@pytest.mark.parametrize("how", ["rotated", "removed"])
def test_a_rotated_or_removed_file_is_opened_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.runtime.output._LOOK_S", 0.0)
    path = tmp_path / "events.jsonl"
    with path.open("ab", buffering=0) as file:
        stream = Output(file.fileno(), path=path)
        stream.write("one\n")
        stream.drain()
        if how == "rotated":
            path.rename(tmp_path / "events.jsonl.1")
        else:
            path.unlink()
        stream.write("two\n")
        stream.end()
    assert path.read_text() == "two\n"
    if how == "rotated":
        assert (tmp_path / "events.jsonl.1").read_text() == "one\n"


def test_a_file_whose_directory_is_gone_only_loses_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.runtime.output._LOOK_S", 0.0)
    path = tmp_path / "logs" / "events.jsonl"
    path.parent.mkdir()
    with path.open("ab", buffering=0) as file:
        stream = Output(file.fileno(), path=path)
        path.unlink()
        path.parent.rmdir()
        stream.write("one\n")
        stream.drain()
        path.parent.mkdir()
        stream.write("two\n")
        stream.end()
    assert path.read_text() == "two\n"


IN_THE_BACKGROUND = """
import fcntl, os, sys, termios
from elastic.runtime.output import Output

os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
modes = termios.tcgetattr(0)
modes[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, modes)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    stream = Output(1)
    stream.write("from the background")
    stream.end()
    os._exit(0)
_, status = os.waitpid(child, os.WUNTRACED)
os.killpg(child, 9) if os.WIFSTOPPED(status) else None
sys.exit(os.WIFSTOPPED(status))
"""


def test_a_terminal_with_tostop_does_not_stop_a_background_job() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", IN_THE_BACKGROUND]
    ended = subprocess.run(command, stdin=theirs, stdout=theirs, timeout=30, check=False)
    os.close(theirs)
    assert ended.returncode == 0
    assert os.read(ours, 100) == b"from the background"
    os.close(ours)
