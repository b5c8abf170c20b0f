"""The ledger has each step of the surviving lineage once, even if others report it again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.step_recorder import LedgerFile
from elastic.errors import ConfigurationError, TransientError
from elastic.v1 import job_pb2 as pb
from examples.ledger_check import audit


def entries(steps: Iterable[int], generation: int = 1, run: str = "first") -> list[pb.LedgerEntry]:
    fields = {"run": run, "generation": generation, "world_size": 2}
    return [pb.LedgerEntry(step=s, start=8 * s, stop=8 * s + 8, **fields) for s in steps]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def ledger(path: Path) -> Iterator[LedgerFile]:
    ledger = begun(path)
    yield ledger
    ledger.close()


def begun(path: Path, run: str = "first") -> LedgerFile:
    ledger = LedgerFile(path, incarnation=run)
    ledger.open()
    return ledger


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sound_steps(path: Path) -> int:
    """The number of steps that an audit of the ledger counts; it must find no problem."""
    result = audit(path.read_text().splitlines(), samples=100)
    assert result.problems == ()
    return result.steps


def story(path: Path) -> list[object]:
    """Steps as (step, generation); other lines as their first key and its value."""
    return [
        (line["step"], line["generation"]) if "step" in line else next(iter(line.items()))
        for line in lines(path)
    ]


def test_a_line_says_which_samples_a_step_used(ledger: LedgerFile, path: Path) -> None:
    told = entries([0, 1])
    told[-1].loader = 3
    assert ledger.append(told).committed == 2
    assert lines(path)[0] == {"incarnation": "first"}
    assert lines(path)[-1] == {
        "step": 1,
        "epoch": 0,
        "run": "first",
        "generation": 1,
        "world_size": 2,
        "start": 8,
        "stop": 16,
        "loader": 3,
    }


def test_an_empty_report_stores_nothing(ledger: LedgerFile) -> None:
    assert ledger.append([]).committed == 0


def test_steps_that_are_reported_again_are_skipped(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries([0, 1, 2]))
    before = path.read_text()
    assert ledger.append(entries([1, 2])).committed == 3
    assert path.read_text() == before
    assert ledger.append([*entries([2]), *entries([3]), *entries([4], generation=2)]).committed == 5
    assert story(path)[-3:] == [(2, 1), (3, 1), (4, 2)]


def test_lost_steps_are_taken_back_by_a_resume_line(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries(range(6)))
    assert ledger.append([*entries([2]), *entries([3, 4], generation=2)]).committed == 5
    assert story(path)[-3:] == [("resume", 3), (3, 2), (4, 2)]


def test_a_late_report_of_an_abandoned_lineage_is_ignored(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries(range(4)))
    ledger.append(entries([2], generation=3))
    before = path.read_text()
    assert ledger.append(entries([3, 4], generation=1)).committed == 3
    assert path.read_text() == before


def test_a_run_that_begins_from_a_checkpoint_continues_the_ledger_from_its_step(path: Path) -> None:
    """The first run has changed its group and stored more steps than its last checkpoint has."""
    ledger = begun(path)
    ledger.append([*entries(range(2), generation=1), *entries([2, 3, 4], generation=5)])
    ledger.close()
    ledger = begun(path, "second")
    earlier = entries([1], generation=1) + entries([2], generation=5)  # not known to be stored
    stored = ledger.append(earlier)
    assert (stored.committed, stored.run, stored.generation) == (3, "second", 0)
    stored = ledger.append([*earlier, *entries([3, 4], generation=1, run="second")])
    assert (stored.committed, stored.run, stored.generation) == (5, "second", 1)
    ledger.append(entries([5], generation=2, run="second"))
    before = path.read_text()
    ledger.append(earlier)
    assert path.read_text() == before
    ledger.close()
    section = lines(path)[lines(path).index({"incarnation": "second"}) + 1 :]
    assert [(e.get("resume"), e.get("step"), e["run"], e["generation"]) for e in section] == [
        (1, None, "first", 1),
        (None, 1, "first", 1),
        (None, 2, "first", 5),
        (None, 3, "second", 1),
        (None, 4, "second", 1),
        (None, 5, "second", 2),
    ]


def test_a_run_that_begins_at_step_0_takes_back_all_earlier_steps(path: Path) -> None:
    for run in ("first", "second"):
        ledger = begun(path, run)
        ledger.append(entries(range(2), run=run))
        ledger.close()
    assert story(path)[4:] == [("incarnation", "second"), ("resume", 0), (0, 1), (1, 1)]


def test_a_new_leader_of_the_same_run_writes_steps_that_it_hears_again(path: Path) -> None:
    for steps in ([0, 1, 2], [2, 3]):
        ledger = begun(path)
        ledger.append(entries(steps, generation=4))
        ledger.close()
    assert story(path)[5:] == [("incarnation", "first"), ("resume", 2), (2, 4), (3, 4)]


def test_steps_that_append_has_counted_are_in_the_file(ledger: LedgerFile, path: Path) -> None:
    """A buffer would not do: members forget the steps that they are told are stored."""
    stored = ledger.append(entries(range(3)))
    assert lines(path)[-1]["step"] == stored.committed - 1


def test_a_ledger_that_was_removed_continues_in_a_new_file(ledger: LedgerFile, path: Path) -> None:
    ledger.append(entries([0, 1]))
    path.unlink()
    assert ledger.append(entries([1, 2])).committed == 3
    assert story(path) == [("incarnation", "first"), (2, 1)]


@pytest.mark.parametrize("again", [False, True], ids=["moved", "another in its place"])
def test_a_ledger_that_was_rotated_continues_at_its_path(
    ledger: LedgerFile, path: Path, again: bool
) -> None:
    ledger.append(entries([0, 1]))
    path.rename(path.with_suffix(".old"))
    if again:
        path.touch()
    assert ledger.append(entries([1, 2])).committed == 3
    assert story(path) == [("incarnation", "first"), (2, 1)]


def test_a_ledger_whose_directory_is_away_continues_when_it_is_back(
    ledger: LedgerFile, path: Path
) -> None:
    ledger.append(entries([0, 1]))
    away = path.parent.rename(path.parent.with_name("away"))
    with pytest.raises(FileNotFoundError):
        ledger.append(entries([2]))
    away.rename(path.parent)
    assert ledger.append(entries([2])).committed == 3
    assert (2, 1) in story(path)


def test_a_path_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing.*--ledger"):
        LedgerFile(tmp_path / "missing" / "ledger", incarnation="first").open()
    with pytest.raises(ConfigurationError, match="directory"):
        LedgerFile(tmp_path, incarnation="first").open()


def test_a_line_cut_short_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"incarnation": "a"}\n{"step": 0, "epo')
    begun(path, "b").close()
    assert path.read_text().splitlines()[2] == '{"incarnation": "b"}'


BEGIN = '{"incarnation": "a"}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"import torch\nprint(1)",
        b"a note",
        b"{\n",
        b"{}",
        b"\n" + BEGIN.encode(),
        b"\xff\xfe\x00" * 1000,
        b"\x7fELF" * (1 << 19),
        b'{"step": 3, "generation": 1, "unix_s": 3.25, "values": {"loss": 0.5}}\n',
        b"[" * 100_000,
    ],
    ids=["script", "text", "json", "object", "empty line", "binary", "long", "curve", "nested"],
)
def test_a_file_that_is_no_ledger_is_refused_and_stays_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigurationError, match=r"ledger.jsonl is not a ledger.*--ledger"):
        begun(path)
    assert path.read_bytes() == content
    assert os.listdir("/proc/self/fd") == descriptors


@pytest.mark.parametrize("line", [BEGIN[:n] for n in range(2, len(BEGIN))])
def test_a_ledger_whose_first_line_is_cut_short_is_one(path: Path, line: str) -> None:
    path.write_text(line)
    for _ in range(2):
        begun(path, "b").close()
    assert path.read_text() == f"{line}\n" + 2 * '{"incarnation": "b"}\n'


def test_a_ledger_of_which_the_first_lines_were_removed_is_one(
    ledger: LedgerFile, path: Path
) -> None:
    ledger.append([*entries([0, 1]), *entries([1], generation=2)])
    whole = path.read_text().splitlines(keepends=True)
    for removed in range(len(whole) + 1):
        path.write_text("".join(whole[removed:]))
        begun(path).close()


def test_a_ledger_that_another_run_writes_is_left_alone_until_that_ends(path: Path) -> None:
    first = begun(path)
    first.append(entries([0, 1]))
    before = path.read_text()
    with pytest.raises(TransientError, match=r"ledger.jsonl is being written by another.*--ledger"):
        LedgerFile(path, incarnation="second", alone=True).open()
    second = LedgerFile(path, incarnation="second")
    with pytest.raises(OSError, match="another run"):
        second.open()
    with pytest.raises(OSError, match="another run"):
        second.append(entries([0], run="second"))
    assert path.read_text() == before
    first.append(entries([2]))
    first.close()
    assert second.append(entries([0, 1], run="second")).committed == 2
    second.close()
    assert sound_steps(path) == 2


def test_the_next_leader_writes_though_the_one_before_has_not_closed_the_ledger(path: Path) -> None:
    deposed = begun(path)
    deposed.append(entries([0, 1]))
    ledger = begun(path)
    assert ledger.append(entries([1, 2], generation=2)).committed == 3
    assert sound_steps(path) == 3
    for each in (deposed, ledger):
        each.close()


# ---- writes that fail

NO_SPACE = OSError(28, "No space left on device")


def writes_of(most: int) -> Callable[[int, bytes], int]:
    """An `os.write` to a disk with room for `most` bytes."""
    left = [most]
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise NO_SPACE
        written = write(descriptor, bytes(data)[: left[0]])
        left[0] -= written
        return written

    return limited


def test_a_full_disk_at_the_begin_is_no_configuration_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        LedgerFile(Path("/dev/full"), incarnation="first").open()


@pytest.mark.parametrize("room", [0, 1, 100, 150, 250])
def test_steps_that_did_not_fit_are_written_whole_when_there_is_room_again(
    ledger: LedgerFile, path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    ledger.append(entries([0, 1]))
    with monkeypatch.context() as full:
        full.setattr(os, "write", writes_of(room))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                ledger.append(entries([2, 3, 4]))
    assert ledger.append([]).committed == 2
    assert ledger.append(entries([2, 3, 4, 5])).committed == 6
    assert sound_steps(path) == 6


def test_half_a_line_that_cannot_be_cut_off_does_not_spoil_the_ledger(
    ledger: LedgerFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _size: int) -> None:
        raise OSError(5, "Input/output error")

    ledger.append(entries([0, 1]))
    with monkeypatch.context() as full:
        full.setattr(os, "write", writes_of(150))
        full.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="No space left"):
            ledger.append(entries([2, 3, 4]))
    assert not path.read_text().endswith("\n")
    assert ledger.append(entries([2, 3, 4, 5])).committed == 6
    assert sound_steps(path) == 6


def test_steps_that_did_not_reach_the_disk_are_written_again(
    ledger: LedgerFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    ledger.append(entries([0, 1]))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output"):
            ledger.append(entries([2, 3]))
    assert [line["step"] for line in lines(path) if "step" in line] == [0, 1]
    assert ledger.append(entries([0, 1, 2, 3])).committed == 4
    assert sound_steps(path) == 4


def test_a_failed_append_does_not_cut_off_what_another_leader_has_written_since(
    ledger: LedgerFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next leader may already write while the disk holds up this one."""

    def fail(_descriptor: int) -> None:
        with path.open("a") as other:
            other.write(json.dumps({"incarnation": "first"}) + "\n")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        ledger.append(entries([0]))
    assert story(path)[-3:] == [("resume", 0), (0, 1), ("incarnation", "first")]


def test_a_ledger_may_be_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ledger = begun(path)
    assert ledger.append(entries([0])).committed == 1
    ledger.close()
    assert os.read(reader, 1 << 16).count(b"\n") == 3
    os.close(reader)
