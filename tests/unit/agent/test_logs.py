"""Every line that a worker writes is handed out once, whole and in order."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from elastic.agent import logs
from elastic.agent.logs import LogFollower, WorkerLog

Lines = list[tuple[str, str]]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def lines() -> Lines:
    """The lines that were handed out, each with its worker."""
    return []


@pytest.fixture
def follower(lines: Lines) -> LogFollower:
    return LogFollower(lambda worker, line: lines.append((worker, line)))


def log_at(path: Path) -> WorkerLog:
    path.touch()
    return WorkerLog(path, os.open(path, os.O_RDWR | os.O_APPEND))


@pytest.fixture
def path(tmp_path: Path, follower: LogFollower) -> Path:
    """The output of worker "a", which is followed."""
    follower.follow("a", log_at(tmp_path / "a.log"))
    return tmp_path / "a.log"


def test_lines_are_handed_out_when_they_are_whole(
    path: Path, follower: LogFollower, lines: Lines
) -> None:
    follower.poll()
    append(path, b"one\ntw")
    follower.poll()
    assert lines == [("a", "one")]
    append(path, b"o\n\nthr")
    follower.poll()
    follower.poll()
    assert lines == [("a", "one"), ("a", "two"), ("a", "")]


def test_a_truncated_log_is_followed_from_its_begin(
    path: Path, follower: LogFollower, lines: Lines
) -> None:
    """A script that opens /dev/stdout does this."""
    append(path, b"one\nnot whole")
    follower.poll()
    path.write_bytes(b"")
    append(path, b"two\n")
    follower.poll()
    path.write_bytes(b"")
    follower.poll()
    append(path, b"three\n")
    follower.poll()
    assert lines == [("a", "one"), ("a", "two"), ("a", "three")]


def test_a_character_may_arrive_in_parts(path: Path, follower: LogFollower, lines: Lines) -> None:
    for byte in "lößs: 0.5 → ✓\n".encode():
        append(path, bytes([byte]))
        follower.poll()
    append(path, b"\xff is no text\n")
    follower.poll()
    assert lines == [("a", "lößs: 0.5 → ✓"), ("a", "\ufffd is no text")]


def test_output_that_comes_faster_than_it_can_be_shown_stays_in_the_file(
    path: Path, follower: LogFollower, lines: Lines
) -> None:
    append(path, b"first\n")
    follower.poll()
    with path.open("ab") as file:
        for number in range(1_000_000):
            file.write(b"line %07d\n" % number)
    looks = 0
    while lines[-1][1] != "line 0999999":
        before = len(lines)
        follower.poll()
        looks += 1
        assert before < len(lines) <= before + logs._MOST_AT_ONCE + 1
    assert looks < 100
    shown = [line for _, line in lines]
    assert shown[1].startswith("[12.7 MB of output not shown; see ")
    assert shown[1].endswith(f"{path}]")
    first = int(shown[2].removeprefix("line "))
    assert shown[2:] == [f"line {n:07d}" for n in range(first, 1_000_000)]


def test_the_last_lines_are_shown_at_once_at_the_end_however_much_is_left(
    path: Path, follower: LogFollower, lines: Lines
) -> None:
    with path.open("wb") as file:  # sparse: 40 GB of zeros without a newline
        file.seek(40 << 30)
        file.write(b"\nlast words\n")
    follower.forget("a")
    assert lines[-1] == ("a", "last words")
    assert len(lines) < 100


@pytest.mark.parametrize("size", [1 << 20, 30 << 20])
def test_the_number_of_lines_that_are_handed_out_at_the_end_is_bounded(
    size: int, path: Path, follower: LogFollower, lines: Lines
) -> None:
    append(path, b"\n" * size + b"last words\n")
    follower.forget("a")
    assert lines[-1] == ("a", "last words")
    assert len(lines) == 1 + logs._MOST_LEFT_LINES
    left = size + 1 - logs._MOST_LEFT_LINES
    assert lines[0] == ("a", f"[{left / 1e6:.1f} MB of output not shown; see {path}]")


def test_a_line_without_end_is_handed_out_in_pieces(
    path: Path, follower: LogFollower, lines: Lines
) -> None:
    for _ in range(10):
        append(path, b"x" * 10_000)
        follower.poll()
        assert len(follower._followed["a"].rest) <= logs._LONGEST_LINE
    append(path, b"\nnext\n")
    follower.poll()
    assert "".join(line for _, line in lines[:-1]) == "x" * 100_000
    assert max(len(line) for _, line in lines) == logs._LONGEST_LINE
    assert lines[-1] == ("a", "next")


def test_a_progress_bar_is_shown_once_a_second(
    path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    for percent in range(100):
        append(path, b"\r%d%% " % percent)
        now[0] += 0.1
        follower.poll()
    append(path, b"\rdone\nwith\r\nends\r")
    follower.poll()
    append(path, b"\n")
    follower.poll()
    shown = [line for _, line in lines]
    assert shown[-3:] == ["done", "with", "ends"]
    assert 8 <= len(shown[:-3]) <= 12  # once a second
    assert shown[0] == "0% "


def test_forget_hands_out_the_rest(
    path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hands out all of the rest, even if one look does not show everything."""
    monkeypatch.setattr(logs, "_MOST_BYTES", 7)
    append(path, b"".join(b"line %d\n" % i for i in range(9)) + b"last words")
    follower.forget("a")
    assert [line for _, line in lines] == [*(f"line {i}" for i in range(9)), "last words"]
    append(path, b"unheard\n")
    follower.poll()
    follower.forget("a")
    assert len(lines) == 10


def test_a_worker_that_never_wrote_can_be_forgotten(tmp_path: Path, follower: LogFollower) -> None:
    follower.follow("a", WorkerLog(tmp_path / "a.log"))
    follower.poll()
    follower.forget("a")
    follower.forget("unknown")


def test_lines_of_workers_do_not_mix(tmp_path: Path, follower: LogFollower, lines: Lines) -> None:
    for name in ("a", "b"):
        follower.follow(name, log_at(tmp_path / name))
        append(tmp_path / name, f"from {name}".encode())
    follower.poll()
    for name in ("b", "a"):
        append(tmp_path / name, b"!\n")
    follower.poll()
    assert lines == [("a", "from a!"), ("b", "from b!")]


async def test_run_looks_again_and_again(
    path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_INTERVAL_S", 0.001)
    running = asyncio.ensure_future(follower.run())
    for number in range(3):
        append(path, b"%d\n" % number)
        while len(lines) <= number:
            await asyncio.sleep(0.001)
    running.cancel()


def test_output_that_is_freed_while_it_is_read_is_not_handed_out(
    path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "KEPT_BYTES", 100)
    pread = os.pread

    def pread_slowly(descriptor: int, count: int, offset: int) -> bytes:
        monkeypatch.setattr(os, "pread", pread)
        append(path, b"more\n" * 30)
        return b"\0" * len(pread(descriptor, count, offset))

    append(path, b"one\n")
    monkeypatch.setattr(os, "pread", pread_slowly)
    follower.poll()
    assert lines == []


def test_last_lines_reads_only_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert logs.last_lines(path) == ""
    with path.open("wb") as file:
        file.seek(40 << 30)
        file.write(b"".join(b"\nline %d" % n for n in range(30)) + b"\n10%\r20%\n")
    assert logs.last_lines(path).splitlines() == [*(f"line {n}" for n in range(11, 30)), "20%"]
    assert logs.last_lines(path, 25).splitlines()[0] == "line 6"
    path.write_bytes(b"x" * 5000)
    assert logs.last_lines(path) == "x" * 2000
