"""Every line that a worker writes is handed out once, whole and in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic.agent import logs
from elastic.agent.logs import LogFollower

Lines = list[tuple[str, str]]


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def follower(lines: Lines) -> LogFollower:
    return LogFollower(lambda worker, line: lines.append((worker, line)))


def test_lines_are_handed_out_when_they_are_whole(
    tmp_path: Path, follower: LogFollower, lines: Lines
) -> None:
    path = tmp_path / "a.log"
    follower.follow("a", path)
    follower.poll()  # not there yet
    append(path, b"one\ntw")
    follower.poll()
    assert lines == [("a", "one")]
    append(path, b"o\n\nthr")
    follower.poll()
    follower.poll()
    assert lines == [("a", "one"), ("a", "two"), ("a", "")]


def test_a_character_may_be_cut_anywhere(
    tmp_path: Path, follower: LogFollower, lines: Lines
) -> None:
    path = tmp_path / "a.log"
    follower.follow("a", path)
    for byte in "lößs: 0.5 → ✓\n".encode():
        append(path, bytes([byte]))
        follower.poll()
    append(path, b"\xff is no text\n")
    follower.poll()
    assert lines == [("a", "lößs: 0.5 → ✓"), ("a", "\ufffd is no text")]


def test_forget_hands_out_the_rest(
    tmp_path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, also where one look does not show everything."""
    monkeypatch.setattr(logs, "_MOST_BYTES", 7)
    path = tmp_path / "a.log"
    follower.follow("a", path)
    append(path, b"".join(b"line %d\n" % i for i in range(9)) + b"last words")
    follower.forget("a")
    assert [line for _, line in lines] == [*(f"line {i}" for i in range(9)), "last words"]
    append(path, b"unheard\n")
    follower.poll()
    follower.forget("a")
    assert len(lines) == 10


def test_forgetting_a_worker_that_never_wrote(tmp_path: Path, follower: LogFollower) -> None:
    follower.follow("a", tmp_path / "a.log")
    follower.forget("a")
    follower.forget("unknown")


def test_workers_are_kept_apart(tmp_path: Path, follower: LogFollower, lines: Lines) -> None:
    for name in ("a", "b"):
        follower.follow(name, tmp_path / name)
        append(tmp_path / name, f"from {name}".encode())
    follower.poll()
    for name in ("b", "a"):
        append(tmp_path / name, b"!\n")
    follower.poll()
    assert lines == [("a", "from a!"), ("b", "from b!")]


def test_run_looks_again_and_again(
    tmp_path: Path, follower: LogFollower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_INTERVAL_S", 0.001)

    async def check() -> None:
        follower.follow("a", tmp_path / "a.log")
        running = asyncio.ensure_future(follower.run())
        for number in range(3):
            append(tmp_path / "a.log", b"%d\n" % number)
            while len(lines) <= number:
                await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(asyncio.wait_for(check(), 10))
